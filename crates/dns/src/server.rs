//! The sockets: takes questions over UDP and TCP and answers them.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use reconcile::Ctx;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;

use crate::answer::{Answer, Data, Record, Zone};
use crate::cache::Cache;
use crate::cluster::Cluster;
use crate::forward;
use crate::metrics::Metrics;
use crate::wire::{self, Code, INTERNET, Query, kind};

/// How many questions are handed on at once, and how many connections there are: the rest waits or goes.
const MOST_AT_ONCE: usize = 1000;
const MOST_CONNECTIONS: usize = 256;
/// How long a connection may rest.
const REST: Duration = Duration::from_secs(10);

/// Whom to answer: an open resolver is a weapon.
pub type Allowed = Arc<dyn Fn(IpAddr) -> bool + Send + Sync>;

/// What the server is told.
#[derive(Clone)]
pub struct Config {
    /// The cluster's domain, such as `cluster.local`.
    pub domain: String,
    /// Who knows all other names.
    pub upstream: Vec<SocketAddr>,
    pub allowed: Allowed,
}

/// A server that listens already but does not answer yet.
pub struct Server {
    udp: Arc<UdpSocket>,
    tcp: TcpListener,
}

impl Server {
    /// Listens on both; port 0 takes free ones, which may differ.
    pub async fn bind(address: SocketAddr) -> io::Result<Server> {
        let udp = UdpSocket::bind(address).await?;
        // Preferably the same port for both.
        let tcp = match TcpListener::bind(udp.local_addr()?).await {
            Err(error) if address.port() == 0 && error.kind() == io::ErrorKind::AddrInUse => {
                TcpListener::bind(address).await?
            }
            other => other?,
        };
        Ok(Server { udp: Arc::new(udp), tcp })
    }

    pub fn udp_address(&self) -> io::Result<SocketAddr> {
        self.udp.local_addr()
    }

    pub fn tcp_address(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }

    /// Answers until the context's shutdown. Begins once it knows the cluster: no answer is better than a wrong one.
    pub async fn run(self, ctx: Ctx, config: Config, metrics: Arc<Metrics>) {
        let cluster = Cluster::new(&ctx.caches);
        let domain = config.domain.trim_end_matches('.').to_lowercase();
        let answering = Arc::new(Answering {
            cluster,
            config: Config { domain, ..config },
            cache: Mutex::default(),
            metrics,
            at_once: Semaphore::new(MOST_AT_ONCE),
        });
        let mut shutdown = ctx.shutdown.clone();
        let work = async {
            ctx.caches.filled().await;
            tokio::join!(packets(self.udp, answering.clone()), connections(self.tcp, answering));
        };
        tokio::select! {
            () = work => {}
            _ = shutdown.wait_for(|stop| *stop) => {}
        }
    }
}

async fn packets(socket: Arc<UdpSocket>, answering: Arc<Answering>) {
    let mut buffer = vec![0; wire::MOST_UDP];
    loop {
        let Ok((length, peer)) = socket.recv_from(&mut buffer).await else {
            // An earlier answer has met a closed port; that is the client's affair.
            tokio::task::yield_now().await;
            continue;
        };
        if !(answering.config.allowed)(peer.ip().to_canonical()) {
            continue;
        }
        let question = buffer.get(..length).unwrap_or_default().to_vec();
        match answering.at_hand(&question, Over::Udp) {
            AtHand::Reply(reply) => _ = socket.try_send_to(&reply, peer),
            AtHand::Nothing => {}
            AtHand::Elsewhere => {
                let (socket, answering) = (socket.clone(), answering.clone());
                tokio::spawn(async move {
                    if let Some(reply) = answering.elsewhere(&question, Over::Udp).await {
                        let _ = socket.send_to(&reply, peer).await;
                    }
                });
            }
        }
    }
}

async fn connections(listener: TcpListener, answering: Arc<Answering>) {
    let room = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    loop {
        let Ok(permit) = room.clone().acquire_owned().await else { return };
        let Ok((stream, peer)) = listener.accept().await else {
            tokio::task::yield_now().await;
            continue;
        };
        if !(answering.config.allowed)(peer.ip().to_canonical()) {
            continue;
        }
        let answering = answering.clone();
        tokio::spawn(async move {
            let _ = connection(stream, &answering).await;
            drop(permit);
        });
    }
}

