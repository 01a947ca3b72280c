//! The way to pods on other nodes: their networks lie behind the nodes' addresses. For nodes that share a link.

pub mod plan;

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use nft::Net;
use reconcile::Ctx;
use sys::netlink::Netlink;
use tokio::sync::Notify;

/// What our routes are known by, among those of others in the kernel's table.
const OURS: u8 = 0x73;
/// How long to wait after a route could not be made.
const PAUSE: Duration = Duration::from_secs(60);

/// Keeps routes to the pods of all other nodes until the context's shutdown. They stay then, so that connections do.
pub async fn run(ctx: Ctx, node: String) {
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
        loop {
            let nodes = ctx.caches.nodes().all();
            let wanted = plan::plan(nodes.iter().map(Arc::as_ref), &node);
            let outcome = tokio::task::spawn_blocking(move || bring_about(&wanted)).await;
            if outcome.is_ok_and(|done| done) {
                news.notified().await;
            } else {
                let _ = tokio::time::timeout(PAUSE, news.notified()).await;
            }
        }
    };
    tokio::select! {
        () = work => {}
        _ = shutdown.wait_for(|stop| *stop) => {}
    }
}

/// Makes the kernel's routes of ours those that are wanted. Whether all could be made.
fn bring_about(wanted: &BTreeMap<Net, IpAddr>) -> bool {
    let attempt = || -> io::Result<bool> {
        let mut netlink = Netlink::open()?;
        let mut complete = true;
        let there: BTreeMap<Net, IpAddr> = netlink
            .routes(OURS)?
            .into_iter()
            .filter_map(|(to, bits, gateway)| Some((Net::new(to, bits)?, gateway)))
            .collect();
        for (net, gateway) in there.iter().filter(|(net, _)| !wanted.contains_key(net)) {
            netlink.delete_route(net.first(), net.bits(), *gateway, OURS)?;
        }
        for (net, gateway) in wanted.iter().filter(|(net, gateway)| there.get(net) != Some(gateway)) {
            match netlink.add_route(net.first(), net.bits(), *gateway, OURS) {
                Ok(()) => tracing::info!(%net, %gateway, "pods of another node are reached"),
                Err(error) => {
                    complete = false;
                    tracing::warn!(%error, %net, %gateway, "no route to the pods of a node: does it share a link with this one?");
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
