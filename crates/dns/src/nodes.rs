//! Creates DNS endpoints for nodes that serve DNS but are not allowed to write EndpointSlices. They
//! have an annotation, and their endpoint is ready while the node is ready.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, NodeAddress, NodeCondition};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use reconcile::{Client, Ctx, Key, Object as _};
use tokio::sync::Notify;

use crate::announce::{
    DNS_PORTS_ANNOTATION, DnsEndpoint, SERVICE_NAME, SERVICE_NAMESPACE, apply_slice, endpoint_slice,
    has_selector, slice_name,
};

/// The delay before failed writes are retried.
const RETRY_DELAY: Duration = Duration::from_secs(5);

/// Keeps the EndpointSlices of annotated nodes in sync until shutdown.
pub async fn run(ctx: Ctx, client: Client) {
    let changed = Arc::new(Notify::new());
    let notify = changed.clone();
    ctx.caches.nodes().listen(move |change| {
        if change.before.and_then(dns_endpoint) != change.after.and_then(dns_endpoint) {
            notify.notify_one();
        }
    });
    let notify = changed.clone();
    ctx.caches.services().listen(move |change| {
        if change.latest().key() == Key::new(SERVICE_NAMESPACE, SERVICE_NAME) {
            notify.notify_one();
        }
    });
    ctx.caches.endpoint_slices();
    ctx.caches.wait_for_sync().await;
    let mut shutdown = ctx.shutdown.clone();
    loop {
        let succeeded = sync(&ctx, &client).await;
        tokio::select! {
            () = changed.notified() => {}
            () = tokio::time::sleep(RETRY_DELAY), if !succeeded => {}
            _ = shutdown.wait_for(|stop| *stop) => return,
        }
    }
}

/// Writes the EndpointSlices that differ. Returns whether all writes succeeded.
async fn sync(ctx: &Ctx, client: &Client) -> bool {
    let service = ctx.caches.services().get(&Key::new(SERVICE_NAMESPACE, SERVICE_NAME));
    if service.is_none_or(|service| has_selector(&service)) {
        return true;
    }
    let mut succeeded = true;
    for node in ctx.caches.nodes().all() {
        let existing =
            ctx.caches.endpoint_slices().get(&Key::new(SERVICE_NAMESPACE, &slice_name(node.name())));
        let Some(desired) = desired_slice(&node, existing.as_deref()) else { continue };
        if let Err(error) = apply_slice(client, &desired).await {
            tracing::warn!(%error, node = node.name(), "failed to write DNS endpoint of node, will retry");
            succeeded = false;
        }
    }
    succeeded
}

/// The EndpointSlice of a node, if it must be written.
fn desired_slice(node: &Arc<Node>, existing: Option<&EndpointSlice>) -> Option<EndpointSlice> {
    match dns_endpoint(node) {
        Some(endpoint) => {
            let desired = endpoint_slice(&endpoint, owner_reference(node));
            existing
                .is_none_or(|existing| {
                    (&existing.endpoints, &existing.ports) != (&desired.endpoints, &desired.ports)
                })
                .then_some(desired)
        }
        // The node no longer serves DNS. A slice without an owner belongs to a server, which
        // maintains it itself.
        None => {
            let mut stopped =
                existing.filter(|existing| existing.metadata.owner_references.is_some())?.clone();
            // Every slice written here has one endpoint with conditions.
            let mut conditions =
                stopped.endpoints.iter_mut().flatten().filter_map(|one| one.conditions.as_mut());
            let was_ready = conditions.any(|one| one.ready.replace(false) != Some(false));
            was_ready.then_some(stopped)
        }
    }
}

/// The DNS server of a node, if it has the annotation.
fn dns_endpoint(node: &Arc<Node>) -> Option<DnsEndpoint> {
    let (udp, tcp) = node.annotation(DNS_PORTS_ANNOTATION)?.split_once(',')?;
    let status = node.status.as_ref()?;
    let internal = |address: &&NodeAddress| address.type_ == "InternalIP";
    let ip: IpAddr = status.addresses.iter().flatten().find(internal)?.address.parse().ok()?;
    let is_ready = |known: &NodeCondition| known.type_ == "Ready" && known.status == "True";
    Some(DnsEndpoint {
        node: node.name().to_owned(),
        udp: SocketAddr::new(ip, udp.parse().ok()?),
        tcp: SocketAddr::new(ip, tcp.parse().ok()?),
        ready: status.conditions.iter().flatten().any(is_ready),
    })
}

fn owner_reference(node: &Node) -> Option<OwnerReference> {
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
        existing: Option<&EndpointSlice>,
        expected: Option<&str>,
    ) -> Option<EndpointSlice> {
        let desired = desired_slice(&node(ports, ready), existing);
        let rendered = desired.as_ref().map(|slice| {
            let slice = serde_json::to_value(slice).unwrap();
            let endpoint = &slice["endpoints"][0];
            format!(
                "{} {} for {} ready={}",
                endpoint["addresses"][0],
                slice["ports"][0]["port"],
                endpoint["hints"]["forNodes"][0]["name"],
                endpoint["conditions"]["ready"]
            )
        });
        assert_eq!(rendered.map(|rendered| rendered.replace('"', "")).as_deref(), expected);
        desired
    }

    #[test]
    fn endpoint_of_annotated_node_is_ready_while_node_is_ready() {
        let existing = check("5300,5301", "True", None, Some("192.0.2.9 5300 for far ready=true"));
        let existing = existing.as_ref();
        check("5300,5301", "True", existing, None);
        check("5300,5301", "Unknown", existing, Some("192.0.2.9 5300 for far ready=false"));
        check("5400,5400", "True", existing, Some("192.0.2.9 5400 for far ready=true"));
        let unready = check("", "True", existing, Some("192.0.2.9 5300 for far ready=false"));
        check("", "True", unready.as_ref(), None);
        check("nonsense", "True", None, None);
        // Slices that servers write for themselves are not changed.
        let mut without_owner = existing.unwrap().clone();
        without_owner.metadata.owner_references = None;
        check("", "True", Some(&without_owner), None);
    }
}
