//! Handing a request on to somebody else: its answer comes back, and where both ends agree to speak something
//! else than HTTP (SPDY, WebSocket), bytes go to and fro until one of them has had enough.
//!
//! Knows nothing of what is said over such a connection, so that whatever the far end speaks works. Read
//! [`forward`]. For an end that does know there are [`spdy`] and, over WebSocket, [`messages`]; [`carry`] ties the one
//! to the other.

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

/// A connection, whichever way it goes.
pub trait Conn: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Conn for T {}

/// Makes connections, in whatever way leads there.
pub type Dialer = Arc<dyn Fn(SocketAddr) -> DialFuture + Send + Sync>;
/// A connection that is being made.
pub type DialFuture = Pin<Box<dyn Future<Output = io::Result<Box<dyn Conn>>> + Send>>;

/// How long an end that is told goodbye may take to hear it.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// What makes a request for another protocol one; everything else is between the two next to each other.
const UPGRADE_HEADERS: [&str; 7] = [
    "connection",
    "upgrade",
    "x-stream-protocol-version",
    "sec-websocket-key",
    "sec-websocket-protocol",
    "sec-websocket-version",
    "origin",
];

/// What is between two that are next to each other, and no further.
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

/// Why a request could not be handed on.
#[derive(Debug, thiserror::Error)]
#[error("the connection broke: {0}")]
pub struct Error(#[from] hyper::Error);

/// What is asked of the far end.
pub struct ForwardRequest<'a> {
    pub method: Method,
    /// Path and query.
    pub path: &'a str,
    pub host: &'a str,
    /// Those of the original request; only what concerns another protocol is handed on.
    pub headers: &'a HeaderMap,
}

/// Whether the client wants to go on in another protocol.
pub fn is_upgrade_request(headers: &HeaderMap) -> bool {
    connection_options(headers).any(|word| word.eq_ignore_ascii_case("upgrade"))
        && headers.contains_key(UPGRADE)
}

/// Takes out what concerns one connection only; what changes the protocol stays where that is wanted.
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

/// The headers that are named as those of one connection.
fn connection_options(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let values = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|text| text.split(',')).map(str::trim)
}

/// Asks over a fresh connection. Where the far end changes the protocol, `client` is tied to it as soon as the
/// client has been given the answer. Dropping the answer's body ends the connection.
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

/// As [`forward`], but the connection in the other protocol is the caller's, by [`hyper::upgrade::on`] the answer.
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

/// As [`forward`], with a request that is sent as it is.
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
            tracing::debug!(%error, "a connection that was forwarded to ended");
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

/// Ties the client to the far end as soon as the client has been given the answer.
pub fn splice_on_upgrade(client: OnUpgrade, response: &mut Response<Incoming>) {
    let upstream = hyper::upgrade::on(response);
    tokio::spawn(async move {
        match tokio::try_join!(client, upstream) {
            Ok((client, upstream)) => splice(client, upstream).await,
            Err(error) => tracing::debug!(%error, "an end went away while the protocol was changed"),
        }
    });
}

/// Carries bytes both ways until either end is done: then there is nobody left to talk to.
async fn splice(client: Upgraded, upstream: Upgraded) {
    let (mut from_client, mut to_client) = tokio::io::split(TokioIo::new(client));
    let (mut from_upstream, mut to_upstream) = tokio::io::split(TokioIo::new(upstream));
    let result = tokio::select! {
        result = tokio::io::copy(&mut from_client, &mut to_upstream) => result,
        result = tokio::io::copy(&mut from_upstream, &mut to_client) => result,
    };
    if let Err(error) = result {
        tracing::debug!(%error, "a tunnel broke");
    }
    let shutdown = async { tokio::join!(to_client.shutdown(), to_upstream.shutdown()) };
    let _ = tokio::time::timeout(SHUTDOWN_TIMEOUT, shutdown).await;
}

#[cfg(test)]
mod tests;
