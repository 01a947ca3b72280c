//! Connections to pods that are kept for the next request.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::time::Instant;

/// How long a pod may take to take our call.
const DIAL: Duration = Duration::from_secs(5);
/// How long a connection is kept that nobody uses.
const IDLE: Duration = Duration::from_secs(30);
/// How many of these for each pod.
const MOST_IDLE: usize = 32;

type Sender = SendRequest<Incoming>;

/// The connections that nobody uses just now, by where they lead.
#[derive(Clone, Default)]
pub struct Pool(Arc<Mutex<Kept>>);

/// With when they were last used.
type Kept = HashMap<SocketAddr, Vec<(Sender, Instant)>>;

impl Pool {
    /// One that was kept, the last used first.
    pub fn kept(&self, address: SocketAddr) -> Option<Sender> {
        let mut all = self.0.lock();
        let kept = all.get_mut(&address)?;
        while let Some((sender, since)) = kept.pop() {
            if since.elapsed() < IDLE && sender.is_ready() {
                return Some(sender);
            }
        }
        all.remove(&address);
        None
    }

    /// A new one.
    pub async fn dial(&self, address: SocketAddr) -> io::Result<Sender> {
        let stream = tokio::time::timeout(DIAL, TcpStream::connect(address)).await??;
        let _ = stream.set_nodelay(true);
        let handshake = http1::Builder::new().handshake(TokioIo::new(stream));
        let (sender, connection) = handshake.await.map_err(io::Error::other)?;
        tokio::spawn(async move {
            if let Err(error) = connection.with_upgrades().await {
                tracing::debug!(%error, %address, "a connection to a pod ended");
            }
        });
        Ok(sender)
    }

    /// Keeps a connection once its answer is read to the end. One whose answer is not wanted any more closes.
    pub fn keep(&self, address: SocketAddr, mut sender: Sender) {
        let pool = self.clone();
        tokio::spawn(async move {
            if sender.ready().await.is_err() {
                return;
            }
            let mut all = pool.0.lock();
            let kept = all.entry(address).or_default();
            kept.retain(|(sender, since)| since.elapsed() < IDLE && sender.is_ready());
            if kept.len() < MOST_IDLE {
                kept.push((sender, Instant::now()));
            }
        });
    }

    /// Closes what leads elsewhere.
    pub fn only(&self, addresses: &HashSet<SocketAddr>) {
        self.0.lock().retain(|address, _| addresses.contains(address));
    }
}
