//! Checks the connectivity to the pods of every node: TCP and UDP, small and large packets, from the
//! pod network of this node to that of the other and back. Failures are reported as an event of this
//! node that names the probable cause.
//!
//! Every node also runs an echo server for the checks of others, which responds only to nodes and pods.

mod echo;
pub mod verdict;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use nft::{IpFamily, IpNet};
use reconcile::{Ctx, Key, Object as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, UdpSocket};
use tokio::sync::{Notify, Semaphore};
use tokio::task::AbortHandle;

use super::plan;
use verdict::{CheckResults, failure_message};

/// The port of the echo server.
pub const PORT: u16 = 10247;
const SMALL_PACKET_BYTES: usize = 64;
/// Close to the largest packet that fits into an Ethernet frame when encapsulated.
const LARGE_UDP_BYTES: usize = 1400;
/// More than one segment of the maximum size.
const LARGE_TCP_BYTES: usize = 16 << 10;
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// The number of attempts before a failure is reported, because the other node may still be setting up
/// its network; and the intervals before and after that.
const MAX_ATTEMPTS: usize = 10;
const RETRY_INTERVAL: Duration = Duration::from_secs(3);
const FAILED_RETRY_INTERVAL: Duration = Duration::from_secs(60);
/// The number of checks that may run concurrently.
const MAX_CONCURRENT_CHECKS: usize = 8;

/// Runs the echo server and the checks until shutdown.
pub async fn run(ctx: Ctx, own: String) {
    let ctx = Ctx { events: ctx.events.from("kube-proxy"), ..ctx };
    let mut shutdown = ctx.shutdown.clone();
    let work = async { tokio::join!(echo::run(&ctx), check_all_nodes(&ctx, &own)) };
    tokio::select! {
        _ = work => {}
        _ = shutdown.wait_for(|stop| *stop) => {}
    }
}

type Routes = Vec<(IpNet, IpAddr)>;

async fn check_all_nodes(ctx: &Ctx, own: &str) {
    let node_changes = Arc::new(Notify::new());
    let notify = node_changes.clone();
    ctx.caches.nodes().listen(move |changed| {
        let seen = |node: &Arc<Node>| reachable_routes(node);
        if changed.before.map(seen) != changed.after.map(seen) {
            notify.notify_one();
        }
    });
    ctx.caches.nodes().wait_for_sync().await;
    let permits = Arc::new(Semaphore::new(MAX_CONCURRENT_CHECKS));
    let mut checks: BTreeMap<String, (Routes, Routes, CheckTask)> = BTreeMap::new();
    loop {
        let nodes = ctx.caches.nodes().all();
        let here = nodes.iter().find(|node| node.name() == own).and_then(reachable_routes);
        let there = nodes.iter().filter(|node| node.name() != own);
        let there: BTreeMap<String, Routes> =
            there.filter_map(|node| Some((node.name().to_owned(), reachable_routes(node)?))).collect();
        let from = here.unwrap_or_default();
        checks.retain(|name, (routes, was, _)| there.get(name) == Some(routes) && *was == from);
        for (name, routes) in there {
            if checks.contains_key(&name) || from.is_empty() {
                continue;
            }
            let check = new_check(ctx.clone(), own.to_owned(), name.clone(), from.clone(), routes.clone());
            let permits = permits.clone();
            let task = tokio::spawn(async move { check.run(permits).await });
            checks.insert(name, (routes, from.clone(), CheckTask(task.abort_handle())));
        }
        node_changes.notified().await;
    }
}

/// Aborts the task when dropped.
struct CheckTask(AbortHandle);

impl Drop for CheckTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The pod networks of a node, if it is Ready and has any.
fn reachable_routes(node: &Arc<Node>) -> Option<Routes> {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    let ready =
        conditions.into_iter().flatten().any(|known| known.type_ == "Ready" && known.status == "True");
    Some(plan::routes_to(node)).filter(|routes| ready && !routes.is_empty())
}

