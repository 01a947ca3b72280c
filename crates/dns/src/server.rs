//! Serves DNS over UDP and TCP.

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

use crate::answer::{Answer, Record, RecordData, Zone};
use crate::cache::Cache;
use crate::cluster::Cluster;
use crate::forward;
use crate::metrics::Metrics;
use crate::wire::{self, CLASS_INTERNET, Query, Rcode, record_type};

/// The limits of concurrent upstream queries and of TCP connections. Excess queries are refused,
/// excess connections wait.
const MAX_CONCURRENT_UPSTREAM_REQUESTS: usize = 1000;
const MAX_CONNECTIONS: usize = 256;
/// The idle timeout of a TCP connection.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// Decides which clients get a response. An open resolver can be abused for amplification attacks.
pub type ClientFilter = Arc<dyn Fn(IpAddr) -> bool + Send + Sync>;

/// The configuration of the DNS server.
#[derive(Clone)]
pub struct Config {
    /// The cluster domain, such as `cluster.local`.
    pub domain: String,
    /// The resolvers for all other names.
    pub upstream: Vec<SocketAddr>,
    pub allowed: ClientFilter,
}

/// A server that is bound to its addresses, but not running yet.
pub struct Server {
    udp: Arc<UdpSocket>,
    tcp: TcpListener,
}

impl Server {
    /// Binds UDP and TCP. With port 0 the two ports are free ones and may differ.
    pub async fn bind(address: SocketAddr) -> io::Result<Server> {
        let udp = UdpSocket::bind(address).await?;
        // The same port for both if possible.
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

    /// Serves queries until shutdown. Starts when the caches are synced, because an early answer
    /// could be wrong.
    pub async fn run(self, ctx: Ctx, config: Config, metrics: Arc<Metrics>) {
        let cluster = Cluster::new(&ctx.caches);
        let domain = config.domain.trim_end_matches('.').to_lowercase();
        let resolver = Arc::new(Resolver {
            cluster,
            config: Config { domain, ..config },
            cache: Mutex::default(),
            metrics,
            query_semaphore: Semaphore::new(MAX_CONCURRENT_UPSTREAM_REQUESTS),
        });
        let mut shutdown = ctx.shutdown.clone();
        let serve = async {
            ctx.caches.wait_for_sync().await;
            tokio::join!(serve_udp(self.udp, resolver.clone()), serve_tcp(self.tcp, resolver));
        };
        tokio::select! {
            () = serve => {}
            _ = shutdown.wait_for(|stop| *stop) => {}
        }
    }
}

async fn serve_udp(socket: Arc<UdpSocket>, resolver: Arc<Resolver>) {
    let mut buffer = vec![0; wire::MAX_UDP_BYTES];
    loop {
        let Ok((length, peer)) = socket.recv_from(&mut buffer).await else {
            // `recv_from` reports ICMP errors of earlier responses to closed ports. They concern
            // other clients.
            tokio::task::yield_now().await;
            continue;
        };
        if !(resolver.config.allowed)(peer.ip().to_canonical()) {
            continue;
        }
        let question = buffer.get(..length).unwrap_or_default().to_vec();
        match resolver.local_answer(&question, Transport::Udp) {
            LocalAnswer::Reply(reply) => _ = socket.try_send_to(&reply, peer),
            LocalAnswer::Ignore => {}
            LocalAnswer::Forward => {
                let (socket, resolver) = (socket.clone(), resolver.clone());
                tokio::spawn(async move {
                    if let Some(reply) = resolver.resolve_upstream(&question, Transport::Udp).await {
                        let _ = socket.send_to(&reply, peer).await;
                    }
                });
            }
        }
    }
}

async fn serve_tcp(listener: TcpListener, resolver: Arc<Resolver>) {
    let semaphore = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(permit) = semaphore.clone().acquire_owned().await else { return };
        let Ok((stream, peer)) = listener.accept().await else {
            tokio::task::yield_now().await;
            continue;
        };
        if !(resolver.config.allowed)(peer.ip().to_canonical()) {
            continue;
        }
        let resolver = resolver.clone();
        tokio::spawn(async move {
            let _ = handle_connection(stream, &resolver).await;
            drop(permit);
        });
    }
}

