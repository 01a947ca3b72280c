//! The etcd client, with one connection to each endpoint.

use std::time::Duration;

use futures_util::stream::{self, StreamExt as _};
use tonic::metadata::MetadataValue;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Request, Status, Streaming};

use super::messages::{
    CompactionRequest, CompactionResponse, LeaseGrantRequest, LeaseGrantResponse, RangeRequest,
    RangeResponse, TxnRequest, TxnResponse, WatchCreateRequest, WatchRequest, WatchResponse,
};
use super::{Options, Tls};
use crate::{Error, grpc};

/// A range response with many large values may be long. The number of keys per request is the
/// limit, not the message size.
const MAX_MESSAGE_BYTES: usize = 1 << 30;
/// The interval of HTTP/2 keepalive pings, and the timeout for their response.
const KEEP_ALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(5));

#[derive(Clone)]
pub struct Client(Channel);

impl Client {
    /// Connects on first use, and again after a connection is lost. An endpoint without a scheme
    /// uses `https` if TLS is configured.
    pub fn new(endpoints: &[impl AsRef<str>], options: &Options) -> Result<Client, Error> {
        let endpoints = endpoints.iter().map(|url| endpoint(url.as_ref(), options));
        let endpoints: Vec<Endpoint> = endpoints.collect::<Result<_, _>>()?;
        if endpoints.is_empty() {
            return Err(Error::Unavailable { reason: "etcd: no endpoints configured".into() });
        }
        Ok(Client(Channel::balance_list(endpoints.into_iter())))
    }

    pub async fn range(&self, request: RangeRequest) -> Result<RangeResponse, Status> {
        self.call("/etcdserverpb.KV/Range", request).await
    }

    pub async fn txn(&self, request: TxnRequest) -> Result<TxnResponse, Status> {
        self.call("/etcdserverpb.KV/Txn", request).await
    }

    pub async fn compact(&self, revision: i64) -> Result<CompactionResponse, Status> {
        self.call("/etcdserverpb.KV/Compact", CompactionRequest { revision }).await
    }

    /// Returns the lease ID. `ttl` is in seconds.
    pub async fn grant(&self, ttl: i64) -> Result<i64, Status> {
        let response: LeaseGrantResponse =
            self.call("/etcdserverpb.Lease/LeaseGrant", LeaseGrantRequest { ttl }).await?;
        Ok(response.id)
    }

    pub async fn watch(&self, create: WatchCreateRequest) -> Result<Streaming<WatchResponse>, Status> {
        // The request stream stays open, because etcd cancels the watch when it ends.
        let request = WatchRequest { create: Some(create) };
        let requests = stream::once(std::future::ready(request)).chain(stream::pending());
        grpc::streaming(&self.0, "/etcdserverpb.Watch/Watch", with_leader(requests), MAX_MESSAGE_BYTES).await
    }

    async fn call<Q, A>(&self, path: &'static str, message: Q) -> Result<A, Status>
    where
        Q: prost::Message + Send + Sync + 'static,
        A: prost::Message + Default + Send + Sync + 'static,
    {
        grpc::unary(&self.0, path, with_leader(message), MAX_MESSAGE_BYTES).await
    }
}

/// Only members with a leader may respond. A member without one is partitioned from the cluster.
fn with_leader<Q>(message: Q) -> Request<Q> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("hasleader", MetadataValue::from_static("true"));
    request
}

fn endpoint(url: &str, options: &Options) -> Result<Endpoint, Error> {
    let invalid = |reason: String| Error::Unavailable {
        reason: format!("etcd: {url:?} is not a valid endpoint: {reason}"),
    };
    let is_encrypted = match url.split_once("://") {
        Some(("http", _)) if options.tls.is_some() => {
            return Err(invalid("a CA is configured, so it must start with https://".into()));
        }
        Some(("http", _)) => false,
        Some(("https", _)) => true,
        Some(_) => return Err(invalid("must start with http:// or https://".into())),
        None => options.tls.is_some(),
    };
    let scheme = if is_encrypted { "https://" } else { "http://" };
    let full_url = if url.contains("://") { url.to_owned() } else { format!("{scheme}{url}") };
    let endpoint = Endpoint::from_shared(full_url).map_err(|error| invalid(error.to_string()))?;
    let endpoint = endpoint
        .connect_timeout(options.connect_timeout)
        .http2_keep_alive_interval(KEEP_ALIVE.0)
        .keep_alive_timeout(KEEP_ALIVE.1)
        .keep_alive_while_idle(true);
    match &options.tls {
        Some(tls) => endpoint.tls_config(client_tls_config(tls)).map_err(|error| invalid(error.to_string())),
        None if is_encrypted => Err(invalid("https requires a CA certificate".into())),
        None => Ok(endpoint),
    }
}

fn client_tls_config(tls: &Tls) -> ClientTlsConfig {
    let config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&tls.ca));
    match &tls.identity {
        Some((certificate, key)) => config.identity(Identity::from_pem(certificate, key)),
        None => config,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(url: &str, is_encrypted: bool, expected: &str) {
        let tls = is_encrypted.then(|| Tls { ca: Vec::new(), identity: None });
        let result = endpoint(url, &Options { tls, ..Options::default() });
        let output = result.map_or_else(|error| error.to_string(), |endpoint| endpoint.uri().to_string());
        assert!(output.contains(expected), "{output}");
    }

    #[test]
    fn endpoint_validates_url_and_scheme() {
        check("http://127.0.0.1:2379", false, "http://127.0.0.1:2379/");
        check("127.0.0.1:2379", false, "http://127.0.0.1:2379/");
        check("https://127.0.0.1:2379", true, "https://127.0.0.1:2379/");
        check("127.0.0.1:2379", true, "https://127.0.0.1:2379/");
        check("https://127.0.0.1:2379", false, "https requires a CA certificate");
        check("http://127.0.0.1:2379", true, "so it must start with https://");
        check("ftp://127.0.0.1:2379", false, "must start with http:// or https://");
        check(
            "http://127.0.0.1:2379:1",
            false,
            "\"http://127.0.0.1:2379:1\" is not a valid endpoint: invalid",
        );
        check("", false, "\"\" is not a valid endpoint");
    }
}