/// One question after the other, until the client goes or rests for too long.
async fn connection(mut stream: TcpStream, answering: &Answering) -> io::Result<()> {
    loop {
        let reading = async {
            let mut question = vec![0; usize::from(stream.read_u16().await?)];
            stream.read_exact(&mut question).await?;
            io::Result::Ok(question)
        };
        let question = tokio::time::timeout(REST, reading).await??;
        let reply = match answering.at_hand(&question, Over::Tcp) {
            AtHand::Reply(reply) => Some(reply),
            AtHand::Nothing => None,
            AtHand::Elsewhere => answering.elsewhere(&question, Over::Tcp).await,
        };
        let Some(reply) = reply else { return Ok(()) };
        let length = u16::try_from(reply.len()).map_err(io::Error::other)?;
        let bytes = [&length.to_be_bytes()[..], &reply].concat();
        tokio::time::timeout(REST, stream.write_all(&bytes)).await??;
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Over {
    Udp,
    Tcp,
}

/// What can be said without asking anybody.
enum AtHand {
    Reply(Vec<u8>),
    /// This is not to be answered.
    Nothing,
    Elsewhere,
}

struct Answering {
    cluster: Cluster,
    config: Config,
    cache: Mutex<Cache>,
    metrics: Arc<Metrics>,
    at_once: Semaphore,
}

impl Answering {
    fn at_hand(&self, question: &[u8], over: Over) -> AtHand {
        let reply = match wire::query(question) {
            Err(None) => return AtHand::Nothing,
            Err(Some(code)) => wire::error(question, code),
            Ok(query) => {
                self.metrics.asked(if over == Over::Udp { "udp" } else { "tcp" }, query.kind);
                match self.own(&query) {
                    Some(answer) if answer.elsewhere.is_some() && is_address(query.kind) => {
                        return AtHand::Elsewhere;
                    }
                    Some(answer) => Some(wire::reply(&query, &answer, limit(&query, over))),
                    None => match self.cached(&query, over) {
                        Some(reply) => Some(reply),
                        None => return AtHand::Elsewhere,
                    },
                }
            }
        };
        match reply {
            Some(reply) => AtHand::Reply(self.counted(reply)),
            None => AtHand::Nothing,
        }
    }

    /// The answer of the cluster, if the name is its own.
    fn own(&self, query: &Query<'_>) -> Option<Answer> {
        if query.class != INTERNET {
            return Some(Answer { authoritative: false, ..Answer::empty(Code::Refused) });
        }
        let zone = Zone { domain: &self.config.domain, view: &self.cluster };
        let mut answer = zone.answer(&query.name, query.kind)?;
        // Most clients take the first, so each gets another one. Aliases stay where they are.
        if is_address(query.kind) && answer.answers.iter().all(|record| record.data.kind() == query.kind) {
            let count = answer.answers.len().max(1);
            answer.answers.rotate_left(usize::from(query.id) % count);
        }
        Some(answer)
    }

    fn cached(&self, query: &Query<'_>, over: Over) -> Option<Vec<u8>> {
        let found = self.cache.lock().get(query, Instant::now());
        let found = found.filter(|reply| reply.len() <= limit(query, over));
        let count = if found.is_some() { &self.metrics.cache_hits } else { &self.metrics.cache_misses };
        count.fetch_add(1, Relaxed);
        found
    }

    /// An answer for which others have to be asked.
    async fn elsewhere(&self, question: &[u8], over: Over) -> Option<Vec<u8>> {
        let query = wire::query(question).ok()?;
        let Ok(_permit) = self.at_once.try_acquire() else {
            return wire::error(question, Code::Refused).map(|reply| self.counted(reply));
        };
        let reply = match self.own(&query) {
            Some(answer) => self.follow_alias(&query, answer, over).await,
            None => self.hand_on(&query, question, over).await,
        };
        Some(self.counted(reply))
    }

    async fn hand_on(&self, query: &Query<'_>, question: &[u8], over: Over) -> Vec<u8> {
        self.metrics.forwarded.fetch_add(1, Relaxed);
        let failed =
            || wire::reply(query, &Answer { authoritative: false, ..Answer::empty(Code::Failed) }, 512);
        let Some(reply) = forward::ask(&self.config.upstream, question, over == Over::Tcp).await else {
            return failed();
        };
        self.cache.lock().put(query, &reply, Instant::now());
        if reply.len() <= limit(query, over) {
            return reply;
        }
        // It came although it is too long for this client, who has to ask again over TCP.
        let mut cut = wire::reply(query, &Answer { authoritative: false, ..Answer::empty(Code::Ok) }, 512);
        cut[2] |= 2;
        cut
    }

    /// A name of the cluster that stands for one outside: with the addresses others know for that.
    async fn follow_alias(&self, query: &Query<'_>, mut answer: Answer, over: Over) -> Vec<u8> {
        if let Some(target) = answer.elsewhere.take() {
            let question = wire::question(query.id, &target, query.kind);
            self.metrics.forwarded.fetch_add(1, Relaxed);
            let reply = forward::ask(&self.config.upstream, &question, over == Over::Tcp).await;
            for (ttl, data) in reply.as_deref().map(addresses).unwrap_or_default() {
                answer.answers.push(Record { name: target.clone(), ttl, data });
            }
        }
        wire::reply(query, &answer, limit(query, over))
    }

    fn counted(&self, reply: Vec<u8>) -> Vec<u8> {
        self.metrics.answered(wire::number(&reply, 2).unwrap_or(0));
        reply
    }
}

fn is_address(wanted: u16) -> bool {
    matches!(wanted, kind::A | kind::AAAA)
}

fn limit(query: &Query<'_>, over: Over) -> usize {
    if over == Over::Tcp { usize::from(u16::MAX) } else { query.limit() }
}

/// The addresses in somebody's answer, whatever aliases lead to them.
fn addresses(reply: &[u8]) -> Vec<(u32, Data)> {
    let found = wire::records(reply).unwrap_or_default();
    let answers = usize::from(wire::number(reply, 6).unwrap_or(0));
    let data = |record: &wire::Stepped| -> Option<Data> {
        let bytes = reply.get(record.ttl_at + 6..record.end)?;
        match record.kind {
            kind::A => Some(Data::A(<[u8; 4]>::try_from(bytes).ok()?.into())),
            kind::AAAA => Some(Data::Aaaa(<[u8; 16]>::try_from(bytes).ok()?.into())),
            _ => None,
        }
    };
    found.iter().take(answers).filter_map(|record| Some((record.ttl, data(record)?))).collect()
}
