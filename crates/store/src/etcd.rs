//! The engine for several servers: etcd v3 (3.4 and later).
//!
//! A key's revision is its `mod_revision`; a write is a transaction that compares it. A watch asks etcd for
//! all keys and picks its own: only so can it tell how far it has got when others write, and the server has
//! one watch for everything anyway.

mod leases;
mod watch;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use etcd_client::{
    Certificate, Client, Compare, CompareOp, ConnectOptions, GetOptions, GetResponse, Identity, KeyValue,
    KvClient, PutOptions, TlsOptions, Txn, TxnOp, TxnOpResponse,
};

use self::leases::Leases;
use crate::{Entry, Error, Expect, Listener, Page, Revision, Store, Watch, Write};

/// Keys asked for at a time; the parts of a longer list are read at one revision.
const PART: usize = 2000;
/// Reads are tried this often when etcd cannot be reached, each time waiting twice as long.
const ATTEMPTS: u32 = 6;
const FIRST_WAIT: Duration = Duration::from_millis(50);
/// A read of many large values may be long; the sender bounds it, not the wire.
const MESSAGE_BYTES: usize = 1 << 30;

#[derive(Clone)]
pub struct Options {
    pub connect_timeout: Duration,
    /// How long one request may take.
    pub timeout: Duration,
    /// For `https` endpoints.
    pub tls: Option<Tls>,
    pub user: Option<(String, String)>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            connect_timeout: Duration::from_secs(5),
            timeout: Duration::from_secs(30),
            tls: None,
            user: None,
        }
    }
}

/// All PEM.
#[derive(Clone)]
pub struct Tls {
    pub ca: Vec<u8>,
    /// Our certificate and key.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
}

pub struct EtcdStore {
    client: Client,
    timeout: Duration,
    leases: Leases,
}

impl EtcdStore {
    /// Fails if etcd does not answer; later on, reads and watches outlive a broken connection.
    pub async fn connect(endpoints: &[impl AsRef<str>], options: Options) -> Result<EtcdStore, Error> {
        let mut connect = ConnectOptions::new()
            .with_connect_timeout(options.connect_timeout)
            .with_keep_alive(Duration::from_secs(10), Duration::from_secs(5))
            .with_keep_alive_while_idle(true)
            .with_require_leader(true);
        if let Some((name, password)) = options.user {
            connect = connect.with_user(name, password).with_auto_token_refresh(true);
        }
        if let Some(tls) = options.tls {
            let mut with = TlsOptions::new().ca_certificate(Certificate::from_pem(tls.ca));
            if let Some((certificate, key)) = tls.identity {
                with = with.identity(Identity::from_pem(certificate, key));
            }
            connect = connect.with_tls(with);
        }
        let endpoints: Vec<&str> = endpoints.iter().map(AsRef::as_ref).collect();
        let client = Client::connect(endpoints, Some(connect)).await.map_err(|error| unavailable(&error))?;
        let leases = Leases::new(client.lease_client());
        let store = EtcdStore { client, timeout: options.timeout, leases };
        store.revision().await?;
        Ok(store)
    }

    fn kv(&self) -> KvClient {
        self.client.kv_client().max_decoding_message_size(MESSAGE_BYTES)
    }

    /// Reads; they may be repeated, so an unreachable server is asked again.
    async fn range(
        &self,
        key: &str,
        options: GetOptions,
        at: Option<Revision>,
    ) -> Result<GetResponse, Error> {
        let mut wait = FIRST_WAIT;
        for attempt in 1.. {
            let mut kv = self.kv();
            let asked = tokio::time::timeout(self.timeout, kv.get(key, Some(options.clone())));
            match asked.await {
                Ok(Ok(response)) => return Ok(response),
                Ok(Err(error)) => {
                    if let Some(error) = self.revision_error(&error, at).await {
                        return Err(error);
                    }
                    if attempt == ATTEMPTS {
                        return Err(unavailable(&error));
                    }
                }
                Err(_) => break,
            }
            tokio::time::sleep(wait).await;
            wait *= 2;
        }
        Err(timed_out())
    }

