//! Nodes that answer for names and may not write endpoints themselves: they say so on their Node, and are made
//! endpoints of the Service here, for as long as they are well.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, NodeAddress, NodeCondition};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use reconcile::{Client, Ctx, Key, Object as _};
use tokio::sync::Notify;

use crate::announce::{ANSWERS, NAME, NAMESPACE, Place, put, selects, slice, slice_name};

/// How long to wait until writing again what could not be written.
const PAUSE: Duration = Duration::from_secs(5);

/// Makes nodes that say so endpoints of the Service, until told to stop.
pub async fn follow(ctx: Ctx, client: Client) {
    let changed = Arc::new(Notify::new());
    let tell = changed.clone();
    ctx.caches.nodes().listen(move |change| {
        if change.before.and_then(place) != change.after.and_then(place) {
            tell.notify_one();
        }
    });
    let tell = changed.clone();
    ctx.caches.services().listen(move |change| {
        if change.newest().key() == Key::new(NAMESPACE, NAME) {
            tell.notify_one();
        }
    });
    ctx.caches.endpoint_slices();
    ctx.caches.filled().await;
    let mut shutdown = ctx.shutdown.clone();
    loop {
        let well = write(&ctx, &client).await;
        tokio::select! {
            () = changed.notified() => {}
            () = tokio::time::sleep(PAUSE), if !well => {}
            _ = shutdown.wait_for(|stop| *stop) => return,
        }
    }
}

/// Writes what is not yet as it should be. Whether that went well.
async fn write(ctx: &Ctx, client: &Client) -> bool {
    let service = ctx.caches.services().get(&Key::new(NAMESPACE, NAME));
    if service.is_none_or(|service| selects(&service)) {
        return true;
    }
    let mut well = true;
    for node in ctx.caches.nodes().all() {
        let there = ctx.caches.endpoint_slices().get(&Key::new(NAMESPACE, &slice_name(node.name())));
        let Some(wanted) = wanted(&node, there.as_deref()) else { continue };
        if let Err(error) = put(client, &wanted).await {
            tracing::warn!(%error, node = node.name(), "cannot tell that a node answers for names");
            well = false;
        }
    }
    well
}

/// The endpoints of a node, if they have to be written.
fn wanted(node: &Arc<Node>, there: Option<&EndpointSlice>) -> Option<EndpointSlice> {
    match place(node) {
        Some(place) => {
            let wanted = slice(&place, owner(node));
            there
                .is_none_or(|there| (&there.endpoints, &there.ports) != (&wanted.endpoints, &wanted.ports))
                .then_some(wanted)
        }
        // It has stopped to answer. Endpoints without an owner are those of servers, who look after them.
        None => {
            let mut gone = there.filter(|there| there.metadata.owner_references.is_some())?.clone();
            // There is one.
            let mut conditions =
                gone.endpoints.iter_mut().flatten().filter_map(|one| one.conditions.as_mut());
            let was_ready = conditions.any(|one| one.ready.replace(false) != Some(false));
            was_ready.then_some(gone)
        }
    }
}

/// Where a node answers, if it says that it does.
fn place(node: &Arc<Node>) -> Option<Place> {
    let (udp, tcp) = node.annotation(ANSWERS)?.split_once(',')?;
    let status = node.status.as_ref()?;
    let internal = |address: &&NodeAddress| address.type_ == "InternalIP";
    let ip: IpAddr = status.addresses.iter().flatten().find(internal)?.address.parse().ok()?;
    let well = |known: &NodeCondition| known.type_ == "Ready" && known.status == "True";
    Some(Place {
        node: node.name().to_owned(),
        udp: SocketAddr::new(ip, udp.parse().ok()?),
        tcp: SocketAddr::new(ip, tcp.parse().ok()?),
        ready: status.conditions.iter().flatten().any(well),
    })
}

fn owner(node: &Node) -> Option<OwnerReference> {
    Some(OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: node.name().to_owned(),
        uid: node.metadata.uid.clone()?,
        ..OwnerReference::default()
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn node(ports: &str, ready: &str) -> Arc<Node> {
        let node = json!({
            "metadata": {"name": "far", "uid": "1", "annotations": {"skiff.dev/dns": ports}},
            "status": {
                "addresses": [{"type": "Hostname", "address": "far"}, {"type": "InternalIP", "address": "192.0.2.9"}],
                "conditions": [{"type": "Ready", "status": ready}],
            },
        });
        Arc::new(serde_json::from_value(node).unwrap())
    }

    #[track_caller]
    fn check(
        ports: &str,
        ready: &str,
        there: Option<&EndpointSlice>,
        expected: Option<&str>,
    ) -> Option<EndpointSlice> {
        let wanted = wanted(&node(ports, ready), there);
        let said = wanted.as_ref().map(|slice| {
            let slice = serde_json::to_value(slice).unwrap();
            let end = &slice["endpoints"][0];
            format!(
                "{} {} for {} ready={}",
                end["addresses"][0],
                slice["ports"][0]["port"],
                end["hints"]["forNodes"][0]["name"],
                end["conditions"]["ready"]
            )
        });
        assert_eq!(said.map(|said| said.replace('"', "")).as_deref(), expected);
        wanted
    }

    #[test]
    fn nodes_are_asked_while_they_say_so_and_are_well() {
        let there = check("5300,5301", "True", None, Some("192.0.2.9 5300 for far ready=true"));
        let there = there.as_ref();
        check("5300,5301", "True", there, None);
        check("5300,5301", "Unknown", there, Some("192.0.2.9 5300 for far ready=false"));
        check("5400,5400", "True", there, Some("192.0.2.9 5400 for far ready=true"));
        let gone = check("", "True", there, Some("192.0.2.9 5300 for far ready=false"));
        check("", "True", gone.as_ref(), None);
        check("nonsense", "True", None, None);
        // Those that servers write of themselves are theirs.
        let mut own = there.unwrap().clone();
        own.metadata.owner_references = None;
        check("", "True", Some(&own), None);
    }
}