struct ConnectivityCheck {
    ctx: Ctx,
    own: String,
    name: String,
    /// The networks of the other node with the node's address, and the source address for the check.
    paths: Vec<(IpNet, IpAddr, IpAddr)>,
}

fn new_check(ctx: Ctx, own: String, name: String, from: Routes, to: Routes) -> ConnectivityCheck {
    let same =
        |net: &IpNet| from.iter().find(|(own, _)| IpFamily::of(own.first()) == IpFamily::of(net.first()));
    let paths = to.iter().filter_map(|(net, node)| Some((*net, *node, gateway(same(net)?.0)?))).collect();
    ConnectivityCheck { ctx, own, name, paths }
}

/// The node's own address in its pod network.
fn gateway(net: IpNet) -> Option<IpAddr> {
    match net.first() {
        IpAddr::V4(first) => first.to_bits().checked_add(1).map(|bits| IpAddr::V4(bits.into())),
        IpAddr::V6(first) => first.to_bits().checked_add(1).map(|bits| IpAddr::V6(bits.into())),
    }
}

impl ConnectivityCheck {
    async fn run(self, permits: Arc<Semaphore>) {
        for (net, node, from) in &self.paths {
            let Some(to) = gateway(*net) else { continue };
            let mut reported = false;
            for attempt in 1.. {
                let results = match permits.acquire().await {
                    Ok(_turn) => send_and_receive(*from, SocketAddr::new(to, PORT)).await,
                    Err(_) => return,
                };
                let direct = IpFamily::of(*node) == IpFamily::of(net.first()) && is_direct(*node).await;
                match failure_message(&results, &self.name, *net, *node, direct) {
                    None => {
                        tracing::debug!(node = self.name, %net, "connectivity check of a node succeeded");
                        if reported {
                            let message =
                                format!("The pod network {net} of node {} is reachable.", self.name);
                            self.record_event(|events, node| events.normal(node, "PodNetworkWorks", message));
                        }
                        break;
                    }
                    Some(why) if attempt == MAX_ATTEMPTS => {
                        tracing::warn!(node = self.name, %net, "{why}");
                        self.record_event(|events, node| events.warning(node, "PodNetworkBroken", why));
                        reported = true;
                    }
                    Some(_) => {}
                }
                tokio::time::sleep(if reported { FAILED_RETRY_INTERVAL } else { RETRY_INTERVAL }).await;
            }
        }
    }

    fn record_event(&self, record: impl FnOnce(&reconcile::Recorder, &Node)) {
        if let Some(node) = self.ctx.caches.nodes().get(&Key::new("", &self.own)) {
            record(&self.ctx.events, &node);
        }
    }
}

async fn is_direct(node: IpAddr) -> bool {
    let look = move || sys::netlink::Netlink::open().and_then(|mut netlink| netlink.lookup_route(node));
    tokio::task::spawn_blocking(look).await.is_ok_and(|way| way.is_ok_and(|(_, gateway)| gateway.is_none()))
}

/// Sends small and large packets with UDP and TCP, and waits for the echo.
async fn send_and_receive(from: IpAddr, to: SocketAddr) -> CheckResults {
    let within = async |work: std::pin::Pin<Box<dyn Future<Output = std::io::Result<()>> + Send>>| {
        tokio::time::timeout(ANSWER_TIMEOUT, work).await.is_ok_and(|result| result.is_ok())
    };
    CheckResults {
        udp: within(Box::pin(udp(from, to, SMALL_PACKET_BYTES))).await,
        large_udp: within(Box::pin(udp(from, to, LARGE_UDP_BYTES))).await,
        tcp: within(Box::pin(tcp(from, to, SMALL_PACKET_BYTES))).await,
        large_tcp: within(Box::pin(tcp(from, to, LARGE_TCP_BYTES))).await,
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