    /// What etcd has to say about the revision asked for.
    async fn revision_error(&self, error: &etcd_client::Error, at: Option<Revision>) -> Option<Error> {
        let etcd_client::Error::GRpcStatus(status) = error else { return None };
        let asked = at?;
        if status.message().contains("required revision has been compacted") {
            return Some(Error::Compacted { asked, oldest: asked + 1 });
        }
        if status.message().contains("required revision is a future revision") {
            let mut kv = self.kv();
            let options = Some(GetOptions::new().with_count_only());
            let now = tokio::time::timeout(self.timeout, kv.get("\0", options)).await;
            let current = match &now {
                Ok(Ok(response)) => header_revision(response.header()),
                // Only the message suffers.
                Ok(Err(_)) | Err(_) => 0,
            };
            return Some(Error::Future { asked, current });
        }
        None
    }

    /// Whether history still (and already) has this revision.
    async fn check_readable(&self, revision: Revision) -> Result<(), Error> {
        let options = at_revision(GetOptions::new().with_count_only(), revision)?;
        self.range("\0", options, Some(revision)).await.map(drop)
    }

    async fn transact(&self, write: &Write, lease: Option<i64>) -> Result<Transacted, etcd_client::Error> {
        let key = write.key.as_bytes();
        let expected = match write.expect {
            Expect::Absent => 0,
            Expect::Revision(revision) => i64::try_from(revision).unwrap_or(i64::MAX),
        };
        let operation = match &write.value {
            Some(value) => {
                let options = lease.map(|lease| PutOptions::new().with_lease(lease));
                TxnOp::put(key, value.as_ref(), options)
            }
            None => TxnOp::delete(key, None),
        };
        let txn = Txn::new()
            .when([Compare::mod_revision(key, CompareOp::Equal, expected)])
            .and_then([operation])
            .or_else([TxnOp::get(key, None)]);
        let response = self.kv().txn(txn).await?;
        if response.succeeded() {
            return Ok(Transacted::Done(header_revision(response.header())));
        }
        let current = response.op_responses().into_iter().find_map(|response| match response {
            TxnOpResponse::Get(mut response) => response.take_kvs().into_iter().next(),
            _ => None,
        });
        Ok(Transacted::Refused(current.and_then(entry)))
    }
}

enum Transacted {
    Done(Revision),
    Refused(Option<Entry>),
}

#[async_trait]
impl Store for EtcdStore {
    async fn revision(&self) -> Result<Revision, Error> {
        let response = self.range("\0", GetOptions::new().with_count_only(), None).await?;
        Ok(header_revision(response.header()))
    }

    async fn get(&self, key: &str) -> Result<Option<Entry>, Error> {
        let mut response = self.range(key, GetOptions::new(), None).await?;
        Ok(response.take_kvs().into_iter().next().and_then(entry))
    }

    async fn list(
        &self,
        prefix: &str,
        from: Option<&str>,
        limit: usize,
        at: Option<Revision>,
    ) -> Result<Page, Error> {
        let mut start = from.map_or(prefix, |from| from.max(prefix)).to_owned();
        if !start.starts_with(prefix) {
            let revision = match at {
                Some(revision) => self.check_readable(revision).await.map(|()| revision)?,
                None => self.revision().await?,
            };
            return Ok(Page { entries: Vec::new(), revision, remaining: 0 });
        }
        if start.is_empty() {
            start.push('\0');
        }
        let (mut entries, mut revision) = (Vec::new(), at);
        loop {
            let left = if limit == 0 { PART } else { PART.min(limit - entries.len()) };
            let mut options = GetOptions::new().with_range(range_end(prefix)).with_limit(left as i64);
            if let Some(revision) = revision {
                options = at_revision(options, revision)?;
            }
            let mut response = self.range(&start, options, revision).await?;
            let revision = *revision.get_or_insert_with(|| header_revision(response.header()));
            let (more, count) = (response.more(), usize::try_from(response.count()).unwrap_or(0));
            let found = response.take_kvs();
            let remaining = count.saturating_sub(found.len());
            entries.extend(found.into_iter().filter_map(entry));
            match entries.last() {
                Some(last) if more && (limit == 0 || entries.len() < limit) => {
                    start = format!("{}\0", last.key);
                }
                _ => return Ok(Page { entries, revision, remaining }),
            }
        }
    }

