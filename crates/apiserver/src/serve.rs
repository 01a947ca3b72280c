//! The listener: TLS, HTTP/1.1 and HTTP/2, and an orderly end.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use jiff::Timestamp;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio_rustls::TlsAcceptor;

use crate::audit::Remote;
use crate::authentication::Peer;
use crate::cache::stopped;
use crate::server::Server;

/// How long a client may take to shake hands.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long requests may go on after the server was told to stop.
const DRAIN: Duration = Duration::from_secs(10);
/// How long an HTTP/1.1 connection may wait for its next request, as upstream lets it.
const IDLE: Duration = Duration::from_secs(90);
/// Streams a client may open on one HTTP/2 connection, as upstream allows.
const MAX_STREAMS: u32 = 1000;
/// Connections open at a time; more wait to be accepted.
const MAX_CONNECTIONS: usize = 16_384;
/// What a connection may hold in memory for a client that does not read, or for headers.
const BUFFER: usize = 256 << 10;

pub async fn serve(
    server: Arc<Server>,
    listener: TcpListener,
    tls: rustls::ServerConfig,
    mut shutdown: watch::Receiver<bool>,
) {
    let acceptor = TlsAcceptor::from(Arc::new(tls));
    let graceful = GracefulShutdown::new();
    let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let accept = async {
            let place = room.clone().acquire_owned().await.expect("never closed");
            (listener.accept().await, place)
        };
        tokio::select! {
            (accepted, place) = accept => match accepted {
                Ok((stream, remote)) => {
                    let stream = (stream, remote.ip());
                    let connection = connection(server.clone(), acceptor.clone(), stream, graceful.watcher());
                    tokio::spawn(async move {
                        connection.await;
                        drop(place);
                    });
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
    drop(listener);
    if tokio::time::timeout(DRAIN, graceful.shutdown()).await.is_err() {
        tracing::warn!("some requests did not end in time");
    }
}

async fn connection(
    server: Arc<Server>,
    acceptor: TlsAcceptor,
    (stream, remote): (TcpStream, IpAddr),
    watcher: hyper_util::server::graceful::Watcher,
) {
    let _ = stream.set_nodelay(true);
    let mut shutdown = server.shutdown.clone();
    let handshake = tokio::select! {
        handshake = tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)) => handshake,
        () = stopped(&mut shutdown) => return,
    };
    let stream = match handshake {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return tracing::debug!(%error, "TLS handshake failed"),
        Err(_) => return tracing::debug!("TLS handshake took too long"),
    };
    let shown = stream.get_ref().1.peer_certificates();
    let peer = Peer::of(&server.authenticators, shown, Timestamp::now());
    let service = service_fn(move |mut request: Request<Incoming>| {
        if server.audit.is_some() {
            request.extensions_mut().insert(Remote(remote));
        }
        let (server, peer) = (server.clone(), peer.clone());
        async move { Ok::<_, Infallible>(server.answer(request, peer).await) }
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(IDLE).max_buf_size(BUFFER);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(64 << 10)
        .max_send_buf_size(BUFFER)
        .keep_alive_interval(Duration::from_secs(30))
        .keep_alive_timeout(Duration::from_secs(15));
    let connection = builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
    if let Err(error) = watcher.watch(connection.into_owned()).await {
        tracing::debug!(%error, "connection ended");
    }
}