/// Handles queries of one connection in order, until the client closes it or is idle for too long.
async fn handle_connection(mut stream: TcpStream, resolver: &Resolver) -> io::Result<()> {
    loop {
        let read_question = async {
            let mut question = vec![0; usize::from(stream.read_u16().await?)];
            stream.read_exact(&mut question).await?;
            io::Result::Ok(question)
        };
        let question = tokio::time::timeout(IDLE_TIMEOUT, read_question).await??;
        let reply = match resolver.local_answer(&question, Transport::Tcp) {
            LocalAnswer::Reply(reply) => Some(reply),
            LocalAnswer::Ignore => None,
            LocalAnswer::Forward => resolver.resolve_upstream(&question, Transport::Tcp).await,
        };
        let Some(reply) = reply else { return Ok(()) };
        let length = u16::try_from(reply.len()).map_err(io::Error::other)?;
        let bytes = [&length.to_be_bytes()[..], &reply].concat();
        tokio::time::timeout(IDLE_TIMEOUT, stream.write_all(&bytes)).await??;
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Transport {
    Udp,
    Tcp,
}

/// The result of a query without upstream requests.
enum LocalAnswer {
    Reply(Vec<u8>),
    /// Send no response.
    Ignore,
    Forward,
}

struct Resolver {
    cluster: Cluster,
    config: Config,
    cache: Mutex<Cache>,
    metrics: Arc<Metrics>,
    query_semaphore: Semaphore,
}

impl Resolver {
    fn local_answer(&self, question: &[u8], transport: Transport) -> LocalAnswer {
        let reply = match wire::parse_query(question) {
            Err(None) => return LocalAnswer::Ignore,
            Err(Some(code)) => wire::encode_error(question, code),
            Ok(query) => {
                self.metrics.record_request(
                    if transport == Transport::Udp { "udp" } else { "tcp" },
                    query.record_type,
                );
                match self.cluster_answer(&query) {
                    Some(answer) if answer.external_name.is_some() && is_address_type(query.record_type) => {
                        return LocalAnswer::Forward;
                    }
                    Some(answer) => {
                        Some(wire::encode_reply(&query, &answer, max_reply_bytes(&query, transport)))
                    }
                    None => match self.cached(&query, transport) {
                        Some(reply) => Some(reply),
                        None => return LocalAnswer::Forward,
                    },
                }
            }
        };
        match reply {
            Some(reply) => LocalAnswer::Reply(self.record_response(reply)),
            None => LocalAnswer::Ignore,
        }
    }

    /// The answer from the cluster, if the name is in the cluster domain.
    fn cluster_answer(&self, query: &Query<'_>) -> Option<Answer> {
        if query.class != CLASS_INTERNET {
            return Some(Answer { authoritative: false, ..Answer::empty(Rcode::Refused) });
        }
        let zone = Zone { domain: &self.config.domain, view: &self.cluster };
        let mut answer = zone.answer(&query.name, query.record_type)?;
        // Most clients use the first address, so the order is rotated. CNAME records stay first.
        if is_address_type(query.record_type)
            && answer.answers.iter().all(|record| record.data.record_type() == query.record_type)
        {
            let count = answer.answers.len().max(1);
            answer.answers.rotate_left(usize::from(query.id) % count);
        }
        Some(answer)
    }

    fn cached(&self, query: &Query<'_>, transport: Transport) -> Option<Vec<u8>> {
        let found = self.cache.lock().get(query, Instant::now());
        let found = found.filter(|reply| reply.len() <= max_reply_bytes(query, transport));
        let count = if found.is_some() { &self.metrics.cache_hits } else { &self.metrics.cache_misses };
        count.fetch_add(1, Relaxed);
        found
    }

    /// Resolves a query that needs an upstream request.
    async fn resolve_upstream(&self, question: &[u8], transport: Transport) -> Option<Vec<u8>> {
        let query = wire::parse_query(question).ok()?;
        let Ok(_permit) = self.query_semaphore.try_acquire() else {
            return wire::encode_error(question, Rcode::Refused).map(|reply| self.record_response(reply));
        };
        let reply = match self.cluster_answer(&query) {
            Some(answer) => self.follow_cname(&query, answer, transport).await,
            None => self.forward_query(&query, question, transport).await,
        };
        Some(self.record_response(reply))
    }

    async fn forward_query(&self, query: &Query<'_>, question: &[u8], transport: Transport) -> Vec<u8> {
        self.metrics.forward_requests.fetch_add(1, Relaxed);
        let failed = || {
            wire::encode_reply(
                query,
                &Answer { authoritative: false, ..Answer::empty(Rcode::ServerFailure) },
                512,
            )
        };
        let Some(reply) =
            forward::exchange(&self.config.upstream, question, transport == Transport::Tcp).await
        else {
            return failed();
        };
        self.cache.lock().insert(query, &reply, Instant::now());
        if reply.len() <= max_reply_bytes(query, transport) {
            return reply;
        }
        // The response is too long for the UDP limit of this client. It must retry over TCP.
        let mut truncated =
            wire::encode_reply(query, &Answer { authoritative: false, ..Answer::empty(Rcode::Ok) }, 512);
        truncated[2] |= 2;
        truncated
    }

    /// Answers for an ExternalName Service: adds the addresses of the external name, resolved
    /// upstream.
    async fn follow_cname(&self, query: &Query<'_>, mut answer: Answer, transport: Transport) -> Vec<u8> {
        if let Some(target) = answer.external_name.take() {
            let question = wire::encode_question(query.id, &target, query.record_type);
            self.metrics.forward_requests.fetch_add(1, Relaxed);
            let reply =
                forward::exchange(&self.config.upstream, &question, transport == Transport::Tcp).await;
            for (ttl, data) in reply.as_deref().map(address_records).unwrap_or_default() {
                answer.answers.push(Record { name: target.clone(), ttl, data });
            }
        }
        wire::encode_reply(query, &answer, max_reply_bytes(query, transport))
    }

    fn record_response(&self, reply: Vec<u8>) -> Vec<u8> {
        self.metrics.record_response(wire::read_u16(&reply, 2).unwrap_or(0));
        reply
    }
}

fn is_address_type(record_type: u16) -> bool {
    matches!(record_type, record_type::A | record_type::AAAA)
}

fn max_reply_bytes(query: &Query<'_>, transport: Transport) -> usize {
    if transport == Transport::Tcp { usize::from(u16::MAX) } else { query.max_udp_reply_bytes() }
}

/// The addresses in a response, whatever CNAME records precede them.
fn address_records(reply: &[u8]) -> Vec<(u32, RecordData)> {
    let found = wire::parse_records(reply).unwrap_or_default();
    let answer_count = usize::from(wire::read_u16(reply, 6).unwrap_or(0));
    let data = |record: &wire::DnsRecordHeader| -> Option<RecordData> {
        let bytes = reply.get(record.ttl_offset + 6..record.end)?;
        match record.record_type {
            record_type::A => Some(RecordData::A(<[u8; 4]>::try_from(bytes).ok()?.into())),
            record_type::AAAA => Some(RecordData::Aaaa(<[u8; 16]>::try_from(bytes).ok()?.into())),
            _ => None,
        }
    };
    found.iter().take(answer_count).filter_map(|record| Some((record.ttl, data(record)?))).collect()
}
