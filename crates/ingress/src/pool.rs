//! Connections to pods that are kept for the next request.

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

/// How long a pod may take to take our call.
const DIAL_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a connection is kept that nobody uses.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// How many of these for each pod.
const MAX_IDLE_CONNECTIONS: usize = 32;

/// The straight way to pods.
pub fn direct_dialer() -> Dialer {
    Arc::new(|to| {
        Box::pin(async move {
            let stream = TcpStream::connect(to).await?;
            let _ = stream.set_nodelay(true);
            // Pods that vanish without a word are noticed.
            let _ = sockopt::set_socket_keepalive(&stream, true);
            let _ = sockopt::set_tcp_keepidle(&stream, IDLE_TIMEOUT);
            Ok(Box::new(stream) as Box<dyn Conn>)
        })
    })
}

/// One end of a connection to a pod.
pub enum PodConnection {
    /// For one request at a time.
    Http1(http1::SendRequest<Incoming>),
    /// For many.
    Http2(http2::SendRequest<Incoming>),
}

/// Why there is no answer; with the request if nothing of it was sent.
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

/// The connections that can be used just now, by where they lead.
#[derive(Clone)]
pub struct Pool {
    idle: Arc<Mutex<IdleConnections>>,
    dial: Dialer,
    /// What pods show over TLS is not looked at: they are known by address only. For each version of HTTP.
    tls: [TlsConnector; 2],
}

/// With when they were last used.
type IdleConnections = HashMap<BackendAddr, Vec<(PodConnection, Instant)>>;

impl Pool {
    pub fn new(dial: Dialer) -> Result<Pool, pki::Error> {
        let http1 = pki::unverified()?;
        let mut http2 = (*http1).clone();
        http2.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Pool { idle: Arc::default(), dial, tls: [http1, Arc::new(http2)].map(TlsConnector::from) })
    }

    /// One that was kept, the last used first.
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

    /// A new one.
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

    /// Keeps a connection once it can be used for another request: where there is one at a time, once its answer is
    /// read to the end. One whose answer is not wanted any more closes.
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

    /// Closes what leads to a pod that has closed its end.
    pub fn close_idle(&self, backend_addr: BackendAddr) {
        self.idle.lock().remove(&backend_addr);
    }

    /// Closes what leads elsewhere.
    pub fn retain(&self, backend_addrs: &HashSet<BackendAddr>) {
        self.idle.lock().retain(|backend_addr, _| backend_addrs.contains(backend_addr));
    }
}

/// Over whatever it is: each type of connection would cost all of HTTP once more.
async fn start_connection(stream: Box<dyn Conn>, backend_addr: BackendAddr) -> io::Result<PodConnection> {
    let (stream, address) = (TokioIo::new(stream), backend_addr.address);
    if !backend_addr.protocol.http2 {
        let (sender, connection) = http1::Builder::new().handshake(stream).await.map_err(io::Error::other)?;
        let connection = connection.with_upgrades();
        tokio::spawn(async move { log_connection_end(connection.await, address) });
        return Ok(PodConnection::Http1(sender));
    }
    // Without signs of life on it: servers of gRPC send away who asks for those more than twice without need.
    let (sender, connection) =
        http2::handshake(TokioExecutor::new(), stream).await.map_err(io::Error::other)?;
    tokio::spawn(async move { log_connection_end(connection.await, address) });
    Ok(PodConnection::Http2(sender))
}

fn log_connection_end(result: Result<(), hyper::Error>, address: SocketAddr) {
    if let Err(error) = result {
        tracing::debug!(%error, %address, "a connection to a pod ended");
    }
}
