//! Proxying of HTTP requests that may upgrade to another protocol (SPDY, WebSocket). The response
//! is returned to the client. After an upgrade, bytes are copied in both directions until one side
//! closes.
//!
//! [`forward`] does not interpret the upgraded protocol. For an endpoint that does, there are
//! [`spdy`] and, over WebSocket, [`websocket_codec`]; [`translator`] connects one to the other.
//!
//! Counterpart upstream: `k8s.io/apimachinery/pkg/util/proxy` (`UpgradeAwareHandler`).

pub mod spdy;
pub mod translator;
pub mod tunnel;
pub mod url_encoding;
pub mod websocket;
pub mod websocket_codec;

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONNECTION, HeaderMap, HeaderName, HeaderValue, UPGRADE};
use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};

/// A bidirectional connection of any kind.
pub trait Conn: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Conn for T {}

/// Opens connections, directly or through a tunnel.
pub type Dialer = Arc<dyn Fn(SocketAddr) -> DialFuture + Send + Sync>;
/// A connection attempt in progress.
pub type DialFuture = Pin<Box<dyn Future<Output = io::Result<Box<dyn Conn>>> + Send>>;

/// The timeout for closing a connection.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// The request headers that are forwarded for an upgrade.
const UPGRADE_HEADERS: [&str; 7] = [
    "connection",
    "upgrade",
    "x-stream-protocol-version",
    "sec-websocket-key",
    "sec-websocket-protocol",
    "sec-websocket-version",
    "origin",
];

/// Headers that apply to a single connection (RFC 9110, 7.6.1).
const HOP_BY_HOP_HEADERS: [&str; 9] = [
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// A request could not be forwarded.
#[derive(Debug, thiserror::Error)]
#[error("connection to the upstream server failed: {0}")]
pub struct Error(#[from] hyper::Error);

/// A request to the upstream server.
pub struct ForwardRequest<'a> {
    pub method: Method,
    /// The path with the query.
    pub path: &'a str,
    pub host: &'a str,
    /// The headers of the original request. Only the upgrade headers are forwarded.
    pub headers: &'a HeaderMap,
}

/// Whether the client requests a protocol upgrade.
pub fn is_upgrade_request(headers: &HeaderMap) -> bool {
    connection_options(headers).any(|word| word.eq_ignore_ascii_case("upgrade"))
        && headers.contains_key(UPGRADE)
}

/// Removes hop-by-hop headers. With `upgrade`, the headers of the upgrade are kept.
pub fn strip_hop_by_hop_headers(headers: &mut HeaderMap, upgrade: bool) {
    let named: Vec<HeaderName> = connection_options(headers).filter_map(|name| name.parse().ok()).collect();
    let protocol = headers.get(UPGRADE).cloned().filter(|_| upgrade);
    for name in HOP_BY_HOP_HEADERS.map(HeaderName::from_static).into_iter().chain(named) {
        headers.remove(name);
    }
    if let Some(protocol) = protocol {
        headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(UPGRADE, protocol);
    }
}

/// The options of the `Connection` headers: names of further hop-by-hop headers.
fn connection_options(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let values = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|text| text.split(',')).map(str::trim)
}

/// Sends a request over a new connection. If the upstream server switches protocols, `client` is
/// connected to it as soon as the client has received the response. Dropping the response body
/// closes the connection.
pub async fn forward<IO>(
    io: IO,
    forward_request: ForwardRequest<'_>,
    client: Option<OnUpgrade>,
) -> Result<Response<Incoming>, Error>
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let request = build_request(forward_request, client.is_some());
    proxy_request(io, request, client).await
}

/// Like [`forward`], but the caller gets the upgraded connection from [`hyper::upgrade::on`] the
/// response.
pub async fn forward_upgrade<IO>(
    io: IO,
    forward_request: ForwardRequest<'_>,
) -> Result<Response<Incoming>, Error>
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    proxy_request(io, build_request(forward_request, true), None).await
}

fn build_request(forward_request: ForwardRequest<'_>, upgrade: bool) -> Request<Full<Bytes>> {
    let mut request = Request::new(Full::new(Bytes::new()));
    *request.method_mut() = forward_request.method;
    *request.uri_mut() = forward_request.path.parse().unwrap_or_default();
    let headers = request.headers_mut();
    if let Ok(host) = forward_request.host.parse() {
        headers.insert(http::header::HOST, host);
    }
    if upgrade {
        for name in UPGRADE_HEADERS.map(HeaderName::from_static) {
            for value in forward_request.headers.get_all(&name) {
                headers.append(name.clone(), value.clone());
            }
        }
    }
    request
}

/// Like [`forward`], with a request that is sent unchanged.
pub async fn proxy_request<IO>(
    io: IO,
    request: Request<Full<Bytes>>,
    client: Option<OnUpgrade>,
) -> Result<Response<Incoming>, Error>
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = http1::handshake(TokioIo::new(io)).await?;
    tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(%error, "upstream connection failed");
        }
    });
    let mut response = sender.send_request(request).await?;
    if response.status() == StatusCode::SWITCHING_PROTOCOLS
        && let Some(client) = client
    {
        splice_on_upgrade(client, &mut response);
    }
    Ok(response)
}

/// Connects the client to the upstream server once both upgrades are complete, which requires that
/// the client has received the response.
pub fn splice_on_upgrade(client: OnUpgrade, response: &mut Response<Incoming>) {
    let upstream = hyper::upgrade::on(response);
    tokio::spawn(async move {
        match tokio::try_join!(client, upstream) {
            Ok((client, upstream)) => splice(client, upstream).await,
            Err(error) => tracing::debug!(%error, "protocol upgrade failed"),
        }
    });
}

/// Copies bytes in both directions until either side closes. A half-closed session has no reader
/// left, so both directions end.
async fn splice(client: Upgraded, upstream: Upgraded) {
    let (mut from_client, mut to_client) = tokio::io::split(TokioIo::new(client));
    let (mut from_upstream, mut to_upstream) = tokio::io::split(TokioIo::new(upstream));
    let result = tokio::select! {
        result = tokio::io::copy(&mut from_client, &mut to_upstream) => result,
        result = tokio::io::copy(&mut from_upstream, &mut to_client) => result,
    };
    if let Err(error) = result {
        tracing::debug!(%error, "upgraded connection failed");
    }
    let shutdown = async { tokio::join!(to_client.shutdown(), to_upstream.shutdown()) };
    let _ = tokio::time::timeout(SHUTDOWN_TIMEOUT, shutdown).await;
}

#[cfg(test)]
mod tests;
