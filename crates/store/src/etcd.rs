//! The etcd engine, for clusters with several servers: etcd v3 (3.4 and later).
//!
//! The revision of a key is its `mod_revision`; a write is a transaction that compares it. A watch
//! requests all keys from etcd and filters them here, because etcd reports no progress for a prefix
//! while other keys change. The server has a single watch for everything anyway.

mod client;
mod leases;
mod messages;
mod watch;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tonic::Status;

use self::client::Client;
use self::leases::LeaseManager;
use self::messages::{
    Compare, DeleteRangeRequest, Header, KeyValue, PutRequest, RangeRequest, RangeResponse, RequestOp,
    TxnRequest,
};
use crate::{Entry, Error, Expect, Listener, Page, Revision, Store, Watch, Write};

/// Keys per range request. All pages of a list are read at the same revision.
const PAGE_KEYS: usize = 2000;
/// The number of attempts for a read while etcd is unreachable, with exponential backoff.
const MAX_READ_ATTEMPTS: u32 = 6;
const INITIAL_BACKOFF: Duration = Duration::from_millis(50);

#[derive(Clone)]
pub struct Options {
    pub connect_timeout: Duration,
    /// The timeout of a request.
    pub timeout: Duration,
    /// TLS settings for `https` endpoints.
    pub tls: Option<Tls>,
}

impl Default for Options {
    fn default() -> Options {
        Options { connect_timeout: Duration::from_secs(5), timeout: Duration::from_secs(30), tls: None }
    }
}

/// TLS settings, all in PEM.
#[derive(Clone)]
pub struct Tls {
    pub ca: Vec<u8>,
    /// The client certificate and its key.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
}

pub struct EtcdStore {
    client: Client,
    timeout: Duration,
    leases: LeaseManager,
}

impl EtcdStore {
    /// Fails if etcd does not respond. Later, reads and watches survive a broken connection.
    pub async fn connect(endpoints: &[impl AsRef<str>], options: Options) -> Result<EtcdStore, Error> {
        let client = Client::new(endpoints, &options)?;
        let leases = LeaseManager::new(client.clone());
        let store = EtcdStore { client, timeout: options.timeout, leases };
        store.revision().await?;
        Ok(store)
    }

    /// Sends a range request. Reads are idempotent, so they are retried while the server is
    /// unreachable.
    async fn range(&self, request: RangeRequest, at: Option<Revision>) -> Result<RangeResponse, Error> {
        let mut backoff = INITIAL_BACKOFF;
        for attempt in 1.. {
            match tokio::time::timeout(self.timeout, self.client.range(request.clone())).await {
                Ok(Ok(response)) => return Ok(response),
                Ok(Err(error)) => {
                    if let Some(error) = self.revision_error(&error, at).await {
                        return Err(error);
                    }
                    if attempt == MAX_READ_ATTEMPTS {
                        return Err(unavailable(&error));
                    }
                }
                Err(_) => break,
            }
            tokio::time::sleep(backoff).await;
            backoff *= 2;
        }
        Err(timed_out())
    }

    /// Converts an error about the requested revision.
    async fn revision_error(&self, status: &Status, at: Option<Revision>) -> Option<Error> {
        let requested = at?;
        if status.message().contains("required revision has been compacted") {
            return Some(Error::Compacted { requested, oldest: requested + 1 });
        }
        if status.message().contains("required revision is a future revision") {
            let result = tokio::time::timeout(self.timeout, self.client.range(revision_request())).await;
            let current = match &result {
                Ok(Ok(response)) => header_revision(response.header.as_ref()),
                // The revision is only used in the error message.
                Ok(Err(_)) | Err(_) => 0,
            };
            return Some(Error::Future { requested, current });
        }
        None
    }

    /// Checks that the revision is neither compacted nor in the future.
    async fn check_revision(&self, revision: Revision) -> Result<(), Error> {
        self.range(at_revision(revision_request(), revision)?, Some(revision)).await.map(drop)
    }

    async fn txn(&self, write: &Write, lease: Option<i64>) -> Result<TxnResult, Status> {
        let key = write.key.as_bytes().to_vec();
        let expected = match write.expect {
            Expect::Absent => 0,
            Expect::Revision(revision) => i64::try_from(revision).unwrap_or(i64::MAX),
        };
        let change = match &write.value {
            Some(value) => RequestOp {
                put: Some(PutRequest { key: key.clone(), value: value.clone(), lease: lease.unwrap_or(0) }),
                ..RequestOp::default()
            },
            None => {
                RequestOp { delete: Some(DeleteRangeRequest { key: key.clone() }), ..RequestOp::default() }
            }
        };
        let get_request = RangeRequest { key: key.clone(), ..RangeRequest::default() };
        let request = TxnRequest {
            compare: vec![Compare { target: Compare::MOD, key, mod_revision: Some(expected) }],
            success: vec![change],
            failure: vec![RequestOp { range: Some(get_request), ..RequestOp::default() }],
        };
        let response = self.client.txn(request).await?;
        if response.succeeded {
            return Ok(TxnResult::Committed(header_revision(response.header.as_ref())));
        }
        let ranges = response.responses.into_iter().filter_map(|response| response.range);
        Ok(TxnResult::Failed(ranges.flat_map(|range| range.kvs).next().and_then(to_entry)))
    }
}

