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
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
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

type Sender = SendRequest<Incoming>;

/// The connections that nobody uses just now, by where they lead.
#[derive(Clone)]
pub struct Pool {
    kept: Arc<Mutex<Kept>>,
    /// What pods show over TLS is not looked at: they are known by address only.
    tls: TlsConnector,
}

/// With when they were last used.
type Kept = HashMap<Place, Vec<(Sender, Instant)>>;

impl Pool {
    pub fn new() -> Result<Pool, pki::Error> {
        Ok(Pool { kept: Arc::default(), tls: TlsConnector::from(pki::unverified()?) })
    }

    /// One that was kept, the last used first.
    pub fn kept(&self, place: Place) -> Option<Sender> {
        let mut all = self.kept.lock();
        let kept = all.get_mut(&place)?;
        while let Some((sender, since)) = kept.pop() {
            if since.elapsed() < IDLE && sender.is_ready() {
                return Some(sender);
            }
        }
        all.remove(&place);
        None
    }

    /// A new one.
    pub async fn dial(&self, place: Place) -> io::Result<Sender> {
        let connect = async {
            let stream = TcpStream::connect(place.address).await?;
            let _ = stream.set_nodelay(true);
            if !place.tls {
                return begin(stream, place.address).await;
            }
            let name = ServerName::from(place.address.ip());
            begin(self.tls.connect(name, stream).await?, place.address).await
        };
        tokio::time::timeout(DIAL, connect).await?
    }

    /// Keeps a connection once its answer is read to the end. One whose answer is not wanted any more closes.
    pub fn keep(&self, place: Place, mut sender: Sender) {
        let pool = self.clone();
        tokio::spawn(async move {
            if sender.ready().await.is_err() {
                return;
            }
            let mut all = pool.kept.lock();
            let kept = all.entry(place).or_default();
            kept.retain(|(sender, since)| since.elapsed() < IDLE && sender.is_ready());
            if kept.len() < MOST_IDLE {
                kept.push((sender, Instant::now()));
            }
        });
    }

    /// Closes what leads elsewhere.
    pub fn only(&self, places: &HashSet<Place>) {
        self.kept.lock().retain(|place, _| places.contains(place));
    }
}

async fn begin<IO>(stream: IO, address: SocketAddr) -> io::Result<Sender>
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) =
        http1::Builder::new().handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
    tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(%error, %address, "a connection to a pod ended");
        }
    });
    Ok(sender)
}
