//! Which Services are balanced, and by which nodes. Pure.

use k8s_openapi::api::core::v1::{LoadBalancerStatus, Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use reconcile::Object;

use crate::node;

const EXCLUDED: &str = "node.kubernetes.io/exclude-from-external-load-balancers";
const TO_BE_DELETED: &str = "ToBeDeletedByClusterAutoscaler";

/// What is to become of a Service.
#[derive(Debug, PartialEq)]
pub enum Wanted {
    Balanced,
    /// It was balanced and is not to be any more.
    Removed,
    /// It is somebody else's business.
    Nothing,
}

pub fn wanted(service: &Service) -> Wanted {
    let spec = service.spec.as_ref();
    let balanced = spec.is_some_and(|spec| spec.type_.as_deref() == Some("LoadBalancer"));
    let class = spec.and_then(|spec| spec.load_balancer_class.as_deref());
    match balanced {
        true if class.is_some() => Wanted::Nothing,
        true if !service.is_deleting() => Wanted::Balanced,
        _ => Wanted::Removed,
    }
}

/// Whether a Service has to do with balancing: now, or until it has been cleaned up after.
pub fn is_balanced(service: &Service) -> bool {
    wanted(service) == Wanted::Balanced || !addresses(service).is_empty()
}

/// Whether traffic must stay on the node it has come to.
pub fn is_local(service: &Service) -> bool {
    let policy = service.spec.as_ref().and_then(|spec| spec.external_traffic_policy.as_deref());
    policy == Some("Local")
}

/// Where a Service is reached now.
pub fn addresses(service: &Service) -> Vec<(String, String)> {
    ingress(service.status.as_ref().and_then(|status| status.load_balancer.as_ref()))
}

/// Address and name of each way in.
pub fn ingress(status: Option<&LoadBalancerStatus>) -> Vec<(String, String)> {
    let ways = status.into_iter().flat_map(|status| status.ingress.iter().flatten());
    ways.map(|way| (way.ip.clone().unwrap_or_default(), way.hostname.clone().unwrap_or_default())).collect()
}

pub fn takes_traffic(node: &Node) -> bool {
    // Anything that is not clearly false excludes.
    let excluded = node
        .label(EXCLUDED)
        .is_some_and(|value| !matches!(value, "0" | "f" | "F" | "false" | "FALSE" | "False"));
    let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    !excluded
        && !node.is_deleting()
        && node::is_ready(node)
        && !taints.into_iter().any(|taint| taint.key == TO_BE_DELETED)
}

/// The addresses outsiders reach a node at: those for outsiders, or where there are none those there are.
pub fn reached_at(node: &Node) -> Vec<String> {
    let addresses = node.status.as_ref().and_then(|status| status.addresses.as_deref()).unwrap_or_default();
    let of = |kind: &str| -> Vec<String> {
        let found = addresses.iter().filter(|address| address.type_ == kind);
        found.map(|address| address.address.clone()).collect()
    };
    let external = of("ExternalIP");
    if external.is_empty() { of("InternalIP") } else { external }
}

/// The nodes on which a slice has endpoints that take traffic.
pub fn serving(slice: &EndpointSlice) -> Vec<String> {
    let ready = slice.endpoints.iter().flatten().filter(|endpoint| {
        endpoint.conditions.as_ref().is_none_or(|conditions| conditions.ready != Some(false))
    });
    ready.filter_map(|endpoint| endpoint.node_name.clone()).collect()
}
