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
use stream::{Dial, Wire};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;

use crate::table::Place;

/// How long a pod may take to take our call.
const DIAL: Duration = Duration::from_secs(5);
/// How long a connection is kept that nobody uses.
const IDLE: Duration = Duration::from_secs(30);
/// How many of these for each pod.
const MOST_IDLE: usize = 32;

/// The straight way to pods.
pub fn directly() -> Dial {
    Arc::new(|to| {
        Box::pin(async move {
            let stream = TcpStream::connect(to).await?;
            let _ = stream.set_nodelay(true);
            // Pods that vanish without a word are noticed.
            let _ = sockopt::set_socket_keepalive(&stream, true);
            let _ = sockopt::set_tcp_keepidle(&stream, IDLE);
            Ok(Box::new(stream) as Box<dyn Wire>)
        })
    })
}

/// One end of a connection to a pod.
pub enum Sender {
    /// For one request at a time.
    Http1(http1::SendRequest<Incoming>),
    /// For many.
    Http2(http2::SendRequest<Incoming>),
}

/// Why there is no answer; with the request if nothing of it was sent.
pub type SendError = TrySendError<Request<Incoming>>;

impl Sender {
    pub async fn send(&mut self, request: Request<Incoming>) -> Result<Response<Incoming>, SendError> {
        match self {
            Sender::Http1(sender) => sender.try_send_request(request).await,
            Sender::Http2(sender) => sender.try_send_request(request).await,
        }
    }

    fn is_ready(&self) -> bool {
        match self {
            Sender::Http1(sender) => sender.is_ready(),
            Sender::Http2(sender) => sender.is_ready(),
        }
    }
}

/// The connections that can be used just now, by where they lead.
#[derive(Clone)]
pub struct Pool {
    kept: Arc<Mutex<Kept>>,
    dial: Dial,
    /// What pods show over TLS is not looked at: they are known by address only. For each version of HTTP.
    tls: [TlsConnector; 2],
}

/// With when they were last used.
type Kept = HashMap<Place, Vec<(Sender, Instant)>>;

impl Pool {
    pub fn new(dial: Dial) -> Result<Pool, pki::Error> {
        let http1 = pki::unverified()?;
        let mut http2 = (*http1).clone();
        http2.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Pool { kept: Arc::default(), dial, tls: [http1, Arc::new(http2)].map(TlsConnector::from) })
    }

    /// One that was kept, the last used first.
    pub fn kept(&self, place: Place) -> Option<Sender> {
        let mut all = self.kept.lock();
        let kept = all.get_mut(&place)?;
        while let Some((sender, since)) = kept.pop() {
            if since.elapsed() < IDLE && sender.is_ready() {
                if let Sender::Http2(shared) = &sender {
                    kept.push((Sender::Http2(shared.clone()), Instant::now()));
                }
                return Some(sender);
            }
        }
        all.remove(&place);
        None
    }

    /// A new one.
    pub async fn dial(&self, place: Place) -> io::Result<Sender> {
        let connect = async {
            let stream = (self.dial)(place.address).await?;
            if !place.speech.tls {
                return begin(stream, place).await;
            }
            let name = ServerName::from(place.address.ip());
            let tls = &self.tls[usize::from(place.speech.http2)];
            begin(Box::new(tls.connect(name, stream).await?), place).await
        };
        tokio::time::timeout(DIAL, connect).await?
    }

    /// Keeps a connection once it can be used for another request: where there is one at a time, once its answer is
    /// read to the end. One whose answer is not wanted any more closes.
    pub fn keep(&self, place: Place, sender: Sender) {
        let mut sender = match sender {
            Sender::Http2(_) => return self.put(place, sender, 1),
            Sender::Http1(sender) => sender,
        };
        let pool = self.clone();
        tokio::spawn(async move {
            if sender.ready().await.is_ok() {
                pool.put(place, Sender::Http1(sender), MOST_IDLE);
            }
        });
    }

    fn put(&self, place: Place, sender: Sender, most: usize) {
        let mut all = self.kept.lock();
        let kept = all.entry(place).or_default();
        kept.retain(|(sender, since)| since.elapsed() < IDLE && sender.is_ready());
        if kept.len() < most {
            kept.push((sender, Instant::now()));
        }
    }

    /// Closes what leads to a pod that has closed its end.
    pub fn forget(&self, place: Place) {
        self.kept.lock().remove(&place);
    }

    /// Closes what leads elsewhere.
    pub fn only(&self, places: &HashSet<Place>) {
        self.kept.lock().retain(|place, _| places.contains(place));
    }
}

/// Over whatever it is: each type of connection would cost all of HTTP once more.
async fn begin(stream: Box<dyn Wire>, place: Place) -> io::Result<Sender> {
    let (stream, address) = (TokioIo::new(stream), place.address);
    if !place.speech.http2 {
        let (sender, connection) = http1::Builder::new().handshake(stream).await.map_err(io::Error::other)?;
        let connection = connection.with_upgrades();
        tokio::spawn(async move { told(connection.await, address) });
        return Ok(Sender::Http1(sender));
    }
    // Without signs of life on it: servers of gRPC send away who asks for those more than twice without need.
    let (sender, connection) =
        http2::handshake(TokioExecutor::new(), stream).await.map_err(io::Error::other)?;
    tokio::spawn(async move { told(connection.await, address) });
    Ok(Sender::Http2(sender))
}

fn told(ended: Result<(), hyper::Error>, address: SocketAddr) {
    if let Err(error) = ended {
        tracing::debug!(%error, %address, "a connection to a pod ended");
    }
}
