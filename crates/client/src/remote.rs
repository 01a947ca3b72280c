//! Connects to a remote API server over HTTPS.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use http::{Request, Response, Uri, header};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client as Http;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use parking_lot::RwLock;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::error::Failure;
use crate::{Connection, Error, Kubeconfig, RawObject, Watch, WatchChange, WatchEvent};

/// The `timeoutSeconds` of watches. The next watch continues at the last revision.
const WATCH_SECONDS: u32 = 570;
/// The delay after a watch that failed to start.
const WATCH_RETRY_DELAY: Duration = Duration::from_secs(1);

/// The timeouts for connecting, and for a response to an HTTP/2 ping while the connection is in
/// use.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const HTTP2_KEEPALIVE: Duration = Duration::from_secs(10);

type HttpsTransport = Http<HttpsConnector<HttpConnector>, Full<Bytes>>;

/// HTTPS to one server with fixed credentials.
#[derive(Clone)]
pub struct Remote {
    http: Arc<RwLock<HttpsTransport>>,
    server: Arc<str>,
    token: Option<Arc<str>>,
}

impl Remote {
    pub fn new(config: &Kubeconfig) -> Result<Remote, Error> {
        Ok(Remote::with_tls(&config.server, config.token.as_deref(), Remote::tls(config)?))
    }

    /// The TLS configuration of a kubeconfig: its CA and client certificate.
    pub fn tls(config: &Kubeconfig) -> Result<rustls::ClientConfig, Error> {
        let connection_error = |error: Box<dyn std::error::Error + Send + Sync>| Error::Unreachable(error);
        let mut roots = rustls::RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(&config.ca_pem) {
            let certificate = certificate.map_err(|error| connection_error(error.into()))?;
            roots.add(certificate).map_err(|error| connection_error(error.into()))?;
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| connection_error(error.into()))?
            .with_root_certificates(roots);
        Ok(match &config.certificate {
            Some((cert, key)) => {
                let chain = CertificateDer::pem_slice_iter(cert).collect::<Result<Vec<_>, _>>();
                let chain = chain.map_err(|error| connection_error(error.into()))?;
                let key =
                    PrivateKeyDer::from_pem_slice(key).map_err(|error| connection_error(error.into()))?;
                builder.with_client_auth_cert(chain, key).map_err(|error| connection_error(error.into()))?
            }
            None => builder.with_no_client_auth(),
        })
    }

    /// Connects with a TLS configuration that does not come from a kubeconfig. `server` has the
    /// same form as there.
    pub fn with_tls(server: &str, token: Option<&str>, tls: rustls::ClientConfig) -> Remote {
        Remote {
            http: Arc::new(RwLock::new(https_client(tls))),
            server: server.trim_end_matches('/').into(),
            token: token.map(Into::into),
        }
    }

    /// Uses another TLS configuration for new connections. Running watches continue until their
    /// timeout.
    pub fn replace_tls(&self, tls: rustls::ClientConfig) {
        *self.http.write() = https_client(tls);
    }

    async fn send_request(&self, mut request: Request<Bytes>) -> Result<Response<Incoming>, Error> {
        let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
        let uri: Uri = format!("{}{path}", self.server)
            .parse()
            .map_err(|error: http::uri::InvalidUri| Error::Unreachable(error.into()))?;
        *request.uri_mut() = uri;
        if let Some(token) = &self.token
            && let Ok(mut value) = header::HeaderValue::from_str(&format!("Bearer {token}"))
        {
            value.set_sensitive(true);
            request.headers_mut().insert(header::AUTHORIZATION, value);
        }
        let http = self.http.read().clone();
        http.request(request.map(Full::new)).await.map_err(|error| Error::Unreachable(error.into()))
    }

    async fn get(&self, path: &str) -> Result<Response<Incoming>, Error> {
        let request = Request::get(path)
            .header(header::ACCEPT, "application/json")
            .body(Bytes::new())
            .map_err(|error| Error::Unreachable(error.into()))?;
        self.send_request(request).await
    }
}

fn https_client(tls: rustls::ClientConfig) -> HttpsTransport {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
    let connector = hyper_rustls::HttpsConnectorBuilder::new()
        .with_tls_config(tls)
        .https_only()
        .enable_http2()
        .wrap_connector(tcp);
    Http::builder(TokioExecutor::new())
        .timer(TokioTimer::new())
        .http2_only(true)
        .http2_keep_alive_interval(HTTP2_KEEPALIVE)
        .http2_keep_alive_timeout(HTTP2_KEEPALIVE)
        .build(connector)
}

#[async_trait]
impl Connection for Remote {
    async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, Error> {
        let (parts, body) = self.send_request(request).await?.into_parts();
        let body = body.collect().await.map_err(|error| Error::Unreachable(error.into()))?.to_bytes();
        Ok(Response::from_parts(parts, body))
    }

    async fn watch(&self, collection: &str) -> Result<Box<dyn Watch>, Error> {
        Ok(Box::new(ListWatch {
            remote: self.clone(),
            collection: collection.to_owned(),
            revision: None,
            watch: None,
            buffer: BytesMut::new(),
        }))
    }

