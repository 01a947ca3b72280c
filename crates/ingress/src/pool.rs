//! A pool of idle connections to pods.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::{TrySendError, http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use rustix::net::sockopt;
use rustls::pki_types::ServerName;
use stream::{Conn, Dialer};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;

use crate::table::BackendAddr;

/// The timeout for connecting to a pod, including TLS.
const DIAL_TIMEOUT: Duration = Duration::from_secs(5);
/// Idle connections are closed after this time.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// The maximum number of idle HTTP/1.1 connections per pod address.
const MAX_IDLE_CONNECTIONS: usize = 32;

/// Connects to pods directly.
pub fn direct_dialer() -> Dialer {
    Arc::new(|to| {
        Box::pin(async move {
            let stream = TcpStream::connect(to).await?;
            let _ = stream.set_nodelay(true);
            // Keepalive detects pods that disappear without closing the connection.
            let _ = sockopt::set_socket_keepalive(&stream, true);
            let _ = sockopt::set_tcp_keepidle(&stream, IDLE_TIMEOUT);
            Ok(Box::new(stream) as Box<dyn Conn>)
        })
    })
}

/// The sending side of a connection to a pod.
pub enum PodConnection {
    /// One request at a time.
    Http1(http1::SendRequest<Incoming>),
    /// Multiplexed requests.
    Http2(http2::SendRequest<Incoming>),
}

/// The error of a request. Contains the request if none of it was sent.
pub type SendError = TrySendError<Request<Incoming>>;

impl PodConnection {
    pub async fn send(&mut self, request: Request<Incoming>) -> Result<Response<Incoming>, SendError> {
        match self {
            PodConnection::Http1(sender) => sender.try_send_request(request).await,
            PodConnection::Http2(sender) => sender.try_send_request(request).await,
        }
    }

    fn is_ready(&self) -> bool {
        match self {
            PodConnection::Http1(sender) => sender.is_ready(),
            PodConnection::Http2(sender) => sender.is_ready(),
        }
    }
}

/// Idle connections by address.
#[derive(Clone)]
pub struct Pool {
    idle: Arc<Mutex<IdleConnections>>,
    dial: Dialer,
    /// One connector for HTTP/1.1 and one for HTTP/2. The certificates of pods are not verified,
    /// because pods are identified by address only.
    tls: [TlsConnector; 2],
}

/// With the time of their last use.
type IdleConnections = HashMap<BackendAddr, Vec<(PodConnection, Instant)>>;

impl Pool {
    pub fn new(dial: Dialer) -> Result<Pool, pki::Error> {
        let http1 = pki::unverified()?;
        let mut http2 = (*http1).clone();
        http2.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Pool { idle: Arc::default(), dial, tls: [http1, Arc::new(http2)].map(TlsConnector::from) })
    }

    /// Takes an idle connection, the most recently used first. An HTTP/2 connection is shared, so
    /// it stays in the pool.
    pub fn take_idle(&self, backend_addr: BackendAddr) -> Option<PodConnection> {
        let mut idle = self.idle.lock();
        let connections = idle.get_mut(&backend_addr)?;
        while let Some((sender, since)) = connections.pop() {
            if since.elapsed() < IDLE_TIMEOUT && sender.is_ready() {
                if let PodConnection::Http2(shared) = &sender {
                    connections.push((PodConnection::Http2(shared.clone()), Instant::now()));
                }
                return Some(sender);
            }
        }
        idle.remove(&backend_addr);
        None
    }

    /// Opens a new connection.
    pub async fn dial(&self, backend_addr: BackendAddr) -> io::Result<PodConnection> {
        let connect = async {
            let stream = (self.dial)(backend_addr.address).await?;
            if !backend_addr.protocol.tls {
                return start_connection(stream, backend_addr).await;
            }
            let name = ServerName::from(backend_addr.address.ip());
            let tls = &self.tls[usize::from(backend_addr.protocol.http2)];
            start_connection(Box::new(tls.connect(name, stream).await?), backend_addr).await
        };
        tokio::time::timeout(DIAL_TIMEOUT, connect).await?
    }

    /// Returns a connection to the pool once it can be reused: an HTTP/1.1 connection after the
    /// response body is read completely. If the body is dropped earlier, the connection closes.
    pub fn release(&self, backend_addr: BackendAddr, sender: PodConnection) {
        let mut sender = match sender {
            PodConnection::Http2(_) => return self.put_idle(backend_addr, sender, 1),
            PodConnection::Http1(sender) => sender,
        };
        let pool = self.clone();
        tokio::spawn(async move {
            if sender.ready().await.is_ok() {
                pool.put_idle(backend_addr, PodConnection::Http1(sender), MAX_IDLE_CONNECTIONS);
            }
        });
    }

    fn put_idle(&self, backend_addr: BackendAddr, sender: PodConnection, max_idle: usize) {
        let mut idle = self.idle.lock();
        let connections = idle.entry(backend_addr).or_default();
        connections.retain(|(sender, since)| since.elapsed() < IDLE_TIMEOUT && sender.is_ready());
        if connections.len() < max_idle {
            connections.push((sender, Instant::now()));
        }
    }

    /// Closes the idle connections to an address, because the pod has closed one.
    pub fn close_idle(&self, backend_addr: BackendAddr) {
        self.idle.lock().remove(&backend_addr);
    }

    /// Closes idle connections to all other addresses.
    pub fn retain(&self, backend_addrs: &HashSet<BackendAddr>) {
        self.idle.lock().retain(|backend_addr, _| backend_addrs.contains(backend_addr));
    }
}

/// Takes a boxed stream, because each stream type would instantiate all of hyper again.
async fn start_connection(stream: Box<dyn Conn>, backend_addr: BackendAddr) -> io::Result<PodConnection> {
    let (stream, address) = (TokioIo::new(stream), backend_addr.address);
    if !backend_addr.protocol.http2 {
        let (sender, connection) = http1::Builder::new().handshake(stream).await.map_err(io::Error::other)?;
        let connection = connection.with_upgrades();
        tokio::spawn(async move { log_connection_end(connection.await, address) });
        return Ok(PodConnection::Http1(sender));
    }
    // No HTTP/2 keepalive: gRPC servers close connections with more than two pings without data
    // (too_many_pings).
    let (sender, connection) =
        http2::handshake(TokioExecutor::new(), stream).await.map_err(io::Error::other)?;
    tokio::spawn(async move { log_connection_end(connection.await, address) });
    Ok(PodConnection::Http2(sender))
}

fn log_connection_end(result: Result<(), hyper::Error>, address: SocketAddr) {
    if let Err(error) = result {
        tracing::debug!(%error, %address, "pod connection failed");
    }
}
