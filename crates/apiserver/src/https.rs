//! An HTTPS client of the API server: JSON to webhooks, token issuers and aggregated API servers.
//!
//! One [`HttpsClient`] talks to one server, keeps a few idle connections to it and never logs what
//! it sends. It trusts the given CAs or else those of the system. Certificate verification cannot
//! be turned off.

mod kubeconfig;
#[cfg(test)]
pub mod tests;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue, USER_AGENT};
use http::{Method, Request, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _};
use rustls::{ClientConfig, RootCertStore};
use serde_json::Value;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

pub use kubeconfig::AuthInfoResolver;

/// The largest accepted response body: the largest possible object, as a base64 patch.
const MAX_RESPONSE_BYTES: usize = 6 << 20;
/// The default request timeout.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);
/// How many idle connections are kept for reuse.
const MAX_IDLE_CONNECTIONS: usize = 8;
/// How often a webhook is called before its failure counts, and the initial backoff, which grows by
/// half each time. As upstream.
const MAX_WEBHOOK_ATTEMPTS: u32 = 5;
const INITIAL_BACKOFF: Duration = Duration::from_millis(500);
/// CA bundle paths of common Linux distributions.
const SYSTEM_ROOTS: &[&str] = &[
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// A client of one server.
pub struct HttpsClient {
    host: String,
    port: u16,
    path: String,
    name: ServerName<'static>,
    tls: TlsConnector,
    authorization: Option<HeaderValue>,
    idle: Mutex<VecDeque<Connection>>,
    timeout: Duration,
}

/// A server's response.
pub struct HttpReply {
    pub status: u16,
    pub content_type: String,
    pub body: Bytes,
}

/// Resolves the address to connect to; called for each new connection.
pub type Resolve<'a> = &'a (dyn Fn() -> Result<(String, u16), String> + Sync);

type Connection = SendRequest<Full<Bytes>>;

/// The trusted CAs and the client's credentials.
#[derive(Default)]
pub struct Credentials {
    /// PEM; `None` trusts the CAs of the system.
    pub authorities: Option<String>,
    /// Certificate and key, both PEM.
    pub certificate: Option<(String, String)>,
    /// The value of the `Authorization` header.
    pub authorization: Option<String>,
    /// The expected name in the server's certificate, if it differs from the URL's host.
    pub server_name: Option<String>,
}

/// Why a client cannot be created. Never contains a secret.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("invalid kubeconfig {path}: {reason}")]
    Kubeconfig { path: PathBuf, reason: &'static str },
    #[error("{url:?} is not an https:// URL")]
    Url { url: String },
    #[error("invalid {what} for {url:?}")]
    Credential { url: String, what: &'static str },
    #[error("no CA certificates found in {SYSTEM_ROOTS:?} and none configured for {url:?}")]
    NoAuthorities { url: String },
}

/// Why a request failed. Never contains what was sent.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot connect to {host}:{port}: {source}")]
    Connect { host: String, port: u16, source: std::io::Error },
    #[error("request to {host} failed: {source}")]
    Http { host: String, source: hyper::Error },
    #[error("request to {host} timed out")]
    Timeout { host: String },
    #[error("{host} returned HTTP status {status}")]
    Status { host: String, status: u16 },
    #[error("response of {host} is too large or truncated")]
    Body { host: String },
    #[error("response of {host} is not JSON")]
    NotJson { host: String },
    #[error("{reason}")]
    Resolve { reason: String },
}

impl Error {
    /// Whether a retry may succeed.
    fn is_temporary(&self) -> bool {
        match self {
            Error::Connect { .. } | Error::Http { .. } | Error::Timeout { .. } => true,
            Error::Status { status, .. } => *status == 429 || *status >= 500,
            Error::Body { .. } | Error::NotJson { .. } | Error::Resolve { .. } => false,
        }
    }
}

impl HttpsClient {
    pub fn new(url: &str, credentials: Credentials) -> Result<HttpsClient, ConfigError> {
        let bad = || ConfigError::Url { url: url.to_owned() };
        let invalid_credential = |what| move || ConfigError::Credential { url: url.to_owned(), what };
        let uri: Uri = url.parse().map_err(|_| bad())?;
        if uri.scheme_str() != Some("https") {
            return Err(bad());
        }
        let authority = uri.authority().ok_or_else(bad)?;
        let host = authority.host().trim_matches(['[', ']']).to_owned();
        let name = credentials.server_name.unwrap_or_else(|| host.clone());
        let name = ServerName::try_from(name).map_err(|_| bad())?;
        let trusted = pki::server_verifier(root_certificates(url, credentials.authorities.as_deref())?);
        let trusted = trusted.map_err(|_| invalid_credential("certificate authority")())?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|_| invalid_credential("TLS")())?
            .dangerous()
            .with_custom_certificate_verifier(trusted);
        let mut tls = match credentials.certificate {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => {
                let chain = CertificateDer::pem_slice_iter(certificate.as_bytes()).collect::<Result<_, _>>();
                let chain: Vec<_> = chain.map_err(|_| invalid_credential("client certificate")())?;
                let key = PrivateKeyDer::from_pem_slice(key.as_bytes());
                let key = key.map_err(|_| invalid_credential("client key")())?;
                builder
                    .with_client_auth_cert(chain, key)
                    .map_err(|_| invalid_credential("client certificate")())?
            }
        };
        tls.alpn_protocols = vec![b"http/1.1".to_vec()];
        let authorization = match credentials.authorization {
            None => None,
            Some(text) => {
                let mut value = HeaderValue::from_str(&text).map_err(|_| invalid_credential("token")())?;
                value.set_sensitive(true);
                Some(value)
            }
        };
        Ok(HttpsClient {
            host,
            port: authority.port_u16().unwrap_or(443),
            path: uri.path_and_query().map_or("/", |path| path.as_str()).to_owned(),
            name,
            tls: TlsConnector::from(Arc::new(tls)),
            authorization,
            idle: Mutex::default(),
            timeout: DEFAULT_TIMEOUT,
        })
    }

    pub fn with_timeout(self, timeout: Duration) -> HttpsClient {
        HttpsClient { timeout, ..self }
    }

    /// Posts JSON to the client's URL and retries temporary errors, as upstream calls
    /// authentication and authorization webhooks.
    pub async fn post_with_retry(&self, body: &Value) -> Result<Value, Error> {
        let bytes = Bytes::from(body.to_string());
        let mut wait = INITIAL_BACKOFF;
        for _ in 1..MAX_WEBHOOK_ATTEMPTS {
            match self.request_json(Method::POST, &self.path, bytes.clone()).await {
                Err(error) if error.is_temporary() => {
                    tracing::debug!(%error, "webhook request failed, retrying");
                    tokio::time::sleep(wait).await;
                    wait = wait * 3 / 2;
                }
                other => return other,
            }
        }
        self.request_json(Method::POST, &self.path, bytes).await
    }

    /// Fetches the JSON at the client's URL.
    pub async fn get(&self) -> Result<Value, Error> {
        self.request_json(Method::GET, &self.path, Bytes::new()).await
    }

    /// Posts JSON to the client's URL once and ignores the response body.
    pub async fn post(&self, body: Bytes) -> Result<(), Error> {
        let answer = tokio::time::timeout(DEFAULT_TIMEOUT, self.send(Method::POST, &self.path, body)).await;
        answer.map_err(|_| Error::Timeout { host: self.host.clone() })?.map(drop)
    }

    async fn request_json(&self, method: Method, path: &str, body: Bytes) -> Result<Value, Error> {
        let answer = tokio::time::timeout(self.timeout, self.send(method, path, body)).await;
        let bytes = answer.map_err(|_| Error::Timeout { host: self.host.clone() })??;
        serde_json::from_slice(&bytes).map_err(|_| Error::NotJson { host: self.host.clone() })
    }

    async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<Bytes, Error> {
        let reply = self.exchange(method, path, body, None).await?;
        if (200..300).contains(&reply.status) {
            Ok(reply.body)
        } else {
            Err(Error::Status { host: self.host.clone(), status: reply.status })
        }
    }

    /// Sends one request without a timeout and returns any response. If the URL's host is only
    /// nominal, `resolve` returns the address to connect to.
    pub async fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
        resolve: Option<Resolve<'_>>,
    ) -> Result<HttpReply, Error> {
        let http = |source| Error::Http { host: self.host.clone(), source };
        // The server may have closed an idle connection, so a failure on it is not reported: the
        // next one is tried.
        while let Some(mut idle_connection) = self.take_idle_connection() {
            if idle_connection.ready().await.is_ok()
                && let Ok(response) = idle_connection.send_request(self.request(&method, path, &body)).await
            {
                return self.read(idle_connection, response).await;
            }
        }
        let (host, port) = match resolve {
            None => (self.host.clone(), self.port),
            Some(resolve) => resolve().map_err(|reason| Error::Resolve { reason })?,
        };
        let mut connection = self.connect(host, port).await?;
        connection.ready().await.map_err(http)?;
        let response = connection.send_request(self.request(&method, path, &body)).await.map_err(http)?;
        self.read(connection, response).await
    }

    async fn read(
        &self,
        connection: Connection,
        response: hyper::Response<hyper::body::Incoming>,
    ) -> Result<HttpReply, Error> {
        let status = response.status().as_u16();
        let content_type = response.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let content_type = content_type.unwrap_or("").to_owned();
        let body = Limited::new(response.into_body(), MAX_RESPONSE_BYTES).collect().await;
        let body = body.map_err(|_| Error::Body { host: self.host.clone() })?.to_bytes();
        if !connection.is_closed() {
            let mut idle = self.idle.lock();
            idle.push_back(connection);
            idle.truncate(MAX_IDLE_CONNECTIONS);
        }
        Ok(HttpReply { status, content_type, body })
    }

    fn take_idle_connection(&self) -> Option<Connection> {
        let mut idle = self.idle.lock();
        while let Some(connection) = idle.pop_front() {
            if !connection.is_closed() {
                return Some(connection);
            }
        }
        None
    }

    async fn connect(&self, host: String, port: u16) -> Result<Connection, Error> {
        let failed = |source| Error::Connect { host: host.clone(), port, source };
        let stream = TcpStream::connect((host.as_str(), port)).await.map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        let stream = self.tls.connect(self.name.clone(), stream).await.map_err(failed)?;
        let http = |source| Error::Http { host: self.host.clone(), source };
        let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(http)?;
        // Ends with the connection, which closes when its sender is dropped.
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "webhook connection closed with an error");
            }
        });
        Ok(sender)
    }

    fn request(&self, method: &Method, path: &str, body: &Bytes) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(body.clone()));
        *request.method_mut() = method.clone();
        *request.uri_mut() = path.parse().unwrap_or_default();
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        let host = format!("{host}:{}", self.port).parse().unwrap_or(HeaderValue::from_static("localhost"));
        let headers = request.headers_mut();
        headers.insert(HOST, host);
        headers.insert(USER_AGENT, HeaderValue::from_static("skiff"));
        headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
        if !body.is_empty() {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        if let Some(authorization) = &self.authorization {
            headers.insert(AUTHORIZATION, authorization.clone());
        }
        request
    }
}