    fn impersonate(&self, _: &str) -> Option<Arc<dyn Connection>> {
        None
    }
}

/// A list, followed by watches that continue from its revision.
struct ListWatch {
    remote: Remote,
    collection: String,
    /// All events up to this revision have been delivered.
    revision: Option<u64>,
    watch: Option<Incoming>,
    /// The start of an incomplete line.
    buffer: BytesMut,
}

#[derive(Deserialize)]
struct List<'a> {
    metadata: ListMeta,
    #[serde(borrow, default)]
    items: Option<Vec<&'a RawValue>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListMeta {
    resource_version: String,
}

#[derive(Deserialize)]
struct RawWatchEvent<'a> {
    #[serde(rename = "type")]
    what: &'a str,
    #[serde(borrow)]
    object: &'a RawValue,
}

#[derive(Deserialize)]
struct Versioned {
    metadata: ListMeta,
}

#[async_trait]
impl Watch for ListWatch {
    async fn next(&mut self) -> Result<WatchEvent, Error> {
        loop {
            let Some(revision) = self.revision else { return self.list().await };
            if self.watch.is_none() {
                self.begin_watch(revision).await?;
                continue;
            }
            if let Some(event) = self.read_events()? {
                return Ok(event);
            }
            let Some(watch) = &mut self.watch else { continue };
            match watch.frame().await {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.buffer.extend_from_slice(&data);
                    }
                }
                // The end of a watch, with or without an error, loses no events: the next watch
                // continues from this revision.
                Some(Err(_)) | None => self.watch = None,
            }
        }
    }
}

impl ListWatch {
    async fn list(&mut self) -> Result<WatchEvent, Error> {
        let response = self.remote.get(&self.collection).await?;
        let status = response.status();
        let body = response.into_body().collect().await.map_err(|error| Error::Unreachable(error.into()))?;
        let body = body.to_bytes();
        if !status.is_success() {
            return Err(failure(status.as_u16(), &body));
        }
        let decode_error = |source| Error::Decode { request: format!("list {}", self.collection), source };
        let list: List<'_> = serde_json::from_slice(&body).map_err(decode_error)?;
        let revision = list.metadata.resource_version.parse().unwrap_or(0);
        // Copied: a slice would keep the buffer of the whole list alive.
        let raw = |item: &&RawValue| RawObject::new(item.get().as_bytes().to_vec(), None);
        let objects = list.items.unwrap_or_default().iter().map(raw).collect();
        self.revision = Some(revision);
        self.buffer.clear();
        Ok(WatchEvent::Replace { objects, revision })
    }

    async fn begin_watch(&mut self, revision: u64) -> Result<(), Error> {
        let separator = if self.collection.contains('?') { '&' } else { '?' };
        let path = format!(
            "{}{separator}watch=true&allowWatchBookmarks=true&resourceVersion={revision}&timeoutSeconds={WATCH_SECONDS}",
            self.collection
        );
        self.buffer.clear();
        match self.remote.get(&path).await {
            Ok(response) if response.status().is_success() => {
                self.watch = Some(response.into_body());
                Ok(())
            }
            Ok(response) if response.status().as_u16() == 410 => {
                self.revision = None;
                Ok(())
            }
            Ok(response) => {
                tokio::time::sleep(WATCH_RETRY_DELAY).await;
                let code = response.status().as_u16();
                let body = response.into_body().collect().await.map(|body| body.to_bytes());
                Err(failure(code, &body.unwrap_or_default()))
            }
            Err(error) => {
                tokio::time::sleep(WATCH_RETRY_DELAY).await;
                Err(error)
            }
        }
    }

    /// Parses all complete lines in the buffer.
    fn read_events(&mut self) -> Result<Option<WatchEvent>, Error> {
        let Some(end) = self.buffer.iter().rposition(|byte| *byte == b'\n') else { return Ok(None) };
        let lines = self.buffer.split_to(end + 1).freeze();
        let mut changes = Vec::new();
        for line in lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            let decode_error =
                |source| Error::Decode { request: format!("watch {}", self.collection), source };
            let RawWatchEvent { what, object } = serde_json::from_slice(line).map_err(decode_error)?;
            if what == "ERROR" {
                // Usually 410 (the revision is compacted). A new list resolves all errors.
                (self.revision, self.watch) = (None, None);
                break;
            }
            let version: Versioned = serde_json::from_str(object.get()).map_err(decode_error)?;
            self.revision = version.metadata.resource_version.parse().ok().or(self.revision);
            if what != "BOOKMARK" {
                let object = RawObject::new(object.get().as_bytes().to_vec(), None);
                changes.push(WatchChange { object, deleted: what == "DELETED" });
            }
        }
        Ok(self.revision.map(|revision| WatchEvent::Changes { changes, revision }))
    }
}

fn failure(code: u16, body: &[u8]) -> Error {
    let mut failure: Failure = serde_json::from_slice(body).unwrap_or_default();
    failure.code = code;
    if failure.message.is_empty() {
        failure.message = format!("server returned status {code} without a message");
    }
    Error::Api(Box::new(failure))
}
