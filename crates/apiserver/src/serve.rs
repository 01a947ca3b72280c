//! The listener: TLS, HTTP/1.1 and HTTP/2, and an orderly end.

mod lane;
mod turns;

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

use crate::audit::Remote;
use crate::authentication::Peer;
use crate::cache::stopped;
use crate::server::Server;
use lane::{InLane, Lane, Sending};
use turns::Turns;

/// How long clients may take: one that dawdles must not keep a connection from others.
#[derive(Clone, Copy)]
struct Patience {
    /// To shake hands.
    handshake: Duration,
    /// To send the first request's headers.
    first: Duration,
    /// To send the next request's headers over HTTP/1.1, the pause before them included.
    next: Duration,
}

/// As upstream has it.
const PATIENCE: Patience = Patience {
    handshake: Duration::from_secs(10),
    first: Duration::from_secs(32),
    next: Duration::from_secs(90),
};
/// How long requests may go on after the server was told to stop.
const DRAIN: Duration = Duration::from_secs(10);
/// Streams a client may open on one HTTP/2 connection, as upstream allows.
const MAX_STREAMS: u32 = 1000;
/// Connections open at a time; more wait to be accepted.
const MAX_CONNECTIONS: usize = 16_384;
/// What a connection may hold in memory for a client that does not read, or for headers.
const BUFFER: usize = 256 << 10;

/// A connection, and who it is from.
pub type Accepted = (TcpStream, SocketAddr);

/// Where connections come from: a listener, and somebody who listens elsewhere.
pub struct Connections {
    listener: TcpListener,
    more: Option<mpsc::Receiver<Accepted>>,
}

impl Connections {
    pub fn new(listener: TcpListener, more: Option<mpsc::Receiver<Accepted>>) -> Connections {
        Connections { listener, more }
    }

    async fn accept(&mut self) -> io::Result<Accepted> {
        let more = async {
            match &mut self.more {
                Some(more) => more.recv().await,
                None => None,
            }
        };
        tokio::select! {
            accepted = self.listener.accept() => accepted,
            Some(accepted) = more => Ok(accepted),
        }
    }
}

pub async fn serve(
    server: Arc<Server>,
    connections: Connections,
    tls: rustls::ServerConfig,
    shutdown: watch::Receiver<bool>,
) {
    serve_with(server, connections, tls, shutdown, PATIENCE).await;
}

async fn serve_with(
    server: Arc<Server>,
    mut connections: Connections,
    tls: rustls::ServerConfig,
    mut shutdown: watch::Receiver<bool>,
    patience: Patience,
) {
    let acceptor = TlsAcceptor::from(Arc::new(tls));
    let graceful = GracefulShutdown::new();
    let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let lane = Lane::new(tokio::runtime::Handle::current().metrics().num_workers());
    loop {
        let accept = async {
            let place = room.clone().acquire_owned().await.expect("never closed");
            (connections.accept().await, place)
        };
        tokio::select! {
            (accepted, place) = accept => match accepted {
                Ok((stream, remote)) => {
                    let stream = (stream, remote.ip());
                    let sending = Sending::new(lane.clone());
                    let watcher = graceful.watcher();
                    let connection =
                        connection(server.clone(), acceptor.clone(), stream, watcher, patience, sending.clone());
                    let held = async move {
                        connection.await;
                        drop(place);
                    };
                    tokio::spawn(InLane::new(held, sending));
                }
                Err(error) => {
                    // Out of file descriptors, most likely: let some be closed first.
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            },
            () = stopped(&mut shutdown) => break,
        }
    }
    drop(connections);
    if tokio::time::timeout(DRAIN, graceful.shutdown()).await.is_err() {
        tracing::warn!("some requests did not end in time");
    }
}

async fn connection(
    server: Arc<Server>,
    acceptor: TlsAcceptor,
    (stream, remote): (TcpStream, IpAddr),
    watcher: hyper_util::server::graceful::Watcher,
    patience: Patience,
    sending: Sending,
) {
    let _ = stream.set_nodelay(true);
    let mut shutdown = server.shutdown.clone();
    let handshake = tokio::select! {
        handshake = tokio::time::timeout(patience.handshake, acceptor.accept(stream)) => handshake,
        () = stopped(&mut shutdown) => return,
    };
    let stream = match handshake {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return tracing::debug!(%error, "TLS handshake failed"),
        Err(_) => return tracing::debug!("TLS handshake took too long"),
    };
    let shown = stream.get_ref().1.peer_certificates();
    let peer = Peer::of(&server.authenticators, shown, Timestamp::now());
    let http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    let heard = Arc::new(AtomicBool::new(false));
    let hears = heard.clone();
    let service = service_fn(move |mut request: Request<Incoming>| {
        hears.store(true, Ordering::Relaxed);
        if server.audit.is_some() {
            request.extensions_mut().insert(Remote(remote));
        }
        let (server, peer, sending) = (server.clone(), peer.clone(), sending.clone());
        async move { Ok::<_, Infallible>(sending.note(server.answer(request, peer).await)) }
    });
    // What was agreed on in the handshake is not guessed from the first bytes, which may never come.
    let builder = auto::Builder::new(TokioExecutor::new());
    let mut builder = if http2 { builder.http2_only() } else { builder.http1_only() };
    builder.http1().timer(TokioTimer::new()).header_read_timeout(patience.next).max_buf_size(BUFFER);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(64 << 10)
        .max_send_buf_size(BUFFER)
        .keep_alive_interval(Duration::from_secs(30))
        .keep_alive_timeout(Duration::from_secs(15));
    let connection = builder.serve_connection_with_upgrades(TokioIo::new(Turns::new(stream)), service);
    let silent = async {
        tokio::time::sleep(patience.first).await;
        if heard.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        result = watcher.watch(connection.into_owned()) => if let Err(error) = result {
            tracing::debug!(%error, "connection ended");
        },
        () = silent => tracing::debug!("a client connected and said nothing"),
    }
}

#[cfg(test)]
mod tests;
