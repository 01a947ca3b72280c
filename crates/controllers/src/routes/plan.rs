//! Computes the routes to create and to delete. Does no I/O.

use std::net::IpAddr;
use std::sync::Arc;

use api::networking::ip::Cidr;
use k8s_openapi::api::core::v1::Node;
use reconcile::Object;
use reconcile::cloud::Route;

#[derive(Debug, Default, PartialEq)]
pub struct RoutePlan {
    pub delete: Vec<Route>,
    pub create: Vec<Route>,
}

/// Plans route changes. Routes outside of the pod networks are not touched.
pub fn plan(nodes: &[Arc<Node>], existing: &[Route], networks: &[String]) -> RoutePlan {
    let desired: Vec<Route> = nodes.iter().flat_map(|node| routes(node, networks)).collect();
    let in_cluster_cidrs = |route: &&Route| is_within(&route.network, networks);
    RoutePlan {
        delete: existing
            .iter()
            .filter(in_cluster_cidrs)
            .filter(|route| !desired.contains(route))
            .cloned()
            .collect(),
        create: desired.iter().filter(|route| !existing.contains(route)).cloned().collect(),
    }
}

/// The routes to the pods of one node.
pub fn routes(node: &Node, networks: &[String]) -> Vec<Route> {
    let addresses = node.status.iter().flat_map(|status| status.addresses.iter().flatten());
    let addresses: Vec<IpAddr> = addresses
        .filter(|address| address.type_ == "InternalIP")
        .filter_map(|address| address.address.parse().ok())
        .collect();
    let own = node.spec.iter().flat_map(|spec| spec.pod_cidrs.iter().flatten());
    own.filter(|network| networks.is_empty() || is_within(network, networks))
        .map(|network| Route {
            node: node.name().to_owned(),
            addresses: addresses.clone(),
            network: network.clone(),
        })
        .collect()
}

fn is_within(network: &str, networks: &[String]) -> bool {
    let Some(part) = Cidr::parse(network) else { return false };
    networks.iter().filter_map(|whole| Cidr::parse(whole)).any(|whole| {
        whole.is_v6() == part.is_v6() && whole.contains(part.first()) && whole.contains(part.last())
    })
}
