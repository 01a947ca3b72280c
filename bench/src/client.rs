//! A small HTTP/2 client with one TLS connection, as Kubernetes clients have.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use bytes::{Bytes, BytesMut};
use http::header::{ACCEPT, CONTENT_TYPE};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _};
use rustls::{ClientConfig, RootCertStore, crypto::ring};
use serde_json::Value;
use testkit::kubeconfig;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

pub const JSON: &str = "application/json";
pub const TABLE: &str = "application/json;as=Table;v=v1;g=meta.k8s.io";
/// Time limit of a request. Reached only if something is broken.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// The flow control windows of Go's client, so that a LIST is not slower than with upstream's clients.
const STREAM_WINDOW_BYTES: u32 = 4 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 1 << 30;

/// The address of a server and the TLS configuration for it.
#[derive(Clone)]
pub struct Target {
    address: String,
    config: Arc<ClientConfig>,
}

#[derive(Clone)]
pub struct Client {
    address: String,
    sender: http2::SendRequest<Full<Bytes>>,
    /// User to impersonate; empty for none.
    user: &'static str,
}

/// Group of the impersonated users.
pub const BENCH_GROUP: &str = "bench";

/// A response: the length of its body, and the body if it was requested or the status is an error.
pub struct Reply {
    pub length: usize,
    pub body: Bytes,
    /// From sending the encoded request to the last byte of the response.
    pub latency: Duration,
}

impl Target {
    pub fn from_kubeconfig(text: &str) -> Result<Target> {
        let read = kubeconfig::parse(text)?;
        let mut roots = RootCertStore::empty();
        for root in CertificateDer::pem_slice_iter(&read.ca_pem) {
            roots.add(root?)?;
        }
        let chain = CertificateDer::pem_slice_iter(&read.cert_pem).collect::<Result<Vec<_>, _>>()?;
        let key = PrivateKeyDer::from_pem_slice(&read.key_pem)?;
        let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Target { address: read.address, config: Arc::new(config) })
    }

    pub async fn connect(&self) -> Result<Client> {
        timeout(REQUEST_TIMEOUT, self.dial()).await.context("connection timed out")?
    }

    pub fn address(&self) -> &str {
        &self.address
    }

    /// Opens an HTTP/1.1 connection, for protocol upgrades.
    pub async fn dial_http1(&self) -> Result<TlsStream<TcpStream>> {
        let mut config = ClientConfig::clone(&self.config);
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        self.connect_tls(Arc::new(config)).await
    }

    async fn connect_tls(&self, config: Arc<ClientConfig>) -> Result<TlsStream<TcpStream>> {
        let socket = TcpStream::connect(&self.address).await?;
        socket.set_nodelay(true)?;
        let host = self.address.rsplit_once(':').map_or(self.address.as_str(), |(host, _)| host);
        let name = ServerName::try_from(host.to_owned())?;
        Ok(TlsConnector::from(config).connect(name, socket).await?)
    }

    async fn dial(&self) -> Result<Client> {
        let stream = self.connect_tls(self.config.clone()).await?;
        ensure!(stream.get_ref().1.alpn_protocol() == Some(b"h2"), "the server does not speak HTTP/2");
        let (sender, connection) = http2::Builder::new(TokioExecutor::new())
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .handshake(TokioIo::new(stream))
            .await?;
        // A broken connection is reported to the pending requests.
        tokio::spawn(connection);
        Ok(Client { address: self.address.clone(), sender, user: "" })
    }
}

impl Client {
    /// The same connection, impersonating a user in [`BENCH_GROUP`].
    pub fn impersonate(&self, user: &'static str) -> Client {
        Client { user, ..self.clone() }
    }

    pub async fn get(&self, path: &str) -> Result<Reply> {
        self.call(Method::GET, path, JSON, Bytes::new(), true).await
    }

    /// Reads the body to its end and only counts its bytes.
    pub async fn count(&self, path: &str, accept: &str) -> Result<Reply> {
        self.call(Method::GET, path, accept, Bytes::new(), false).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Result<Reply> {
        self.call(Method::POST, path, JSON, body.to_string().into(), false).await
    }

    pub async fn delete(&self, path: &str) -> Result<Reply> {
        self.call(Method::DELETE, path, JSON, Bytes::new(), false).await
    }

    /// Opens a watch.
    pub async fn watch(&self, path: &str) -> Result<WatchStream> {
        let (status, body) =
            timeout(REQUEST_TIMEOUT, self.send(Method::GET, path, JSON, Bytes::new())).await??;
        ensure!(status.is_success(), "{path}: {status}");
        Ok(WatchStream { body, buffer: BytesMut::new(), received_at: Instant::now() })
    }

    async fn call(
        &self,
        method: Method,
        path: &str,
        accept: &str,
        body: Bytes,
        keep_body: bool,
    ) -> Result<Reply> {
        let description = format!("{method} {path}");
        let exchange = async {
            let sent = Instant::now();
            let (status, body) = self.send(method, path, accept, body).await?;
            let (length, body) = read(body, keep_body || !status.is_success()).await?;
            if !status.is_success() {
                bail!("{status}: {}", String::from_utf8_lossy(&body));
            }
            Ok(Reply { length, body, latency: sent.elapsed() })
        };
        timeout(REQUEST_TIMEOUT, exchange).await.map_err(Into::into).flatten().context(description)
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        accept: &str,
        body: Bytes,
    ) -> Result<(StatusCode, Incoming)> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("https://{}{path}", self.address))
            .header(ACCEPT, accept)
            .header(CONTENT_TYPE, JSON);
        if !self.user.is_empty() {
            request = request.header("impersonate-user", self.user).header("impersonate-group", BENCH_GROUP);
        }
        let request = request.body(Full::new(body))?;
        let mut sender = self.sender.clone();
        sender.ready().await?;
        let (head, body) = sender.send_request(request).await?.into_parts();
        Ok((head.status, body))
    }
}

/// The length of a body, and the body itself if `keep_body` is set.
async fn read(mut body: Incoming, keep_body: bool) -> Result<(usize, Bytes)> {
    let (mut length, mut content) = (0, BytesMut::new());
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        length += data.len();
        if keep_body {
            content.extend_from_slice(&data);
        }
    }
    Ok((length, content.freeze()))
}

/// The response of a watch, one event per line.
pub struct WatchStream {
    body: Incoming,
    buffer: BytesMut,
    received_at: Instant,
}

impl WatchStream {
    /// The next line and when its last byte was received; `None` at the end of the watch.
    pub async fn next(&mut self) -> Result<Option<(Instant, Bytes)>> {
        let mut offset = 0;
        loop {
            if let Some(end) = memchr::memchr(b'\n', &self.buffer[offset..]) {
                return Ok(Some((self.received_at, self.buffer.split_to(offset + end + 1).freeze())));
            }
            offset = self.buffer.len();
            let Some(frame) = self.body.frame().await else { return Ok(None) };
            if let Ok(data) = frame?.into_data() {
                self.received_at = Instant::now();
                self.buffer.extend_from_slice(&data);
            }
        }
    }
}
