//! Handing a request on to somebody else: its answer comes back, and where both ends agree to speak something
//! else than HTTP (SPDY, WebSocket), bytes go to and fro until one of them has had enough.
//!
//! Knows nothing of what is said over such a connection, so that whatever the far end speaks works. Read
//! [`forward`]. For an end that does know there are [`spdy`] and, over WebSocket, [`messages`]; [`carry`] ties the one
//! to the other.

pub mod carry;
pub mod escapes;
pub mod messages;
pub mod spdy;
pub mod tunnel;
pub mod websocket;

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
pub trait Wire: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Wire for T {}

/// Makes connections, in whatever way leads there.
pub type Dial = Arc<dyn Fn(SocketAddr) -> Dialling + Send + Sync>;
/// A connection that is being made.
pub type Dialling = Pin<Box<dyn Future<Output = io::Result<Box<dyn Wire>>> + Send>>;

/// How long an end that is told goodbye may take to hear it.
const GOODBYE: Duration = Duration::from_secs(5);

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
const HOP_BY_HOP: [&str; 9] = [
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
pub struct Ask<'a> {
    pub method: Method,
    /// Path and query.
    pub path: &'a str,
    pub host: &'a str,
    /// Those of the original request; only what concerns another protocol is handed on.
    pub headers: &'a HeaderMap,
}

/// Whether the client wants to go on in another protocol.
pub fn wants_upgrade(headers: &HeaderMap) -> bool {
    about_the_connection(headers).any(|word| word.eq_ignore_ascii_case("upgrade"))
        && headers.contains_key(UPGRADE)
}

/// Takes out what concerns one connection only; what changes the protocol stays where that is wanted.
pub fn strip(headers: &mut HeaderMap, upgrade: bool) {
    let named: Vec<HeaderName> = about_the_connection(headers).filter_map(|name| name.parse().ok()).collect();
    let protocol = headers.get(UPGRADE).cloned().filter(|_| upgrade);
    for name in HOP_BY_HOP.map(HeaderName::from_static).into_iter().chain(named) {
        headers.remove(name);
    }
    if let Some(protocol) = protocol {
        headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(UPGRADE, protocol);
    }
}

/// The headers that are named as those of one connection.
fn about_the_connection(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let texts = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    texts.flat_map(|text| text.split(',')).map(str::trim)
}

/// Asks over a fresh connection. Where the far end changes the protocol, `client` is tied to it as soon as the
/// client has been given the answer. Dropping the answer's body ends the connection.
pub async fn forward<IO>(io: IO, ask: Ask<'_>, client: Option<OnUpgrade>) -> Result<Response<Incoming>, Error>
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let request = asked(ask, client.is_some());
    hand_on(io, request, client).await
}

/// As [`forward`], but the connection in the other protocol is the caller's, by [`hyper::upgrade::on`] the answer.
pub async fn begin<IO>(io: IO, ask: Ask<'_>) -> Result<Response<Incoming>, Error>
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    hand_on(io, asked(ask, true), None).await
}

fn asked(ask: Ask<'_>, for_another_protocol: bool) -> Request<Full<Bytes>> {
    let mut request = Request::new(Full::new(Bytes::new()));
    *request.method_mut() = ask.method;
    *request.uri_mut() = ask.path.parse().unwrap_or_default();
    let headers = request.headers_mut();
    if let Ok(host) = ask.host.parse() {
        headers.insert(http::header::HOST, host);
    }
    if for_another_protocol {
        for name in UPGRADE_HEADERS.map(HeaderName::from_static) {
            for value in ask.headers.get_all(&name) {
                headers.append(name.clone(), value.clone());
            }
        }
    }
    request
}

/// As [`forward`], with a request that is sent as it is.
pub async fn hand_on<IO>(
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
        tie_when_told(client, &mut response);
    }
    Ok(response)
}

/// Ties the client to the far end as soon as the client has been given the answer.
pub fn tie_when_told(client: OnUpgrade, response: &mut Response<Incoming>) {
    let far = hyper::upgrade::on(response);
    tokio::spawn(async move {
        match tokio::try_join!(client, far) {
            Ok((client, far)) => tie(client, far).await,
            Err(error) => tracing::debug!(%error, "an end went away while the protocol was changed"),
        }
    });
}

/// Carries bytes both ways until either end is done: then there is nobody left to talk to.
async fn tie(client: Upgraded, far: Upgraded) {
    let (mut from_client, mut to_client) = tokio::io::split(TokioIo::new(client));
    let (mut from_far, mut to_far) = tokio::io::split(TokioIo::new(far));
    let ended = tokio::select! {
        ended = tokio::io::copy(&mut from_client, &mut to_far) => ended,
        ended = tokio::io::copy(&mut from_far, &mut to_client) => ended,
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a tunnel broke");
    }
    let goodbye = async { tokio::join!(to_client.shutdown(), to_far.shutdown()) };
    let _ = tokio::time::timeout(GOODBYE, goodbye).await;
}

#[cfg(test)]
mod tests;
