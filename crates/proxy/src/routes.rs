//! The way to pods on other nodes: their networks lie behind the nodes' addresses. Nodes that share a link with this one
//! are sent packets as they are, the others inside packets of VXLAN ([`overlay`]).

mod news;
mod overlay;
pub mod plan;
pub mod trial;

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use nft::{Ip, Net};
use reconcile::{Ctx, Object as _};
use sys::netlink::Netlink;
use tokio::sync::Notify;

pub use news::News;
pub use overlay::LINKS as OVERLAYS;

/// What our routes are known by, among those of others in the kernel's table.
const OURS: u8 = 0x73;
/// How long to wait after a route could not be made.
const PAUSE: Duration = Duration::from_secs(60);

/// Keeps routes to the pods of all other nodes until the context's shutdown. They stay then, so that connections do.
pub async fn run(ctx: Ctx, node: String) {
    tokio::spawn(trial::run(ctx.clone(), node.clone()));
    let news = Arc::new(Notify::new());
    let tell = news.clone();
    ctx.caches.nodes().listen(move |changed| {
        let seen = |node: &Arc<Node>| plan::routes_to(node);
        if changed.before.map(seen) != changed.after.map(seen) {
            tell.notify_one();
        }
    });
    let mut shutdown = ctx.shutdown.clone();
    let work = async {
        ctx.caches.nodes().filled().await;
        let kernel = News::open();
        loop {
            let nodes = ctx.caches.nodes().all();
            let wanted = plan::plan(nodes.iter().map(Arc::as_ref), &node);
            let own = nodes.iter().find(|known| known.name() == node);
            let nets: Vec<Net> = own.map(|own| plan::networks(own)).unwrap_or_default();
            let addresses = own.map(|own| plan::addresses(own)).unwrap_or_default();
            let work = move || bring_about(&wanted, &nets, &addresses);
            let outcome = tokio::task::spawn_blocking(work).await;
            let again = async {
                match outcome.is_ok_and(|done| done) {
                    true => std::future::pending().await,
                    false => tokio::time::sleep(PAUSE).await,
                }
            };
            // What we have just changed ourselves is heard as well, and found to be right.
            tokio::select! {
                () = news.notified() => {}
                () = kernel.changed() => {}
                () = again => {}
            }
        }
    };
    tokio::select! {
        () = work => {}
        _ = shutdown.wait_for(|stop| *stop) => {}
    }
}

/// Makes the kernel's routes of ours those that are wanted. Whether all could be made.
fn bring_about(wanted: &BTreeMap<Net, IpAddr>, own: &[Net], addresses: &[IpAddr]) -> bool {
    let attempt = || -> io::Result<bool> {
        let mut netlink = Netlink::open()?;
        let mut complete = true;
        let mut ways: BTreeMap<Net, (Way, IpAddr)> = BTreeMap::new();
        for (net, node) in wanted {
            let way = match netlink.way_to(*node) {
                Ok((_, None)) if Ip::of(*node) == Ip::of(net.first()) => Way::Direct,
                Ok((index, _)) => Way::Overlay { underlay: index },
                Err(error) => {
                    complete = false;
                    tracing::warn!(%error, %net, %node, "no way to a node, and so none to its pods");
                    continue;
                }
            };
            ways.insert(*net, (way, *node));
        }
        let overlays = overlay::bring_about(&mut netlink, &ways, own, addresses)?;
        let mut gateways: BTreeMap<Net, (IpAddr, IpAddr)> = BTreeMap::new();
        for (net, (way, node)) in &ways {
            let gateway = if *way == Way::Direct { *node } else { net.first() };
            gateways.insert(*net, (gateway, *node));
        }
        let there: BTreeMap<Net, IpAddr> = netlink
            .routes(OURS)?
            .into_iter()
            .filter_map(|(to, bits, gateway)| Some((Net::new(to, bits)?, gateway)))
            .collect();
        for (net, gateway) in there.iter().filter(|(net, _)| !wanted.contains_key(net)) {
            netlink.delete_route(net.first(), net.bits(), *gateway, OURS)?;
        }
        for (net, (gateway, node)) in gateways {
            if there.get(&net) == Some(&gateway) {
                continue;
            }
            let made = match (overlays[usize::from(node.is_ipv6())], gateway == node) {
                (_, true) => netlink.add_route(net.first(), net.bits(), gateway, OURS),
                (Some(link), false) => netlink.add_route_over(link, net.first(), net.bits(), gateway, OURS),
                (None, false) => Err(io::Error::other("this node has no address of that kind")),
            };
            let direct = gateway == node;
            match made {
                Ok(()) => tracing::info!(%net, %node, direct, "pods of another node are reached"),
                Err(error) => {
                    complete = false;
                    tracing::warn!(%error, %net, %node, direct, "no route to the pods of a node");
                }
            }
        }
        Ok(complete)
    };
    attempt().unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot look at routes");
        false
    })
}

/// How a node's pods are reached.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// The node shares a link with this one.
    Direct,
    /// There are routers between that know nothing of pods, so packets go inside others, over this link.
    Overlay { underlay: u32 },
}

/// Removes every route of ours.
pub fn remove_all() -> io::Result<()> {
    let mut netlink = Netlink::open()?;
    for (to, bits, gateway) in netlink.routes(OURS)? {
        netlink.delete_route(to, bits, gateway, OURS)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
