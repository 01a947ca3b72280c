//! Tries the way to the pods of every node once it is there: TCP and UDP, small packets and large ones, from the pods'
//! network of this node to that of the other and back. What fails is told in an event of this node that names the cause.
//!
//! Every node answers, to nobody but other nodes and pods.

mod echo;
pub mod verdict;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use nft::{Ip, Net};
use reconcile::{Ctx, Key, Object as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, UdpSocket};
use tokio::sync::{Notify, Semaphore};
use tokio::task::AbortHandle;

use super::plan;
use verdict::{Results, verdict};

/// Where nodes answer.
pub const PORT: u16 = 10247;
const SMALL: usize = 64;
/// Nearly all that fits into a packet of Ethernet inside another.
const LARGE_UDP: usize = 1400;
/// More than one packet of the largest size.
const LARGE_TCP: usize = 16 << 10;
const ANSWER: Duration = Duration::from_secs(2);
/// Trials until a failure is believed: the other node may be about to make its network. And the pauses between, and
/// afterwards.
const TRIALS: usize = 10;
const PAUSE: Duration = Duration::from_secs(3);
const LONG_PAUSE: Duration = Duration::from_secs(60);
/// Trials at the same time.
const AT_ONCE: usize = 8;

/// Answers other nodes and tries them until the context's shutdown.
pub async fn run(ctx: Ctx, own: String) {
    let ctx = Ctx { events: ctx.events.from("kube-proxy"), ..ctx };
    let mut shutdown = ctx.shutdown.clone();
    let work = async { tokio::join!(echo::run(&ctx), try_all(&ctx, &own)) };
    tokio::select! {
        _ = work => {}
        _ = shutdown.wait_for(|stop| *stop) => {}
    }
}

type Routes = Vec<(Net, IpAddr)>;

async fn try_all(ctx: &Ctx, own: &str) {
    let news = Arc::new(Notify::new());
    let tell = news.clone();
    ctx.caches.nodes().listen(move |changed| {
        let seen = |node: &Arc<Node>| wanted(node);
        if changed.before.map(seen) != changed.after.map(seen) {
            tell.notify_one();
        }
    });
    ctx.caches.nodes().filled().await;
    let turns = Arc::new(Semaphore::new(AT_ONCE));
    let mut tried: BTreeMap<String, (Routes, Routes, Ending)> = BTreeMap::new();
    loop {
        let nodes = ctx.caches.nodes().all();
        let here = nodes.iter().find(|node| node.name() == own).and_then(wanted);
        let there = nodes.iter().filter(|node| node.name() != own);
        let there: BTreeMap<String, Routes> =
            there.filter_map(|node| Some((node.name().to_owned(), wanted(node)?))).collect();
        let from = here.unwrap_or_default();
        tried.retain(|name, (routes, was, _)| there.get(name) == Some(routes) && *was == from);
        for (name, routes) in there {
            if tried.contains_key(&name) || from.is_empty() {
                continue;
            }
            let trial = try_one(ctx.clone(), own.to_owned(), name.clone(), from.clone(), routes.clone());
            let turns = turns.clone();
            let task = tokio::spawn(async move { trial.run(turns).await });
            tried.insert(name, (routes, from.clone(), Ending(task.abort_handle())));
        }
        news.notified().await;
    }
}

/// Ends a task when nobody is interested any more.
struct Ending(AbortHandle);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Where the pods of a node are, once it can have any.
fn wanted(node: &Arc<Node>) -> Option<Routes> {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    let ready =
        conditions.into_iter().flatten().any(|known| known.type_ == "Ready" && known.status == "True");
    Some(plan::routes_to(node)).filter(|routes| ready && !routes.is_empty())
}

struct Trial {
    ctx: Ctx,
    own: String,
    name: String,
    /// Each network there with an address of this node's own pods' network.
    ways: Vec<(Net, IpAddr, IpAddr)>,
}

