//! The HTTPS listener: TLS, HTTP/1.1 and HTTP/2, timeouts and graceful shutdown.

mod large_response_limiter;
mod write_budget;

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use jiff::Timestamp;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_rustls::TlsAcceptor;

use crate::audit::RemoteAddr;
use crate::authentication::Peer;
use crate::cache::wait_for_shutdown;
use crate::server::Server;
use large_response_limiter::{ConnectionResponses, LargeResponseLimiter, LimitedConnection};
use write_budget::WriteBudget;

/// Timeouts of clients, so that slow ones cannot hold connections.
#[derive(Clone, Copy)]
struct ConnectionTimeouts {
    /// For the TLS handshake.
    handshake: Duration,
    /// For the headers of the first request.
    first_headers: Duration,
    /// For the headers of the next HTTP/1.1 request, including the idle time before them.
    next_headers: Duration,
}

/// The values are upstream's.
const CONNECTION_TIMEOUTS: ConnectionTimeouts = ConnectionTimeouts {
    handshake: Duration::from_secs(10),
    first_headers: Duration::from_secs(32),
    next_headers: Duration::from_secs(90),
};
/// How long active requests may continue after shutdown starts.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// Concurrent HTTP/2 streams per connection, as upstream.
const MAX_STREAMS: u32 = 1000;
/// Open connections; further ones wait to be accepted.
const MAX_CONNECTIONS: usize = 16_384;
/// The limit of a connection's send buffer and of request headers.
const CONNECTION_BUFFER_BYTES: usize = 256 << 10;

/// An accepted connection and the client's address.
pub type AcceptedConnection = (TcpStream, SocketAddr);

/// The sources of connections: the listener, and connections accepted elsewhere.
pub struct Connections {
    listener: TcpListener,
    extra: Option<mpsc::Receiver<AcceptedConnection>>,
}

impl Connections {
    pub fn new(listener: TcpListener, extra: Option<mpsc::Receiver<AcceptedConnection>>) -> Connections {
        Connections { listener, extra }
    }

    async fn accept(&mut self) -> io::Result<AcceptedConnection> {
        let extra = async {
            match &mut self.extra {
                Some(extra) => extra.recv().await,
                None => None,
            }
        };
        tokio::select! {
            accepted = self.listener.accept() => accepted,
            Some(accepted) = extra => Ok(accepted),
        }
    }
}

pub async fn serve(
    server: Arc<Server>,
    connections: Connections,
    tls: rustls::ServerConfig,
    shutdown: watch::Receiver<bool>,
) {
    serve_with(server, connections, tls, shutdown, CONNECTION_TIMEOUTS).await;
}

async fn serve_with(
    server: Arc<Server>,
    mut connections: Connections,
    tls: rustls::ServerConfig,
    mut shutdown: watch::Receiver<bool>,
    timeouts: ConnectionTimeouts,
) {
    let tls_server = TlsAcceptor::from(Arc::new(tls));
    let graceful = GracefulShutdown::new();
    let connection_slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let limiter = LargeResponseLimiter::new(tokio::runtime::Handle::current().metrics().num_workers());
    loop {
        let accept = async {
            let permit =
                connection_slots.clone().acquire_owned().await.expect("the semaphore is never closed");
            (connections.accept().await, permit)
        };
        tokio::select! {
            (accepted, permit) = accept => match accepted {
                Ok((stream, remote)) => {
                    let stream = (stream, remote.ip());
                    let responses = ConnectionResponses::new(limiter.clone());
                    let watcher = graceful.watcher();
                    let connection =
                        connection(server.clone(), tls_server.clone(), stream, watcher, timeouts, responses.clone());
                    let task = async move {
                        connection.await;
                        drop(permit);
                    };
                    tokio::spawn(LimitedConnection::new(task, responses));
                }
                Err(error) => {
                    // Most likely EMFILE: wait until connections are closed.
                    tracing::warn!(%error, "failed to accept connection, will retry");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            },
            () = wait_for_shutdown(&mut shutdown) => break,
        }
    }
    drop(connections);
    if tokio::time::timeout(DRAIN_TIMEOUT, graceful.shutdown()).await.is_err() {
        tracing::warn!("drain timeout exceeded, closing active connections");
    }
}

async fn connection(
    server: Arc<Server>,
    tls_server: TlsAcceptor,
    (stream, remote): (TcpStream, IpAddr),
    watcher: hyper_util::server::graceful::Watcher,
    timeouts: ConnectionTimeouts,
    responses: ConnectionResponses,
) {
    let _ = stream.set_nodelay(true);
    let mut shutdown = server.shutdown.clone();
    let handshake = tokio::select! {
        handshake = tokio::time::timeout(timeouts.handshake, tls_server.accept(stream)) => handshake,
        () = wait_for_shutdown(&mut shutdown) => return,
    };
    let stream = match handshake {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return tracing::debug!(%error, "TLS handshake failed"),
        Err(_) => return tracing::debug!("TLS handshake timed out"),
    };
    let peer_certificates = stream.get_ref().1.peer_certificates();
    let peer = Peer::of(&server.authenticators, peer_certificates, Timestamp::now());
    let http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    let has_request = Arc::new(AtomicBool::new(false));
    let received = has_request.clone();
    let service = service_fn(move |mut request: Request<Incoming>| {
        received.store(true, Ordering::Relaxed);
        if server.audit.is_some() {
            request.extensions_mut().insert(RemoteAddr(remote));
        }
        let (server, peer, responses) = (server.clone(), peer.clone(), responses.clone());
        async move { Ok::<_, Infallible>(responses.track(server.handle_request(request, peer).await)) }
    });
    // ALPN determines the protocol. Detecting it from the first bytes would wait for bytes that may
    // never come.
    let builder = auto::Builder::new(TokioExecutor::new());
    let mut builder = if http2 { builder.http2_only() } else { builder.http1_only() };
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(timeouts.next_headers)
        .max_buf_size(CONNECTION_BUFFER_BYTES);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(64 << 10)
        .max_send_buf_size(CONNECTION_BUFFER_BYTES)
        .keep_alive_interval(Duration::from_secs(30))
        .keep_alive_timeout(Duration::from_secs(15));
    let connection = builder.serve_connection_with_upgrades(TokioIo::new(WriteBudget::new(stream)), service);
    let no_request = async {
        tokio::time::sleep(timeouts.first_headers).await;
        if has_request.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        result = watcher.watch(connection.into_owned()) => if let Err(error) = result {
            tracing::debug!(%error, "connection ended");
        },
        () = no_request => tracing::debug!("closing connection without a request"),
    }
}

#[cfg(test)]
mod tests;