    async fn write(&self, write: Write) -> Result<Revision, Error> {
        let key = write.key.clone();
        // etcd would take these for "create" and "do nothing".
        match (write.expect, &write.value) {
            (Expect::Revision(0), _) => {
                return Err(Error::Conflict { current: self.get(&key).await?, key });
            }
            (Expect::Absent, None) => {
                return Err(match self.get(&key).await? {
                    Some(_) => Error::Exists { key },
                    None => Error::Conflict { key, current: None },
                });
            }
            _ => {}
        }
        let ttl = write.ttl.filter(|_| write.value.is_some());
        let act = async {
            for last in [false, true] {
                let lease = match ttl {
                    Some(ttl) => Some(self.leases.get(ttl).await?),
                    None => None,
                };
                match self.transact(&write, lease).await {
                    // It ran out under us; the next one is new.
                    Err(etcd_client::Error::GRpcStatus(status))
                        if !last && status.message().contains("requested lease not found") =>
                    {
                        self.leases.forget().await;
                    }
                    other => return other,
                }
            }
            Err(etcd_client::Error::LeaseKeepAliveError("no lease".into()))
        };
        match tokio::time::timeout(self.timeout, act).await {
            Ok(Ok(Transacted::Done(revision))) => Ok(revision),
            Ok(Ok(Transacted::Refused(Some(_)))) if write.expect == Expect::Absent => {
                Err(Error::Exists { key })
            }
            Ok(Ok(Transacted::Refused(current))) => Err(Error::Conflict { key, current }),
            Ok(Err(error)) => Err(unavailable(&error)),
            Err(_) => Err(timed_out()),
        }
    }

    async fn watch(&self, prefix: &str, after: Revision, listener: Listener) -> Result<Watch, Error> {
        self.check_readable(after).await?;
        let client = self.client.watch_client().max_decoding_message_size(MESSAGE_BYTES);
        Ok(watch::start(client, prefix, after, listener))
    }

    async fn compact(&self, revision: Revision) -> Result<(), Error> {
        let asked = i64::try_from(revision)
            .map_err(|_| Error::Future { asked: revision, current: i64::MAX as u64 })?;
        let mut kv = self.kv();
        match tokio::time::timeout(self.timeout, kv.compact(asked, None)).await {
            Err(_) => Err(timed_out()),
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => match self.revision_error(&error, Some(revision)).await {
                Some(Error::Compacted { .. }) => Ok(()),
                Some(error) => Err(error),
                None => Err(unavailable(&error)),
            },
        }
    }
}

/// Revision 0 means "now" to etcd, but is one that no reader may ask for.
fn at_revision(options: GetOptions, revision: Revision) -> Result<GetOptions, Error> {
    match i64::try_from(revision) {
        Ok(0) => Err(Error::Compacted { asked: 0, oldest: 1 }),
        Ok(revision) => Ok(options.with_revision(revision)),
        Err(_) => Err(Error::Future { asked: revision, current: i64::MAX as u64 }),
    }
}

/// The least key that is greater than all with this prefix; `"\0"` stands for "no end".
fn range_end(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    match end.last_mut() {
        // No byte of a str is 0xFF.
        Some(last) => *last += 1,
        None => end.push(0),
    }
    end
}

/// Keys that are not text are none of ours.
fn entry(kv: KeyValue) -> Option<Entry> {
    let revision = u64::try_from(kv.mod_revision()).ok()?;
    let (key, value) = kv.into_key_value();
    Some(Entry { key: Arc::from(String::from_utf8(key).ok()?), value: Bytes::from(value), revision })
}

fn header_revision(header: Option<&etcd_client::ResponseHeader>) -> Revision {
    header.and_then(|header| u64::try_from(header.revision()).ok()).unwrap_or(0)
}

fn unavailable(error: &etcd_client::Error) -> Error {
    let reason = match error {
        etcd_client::Error::GRpcStatus(status) => status.message().to_owned(),
        other => other.to_string(),
    };
    Error::Unavailable { reason: format!("etcd: {reason}") }
}

fn timed_out() -> Error {
    Error::Unavailable { reason: "etcd did not answer in time".into() }
}

#[cfg(test)]
mod tests;