fn try_one(ctx: Ctx, own: String, name: String, from: Routes, to: Routes) -> Trial {
    let same = |net: &Net| from.iter().find(|(own, _)| Ip::of(own.first()) == Ip::of(net.first()));
    let ways = to.iter().filter_map(|(net, node)| Some((*net, *node, gateway(same(net)?.0)?))).collect();
    Trial { ctx, own, name, ways }
}

/// A node's address in the network of its pods.
fn gateway(net: Net) -> Option<IpAddr> {
    match net.first() {
        IpAddr::V4(first) => first.to_bits().checked_add(1).map(|bits| IpAddr::V4(bits.into())),
        IpAddr::V6(first) => first.to_bits().checked_add(1).map(|bits| IpAddr::V6(bits.into())),
    }
}

impl Trial {
    async fn run(self, turns: Arc<Semaphore>) {
        for (net, node, from) in &self.ways {
            let Some(to) = gateway(*net) else { continue };
            let mut told = false;
            for trial in 1.. {
                let results = match turns.acquire().await {
                    Ok(_turn) => exchange(*from, SocketAddr::new(to, PORT)).await,
                    Err(_) => return,
                };
                let direct = Ip::of(*node) == Ip::of(net.first()) && is_direct(*node).await;
                match verdict(&results, &self.name, *net, *node, direct) {
                    None => {
                        tracing::debug!(node = self.name, %net, "pods of another node answer");
                        if told {
                            let message = format!("The pods' network {net} of node {} answers.", self.name);
                            self.tell(|events, node| events.normal(node, "PodNetworkWorks", message));
                        }
                        break;
                    }
                    Some(why) if trial == TRIALS => {
                        tracing::warn!(node = self.name, %net, "{why}");
                        self.tell(|events, node| events.warning(node, "PodNetworkBroken", why));
                        told = true;
                    }
                    Some(_) => {}
                }
                tokio::time::sleep(if told { LONG_PAUSE } else { PAUSE }).await;
            }
        }
    }

    fn tell(&self, tell: impl FnOnce(&reconcile::Recorder, &Node)) {
        if let Some(node) = self.ctx.caches.nodes().get(&Key::new("", &self.own)) {
            tell(&self.ctx.events, &node);
        }
    }
}

async fn is_direct(node: IpAddr) -> bool {
    let look = move || sys::netlink::Netlink::open().and_then(|mut netlink| netlink.way_to(node));
    tokio::task::spawn_blocking(look).await.is_ok_and(|way| way.is_ok_and(|(_, gateway)| gateway.is_none()))
}

/// Small and large packets of both kinds, to a node and back.
async fn exchange(from: IpAddr, to: SocketAddr) -> Results {
    let within = async |work: std::pin::Pin<Box<dyn Future<Output = std::io::Result<()>> + Send>>| {
        tokio::time::timeout(ANSWER, work).await.is_ok_and(|outcome| outcome.is_ok())
    };
    Results {
        udp: within(Box::pin(udp(from, to, SMALL))).await,
        large_udp: within(Box::pin(udp(from, to, LARGE_UDP))).await,
        tcp: within(Box::pin(tcp(from, to, SMALL))).await,
        large_tcp: within(Box::pin(tcp(from, to, LARGE_TCP))).await,
    }
}

async fn udp(from: IpAddr, to: SocketAddr, size: usize) -> std::io::Result<()> {
    let socket = UdpSocket::bind((from, 0)).await?;
    socket.connect(to).await?;
    socket.send(&vec![0x73; size]).await?;
    let mut answer = vec![0; size];
    let count = socket.recv(&mut answer).await?;
    if count == size { Ok(()) } else { Err(std::io::ErrorKind::InvalidData.into()) }
}

async fn tcp(from: IpAddr, to: SocketAddr, size: usize) -> std::io::Result<()> {
    let socket = if to.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.bind((from, 0).into())?;
    let mut stream = socket.connect(to).await?;
    let (mut reader, mut writer) = stream.split();
    let mut answer = vec![0; size];
    let sent = vec![0x73; size];
    tokio::try_join!(writer.write_all(&sent), async { reader.read_exact(&mut answer).await.map(drop) })?;
    Ok(())
}