/// The CAs in `pem`, or those of the system.
pub fn root_certificates(url: &str, pem: Option<&str>) -> Result<Vec<CertificateDer<'static>>, ConfigError> {
    let usable = |root: &CertificateDer<'static>| RootCertStore::empty().add(root.clone()).is_ok();
    let bad = || ConfigError::Credential { url: url.to_owned(), what: "certificate authority" };
    let roots: Vec<_> = match pem {
        Some(pem) => {
            let all = CertificateDer::pem_slice_iter(pem.as_bytes());
            all.map(|root| root.ok().filter(usable).ok_or_else(bad)).collect::<Result<_, _>>()?
        }
        None => {
            let given = std::env::var_os("SSL_CERT_FILE").map(PathBuf::from);
            let files = given.into_iter().chain(SYSTEM_ROOTS.iter().map(PathBuf::from));
            let pem = files.filter_map(|path| std::fs::read(path).ok()).next().unwrap_or_default();
            CertificateDer::pem_slice_iter(&pem).filter_map(Result::ok).filter(usable).collect()
        }
    };
    match (roots.is_empty(), pem) {
        (false, _) => Ok(roots),
        (true, Some(_)) => Err(bad()),
        (true, None) => Err(ConfigError::NoAuthorities { url: url.to_owned() }),
    }
}
