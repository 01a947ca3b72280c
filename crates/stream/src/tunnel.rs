//! A reverse tunnel: a node that connects to a server serves the tunnel ([`serve_tunnel`]), and the
//! server opens connections through it ([`Tunnel::dial`]) to addresses that it could not reach
//! directly.
//!
//! After an HTTP upgrade the roles of HTTP/2 are reversed: the server side sends CONNECT requests,
//! each of which becomes a connection. HTTP/2 pings detect a dead peer.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONNECTION, HOST, UPGRADE};
use http::{Method, Request, Response, StatusCode};
use http_body_util::Empty;
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper::service::service_fn;
use hyper::upgrade::Upgraded;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

/// The upgrade protocol.
pub const UPGRADE_PROTOCOL: &str = "skiff-tunnel";
/// The HTTP/2 ping interval, and the timeout for the response.
const KEEPALIVE_PERIOD: Duration = Duration::from_secs(10);
const DIAL_TIMEOUT: Duration = Duration::from_secs(10);

/// The side that dials. Cheap to clone.
#[derive(Clone)]
pub struct Tunnel {
    sender: http2::SendRequest<Empty<Bytes>>,
}

impl Tunnel {
    /// Starts to use an upgraded connection. The tunnel works while the returned future is polled.
    pub async fn from_upgraded(
        upgraded: Upgraded,
    ) -> Result<(Tunnel, impl Future<Output = ()>), hyper::Error> {
        let (sender, connection) = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .keep_alive_interval(KEEPALIVE_PERIOD)
            .keep_alive_timeout(KEEPALIVE_PERIOD)
            .keep_alive_while_idle(true)
            .handshake(upgraded)
            .await?;
        let driver = async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "tunnel connection failed");
            }
        };
        Ok((Tunnel { sender }, driver))
    }

    /// Opens a connection from the other side to an address that it allows.
    pub async fn dial(&self, host: &str, port: u16) -> io::Result<TokioIo<Upgraded>> {
        let authority =
            if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        let mut request = Request::new(Empty::new());
        *request.method_mut() = Method::CONNECT;
        *request.uri_mut() = authority.parse().map_err(io::Error::other)?;
        let response = self.sender.clone().send_request(request).await.map_err(io::Error::other)?;
        match response.status() {
            StatusCode::OK => hyper::upgrade::on(response).await.map(TokioIo::new).map_err(io::Error::other),
            StatusCode::FORBIDDEN => Err(io::ErrorKind::PermissionDenied.into()),
            _ => Err(io::ErrorKind::ConnectionRefused.into()),
        }
    }

    /// Whether the tunnel is still connected.
    pub fn is_open(&self) -> bool {
        !self.sender.is_closed()
    }
}

/// The reason why a tunnel could not be established, or has ended.
#[derive(Debug, thiserror::Error)]
pub enum TunnelError {
    #[error("tunnel connection failed")]
    Connection(#[from] hyper::Error),
    #[error("server returned HTTP status {0}")]
    Rejected(u16),
}

/// Connects a tunnel to a server at `path` and serves it until it closes. Only `allowed` addresses
/// can be dialed.
pub async fn serve_tunnel<IO>(
    io: IO,
    host: &str,
    path: &str,
    allowed: Arc<dyn Fn(SocketAddr) -> bool + Send + Sync>,
) -> Result<(), TunnelError>
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = http1::handshake(TokioIo::new(io)).await?;
    tokio::spawn(connection.with_upgrades());
    let mut request = Request::new(Empty::<Bytes>::new());
    *request.uri_mut() = path.parse().unwrap_or_default();
    let headers = request.headers_mut();
    for (name, value) in [(HOST, host), (CONNECTION, "Upgrade"), (UPGRADE, UPGRADE_PROTOCOL)] {
        if let Ok(value) = value.parse() {
            headers.insert(name, value);
        }
    }
    let response = sender.send_request(request).await?;
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        return Err(TunnelError::Rejected(response.status().as_u16()));
    }
    let upgraded = hyper::upgrade::on(response).await?;
    tracing::debug!("tunnel established");
    let service = service_fn(move |request| handle_connect(request, allowed.clone()));
    hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .keep_alive_interval(KEEPALIVE_PERIOD)
        .keep_alive_timeout(KEEPALIVE_PERIOD)
        .serve_connection(upgraded, service)
        .await?;
    Ok(())
}

async fn handle_connect(
    request: Request<Incoming>,
    allowed: Arc<dyn Fn(SocketAddr) -> bool + Send + Sync>,
) -> Result<Response<Empty<Bytes>>, hyper::Error> {
    let reject = |status: StatusCode| {
        let mut response = Response::new(Empty::new());
        *response.status_mut() = status;
        Ok(response)
    };
    let address = request.uri().authority().and_then(|address| address.as_str().parse::<SocketAddr>().ok());
    let Some(address) = address.filter(|_| request.method() == Method::CONNECT) else {
        return reject(StatusCode::BAD_REQUEST);
    };
    if !allowed(address) {
        return reject(StatusCode::FORBIDDEN);
    }
    let Ok(Ok(mut upstream)) = tokio::time::timeout(DIAL_TIMEOUT, TcpStream::connect(address)).await else {
        return reject(StatusCode::BAD_GATEWAY);
    };
    let _ = upstream.set_nodelay(true);
    tokio::spawn(async move {
        let Ok(client) = hyper::upgrade::on(request).await else { return };
        if let Err(error) = tokio::io::copy_bidirectional(&mut TokioIo::new(client), &mut upstream).await {
            tracing::debug!(%error, "connection through tunnel failed");
        }
    });
    Ok(Response::new(Empty::new()))
}

#[cfg(test)]
mod tests;
