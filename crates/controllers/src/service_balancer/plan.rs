//! Decides which Services have load balancers, and which nodes serve them. Does no I/O.

use k8s_openapi::api::core::v1::{LoadBalancerStatus, Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use reconcile::Object;

use crate::node;

const EXCLUDE_BALANCER_LABEL: &str = "node.kubernetes.io/exclude-from-external-load-balancers";
const TO_BE_DELETED: &str = "ToBeDeletedByClusterAutoscaler";

/// The operation for a Service.
#[derive(Debug, PartialEq)]
pub enum LoadBalancerOperation {
    Ensure,
    /// Delete the load balancer of a Service that no longer needs one.
    Delete,
    /// The Service has a load balancer class and is left to another controller.
    Ignore,
}

pub fn load_balancer_operation(service: &Service) -> LoadBalancerOperation {
    let spec = service.spec.as_ref();
    let is_load_balancer = spec.is_some_and(|spec| spec.type_.as_deref() == Some("LoadBalancer"));
    let class = spec.and_then(|spec| spec.load_balancer_class.as_deref());
    match is_load_balancer {
        true if class.is_some() => LoadBalancerOperation::Ignore,
        true if !service.is_deleting() => LoadBalancerOperation::Ensure,
        _ => LoadBalancerOperation::Delete,
    }
}

/// Whether a Service has or needs a load balancer.
pub fn needs_balancer(service: &Service) -> bool {
    load_balancer_operation(service) == LoadBalancerOperation::Ensure
        || !ingress_addresses(service).is_empty()
}

/// Whether the external traffic policy is `Local`.
pub fn is_local_traffic_policy(service: &Service) -> bool {
    let policy = service.spec.as_ref().and_then(|spec| spec.external_traffic_policy.as_deref());
    policy == Some("Local")
}

/// The current load balancer addresses of a Service.
pub fn ingress_addresses(service: &Service) -> Vec<(String, String)> {
    ingress_pairs(service.status.as_ref().and_then(|status| status.load_balancer.as_ref()))
}

/// IP and host name of each ingress entry.
pub fn ingress_pairs(status: Option<&LoadBalancerStatus>) -> Vec<(String, String)> {
    let entries = status.into_iter().flat_map(|status| status.ingress.iter().flatten());
    entries
        .map(|entry| (entry.ip.clone().unwrap_or_default(), entry.hostname.clone().unwrap_or_default()))
        .collect()
}

pub fn include_node(node: &Node) -> bool {
    // As upstream: any value that does not parse as false excludes the node.
    let excluded = node
        .label(EXCLUDE_BALANCER_LABEL)
        .is_some_and(|value| !matches!(value, "0" | "f" | "F" | "false" | "FALSE" | "False"));
    let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    !excluded
        && !node.is_deleting()
        && node::is_ready(node)
        && !taints.into_iter().any(|taint| taint.key == TO_BE_DELETED)
}

/// The external addresses of a node, or else its internal ones.
pub fn external_addresses(node: &Node) -> Vec<String> {
    let addresses = node.status.as_ref().and_then(|status| status.addresses.as_deref()).unwrap_or_default();
    let of = |kind: &str| -> Vec<String> {
        let found = addresses.iter().filter(|address| address.type_ == kind);
        found.map(|address| address.address.clone()).collect()
    };
    let external = of("ExternalIP");
    if external.is_empty() { of("InternalIP") } else { external }
}

/// The nodes with ready endpoints in a slice.
pub fn nodes_with_ready_endpoints(slice: &EndpointSlice) -> Vec<String> {
    let ready = slice.endpoints.iter().flatten().filter(|endpoint| {
        endpoint.conditions.as_ref().is_none_or(|conditions| conditions.ready != Some(false))
    });
    ready.filter_map(|endpoint| endpoint.node_name.clone()).collect()
}