enum TxnResult {
    Committed(Revision),
    Failed(Option<Entry>),
}

#[async_trait]
impl Store for EtcdStore {
    async fn revision(&self) -> Result<Revision, Error> {
        let response = self.range(revision_request(), None).await?;
        Ok(header_revision(response.header.as_ref()))
    }

    async fn get(&self, key: &str) -> Result<Option<Entry>, Error> {
        let request = RangeRequest { key: key.as_bytes().to_vec(), ..RangeRequest::default() };
        let response = self.range(request, None).await?;
        Ok(response.kvs.into_iter().next().and_then(to_entry))
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
                Some(revision) => self.check_revision(revision).await.map(|()| revision)?,
                None => self.revision().await?,
            };
            return Ok(Page { entries: Vec::new(), revision, remaining: 0 });
        }
        if start.is_empty() {
            start.push('\0');
        }
        let (mut entries, mut revision) = (Vec::new(), at);
        loop {
            let page_limit = if limit == 0 { PAGE_KEYS } else { PAGE_KEYS.min(limit - entries.len()) };
            let mut request = RangeRequest {
                key: start.into_bytes(),
                range_end: range_end(prefix),
                limit: page_limit as i64,
                ..RangeRequest::default()
            };
            if let Some(revision) = revision {
                request = at_revision(request, revision)?;
            }
            let response = self.range(request, revision).await?;
            let revision = *revision.get_or_insert_with(|| header_revision(response.header.as_ref()));
            let count = usize::try_from(response.count).unwrap_or(0);
            let remaining = count.saturating_sub(response.kvs.len());
            entries.extend(response.kvs.into_iter().filter_map(to_entry));
            match entries.last() {
                Some(last) if response.more && (limit == 0 || entries.len() < limit) => {
                    start = format!("{}\0", last.key);
                }
                _ => return Ok(Page { entries, revision, remaining }),
            }
        }
    }

    async fn write(&self, write: Write) -> Result<Revision, Error> {
        let key = write.key.clone();
        // etcd would interpret these as "create" and as "do nothing".
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
        let operation = async {
            for is_last_attempt in [false, true] {
                let lease = match ttl {
                    Some(ttl) => Some(self.leases.get(ttl).await?),
                    None => None,
                };
                match self.txn(&write, lease).await {
                    // The shared lease expired between `get` and the transaction. The second
                    // attempt gets a new one.
                    Err(status)
                        if !is_last_attempt && status.message().contains("requested lease not found") =>
                    {
                        self.leases.reset().await;
                    }
                    other => return other,
                }
            }
            Err(Status::unavailable("no lease"))
        };
        match tokio::time::timeout(self.timeout, operation).await {
            Ok(Ok(TxnResult::Committed(revision))) => Ok(revision),
            Ok(Ok(TxnResult::Failed(Some(_)))) if write.expect == Expect::Absent => {
                Err(Error::Exists { key })
            }
            Ok(Ok(TxnResult::Failed(current))) => Err(Error::Conflict { key, current }),
            Ok(Err(error)) => Err(unavailable(&error)),
            Err(_) => Err(timed_out()),
        }
    }

    async fn watch(&self, prefix: &str, after: Revision, listener: Listener) -> Result<Watch, Error> {
        self.check_revision(after).await?;
        Ok(watch::start(self.client.clone(), prefix, after, listener))
    }

    async fn compact(&self, revision: Revision) -> Result<(), Error> {
        let requested = i64::try_from(revision)
            .map_err(|_| Error::Future { requested: revision, current: i64::MAX as u64 })?;
        match tokio::time::timeout(self.timeout, self.client.compact(requested)).await {
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

/// A request that only reads the revision from the response header.
fn revision_request() -> RangeRequest {
    RangeRequest { key: vec![0], count_only: true, ..RangeRequest::default() }
}

/// etcd interprets revision 0 as "current", but it is not a readable revision here.
fn at_revision(request: RangeRequest, revision: Revision) -> Result<RangeRequest, Error> {
    match i64::try_from(revision) {
        Ok(0) => Err(Error::Compacted { requested: 0, oldest: 1 }),
        Ok(revision) => Ok(RangeRequest { revision, ..request }),
        Err(_) => Err(Error::Future { requested: revision, current: i64::MAX as u64 }),
    }
}

/// The smallest key after all keys with this prefix. `"\0"` means "no end".
fn range_end(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    match end.last_mut() {
        // UTF-8 has no byte 0xFF, so this does not overflow.
        Some(last) => *last += 1,
        None => end.push(0),
    }
    end
}

/// Keys that are not UTF-8 belong to other applications.
fn to_entry(kv: KeyValue) -> Option<Entry> {
    let revision = u64::try_from(kv.mod_revision).ok()?;
    Some(Entry { key: Arc::from(String::from_utf8(kv.key).ok()?), value: Bytes::from(kv.value), revision })
}

fn header_revision(header: Option<&Header>) -> Revision {
    header.and_then(|header| u64::try_from(header.revision).ok()).unwrap_or(0)
}

fn unavailable(status: &Status) -> Error {
    Error::Unavailable { reason: format!("etcd: {}", status.message()) }
}

fn timed_out() -> Error {
    Error::Unavailable { reason: "etcd: request timed out".into() }
}

#[cfg(test)]
mod tests;
