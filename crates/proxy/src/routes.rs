//! Routes to the pods of other nodes. Nodes on the same link as this one are used as gateways. Packets
//! to all others are encapsulated in VXLAN ([`overlay`]).

pub mod connectivity_check;
mod overlay;
pub mod plan;
mod route_monitor;

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use nft::{IpFamily, IpNet};
use reconcile::{Ctx, Object as _};
use sys::netlink::Netlink;
use tokio::sync::Notify;

pub use overlay::LINK_NAMES as OVERLAYS;
pub use route_monitor::RouteMonitor;

/// The routing protocol number of our routes, which distinguishes them from those of other programs.
const ROUTE_PROTOCOL: u8 = 0x73;
/// How long to wait before a retry after a route could not be added.
const RETRY_INTERVAL: Duration = Duration::from_secs(60);

/// Keeps routes to the pods of all other nodes until shutdown. The routes stay afterwards, so that
/// connections survive a restart.
pub async fn run(ctx: Ctx, node: String) {
    tokio::spawn(connectivity_check::run(ctx.clone(), node.clone()));
    let node_changes = Arc::new(Notify::new());
    let notify = node_changes.clone();
    ctx.caches.nodes().listen(move |changed| {
        let seen = |node: &Arc<Node>| plan::routes_to(node);
        if changed.before.map(seen) != changed.after.map(seen) {
            notify.notify_one();
        }
    });
    let mut shutdown = ctx.shutdown.clone();
    let work = async {
        ctx.caches.nodes().wait_for_sync().await;
        let monitor = RouteMonitor::open();
        loop {
            let nodes = ctx.caches.nodes().all();
            let desired = plan::plan(nodes.iter().map(Arc::as_ref), &node);
            let own = nodes.iter().find(|known| known.name() == node);
            let pod_networks: Vec<IpNet> = own.map(|own| plan::networks(own)).unwrap_or_default();
            let addresses = own.map(|own| plan::addresses(own)).unwrap_or_default();
            let work = move || sync_routes(&desired, &pod_networks, &addresses);
            let result = tokio::task::spawn_blocking(work).await;
            let again = async {
                match result.is_ok_and(|done| done) {
                    true => std::future::pending().await,
                    false => tokio::time::sleep(RETRY_INTERVAL).await,
                }
            };
            // Our own changes trigger a sync, too, which then finds nothing to do.
            tokio::select! {
                () = node_changes.notified() => {}
                () = monitor.changed() => {}
                () = again => {}
            }
        }
    };
    tokio::select! {
        () = work => {}
        _ = shutdown.wait_for(|stop| *stop) => {}
    }
}

/// Makes our routes match `desired`. Returns false if a route could not be added.
fn sync_routes(desired: &BTreeMap<IpNet, IpAddr>, own: &[IpNet], addresses: &[IpAddr]) -> bool {
    let attempt = || -> io::Result<bool> {
        let mut netlink = Netlink::open()?;
        let mut complete = true;
        let mut next_hops: BTreeMap<IpNet, (NextHop, IpAddr)> = BTreeMap::new();
        for (net, node) in desired {
            let next_hop = match netlink.lookup_route(*node) {
                Ok((_, None)) if IpFamily::of(*node) == IpFamily::of(net.first()) => NextHop::Direct,
                Ok((index, _)) => NextHop::Overlay { underlay: index },
                Err(error) => {
                    complete = false;
                    tracing::warn!(%error, %net, %node, "no route to a node, so its pods are unreachable, will retry");
                    continue;
                }
            };
            next_hops.insert(*net, (next_hop, *node));
        }
        let overlay_links = overlay::sync_links(&mut netlink, &next_hops, own, addresses)?;
        let mut next_hop_addresses: BTreeMap<IpNet, (IpAddr, IpAddr)> = BTreeMap::new();
        for (net, (next_hop, node)) in &next_hops {
            let gateway = if *next_hop == NextHop::Direct { *node } else { net.first() };
            next_hop_addresses.insert(*net, (gateway, *node));
        }
        let existing: BTreeMap<IpNet, IpAddr> = netlink
            .routes(ROUTE_PROTOCOL)?
            .into_iter()
            .filter_map(|(to, bits, gateway)| Some((IpNet::new(to, bits)?, gateway)))
            .collect();
        for (net, gateway) in existing.iter().filter(|(net, _)| !desired.contains_key(net)) {
            netlink.delete_route(net.first(), net.bits(), *gateway, ROUTE_PROTOCOL)?;
        }
        for (net, (gateway, node)) in next_hop_addresses {
            if existing.get(&net) == Some(&gateway) {
                continue;
            }
            let result = match (overlay_links[usize::from(node.is_ipv6())], gateway == node) {
                (_, true) => netlink.add_route(net.first(), net.bits(), gateway, ROUTE_PROTOCOL),
                (Some(link), false) => {
                    netlink.add_route_over(link, net.first(), net.bits(), gateway, ROUTE_PROTOCOL)
                }
                (None, false) => Err(io::Error::other("this node has no address of the other node's family")),
            };
            let direct = gateway == node;
            match result {
                Ok(()) => tracing::info!(%net, %node, direct, "added route to the pods of a node"),
                Err(error) => {
                    complete = false;
                    tracing::warn!(%error, %net, %node, direct, "failed to add route to the pods of a node, will retry");
                }
            }
        }
        Ok(complete)
    };
    attempt().unwrap_or_else(|error| {
        tracing::warn!(%error, "failed to sync routes, will retry");
        false
    })
}

/// How the pods of a node are reached.
#[derive(Clone, Copy, Debug, PartialEq)]
enum NextHop {
    /// The node is on the same link.
    Direct,
    /// There are routers in between that have no routes to pods, so packets are encapsulated and sent
    /// through this link.
    Overlay { underlay: u32 },
}

/// Removes all our routes.
pub fn remove_all() -> io::Result<()> {
    let mut netlink = Netlink::open()?;
    for (to, bits, gateway) in netlink.routes(ROUTE_PROTOCOL)? {
        netlink.delete_route(to, bits, gateway, ROUTE_PROTOCOL)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
