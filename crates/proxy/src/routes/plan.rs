//! Computes which pod networks are reached through which nodes. Does no I/O.

use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::Node;
use nft::{IpFamily, IpNet};
use reconcile::Object as _;

/// The pod networks of all other nodes, with the address of the node.
pub fn plan<'a>(nodes: impl Iterator<Item = &'a Node>, own: &str) -> BTreeMap<IpNet, IpAddr> {
    nodes.filter(|node| node.name() != own).flat_map(routes_to).collect()
}

/// The pod networks of a node, each with the node's address of the same family if there is one.
/// Otherwise the other family is used: packets can be encapsulated in either.
pub fn routes_to(node: &Node) -> Vec<(IpNet, IpAddr)> {
    let addresses = addresses(node);
    let with_node_address = |net: IpNet| {
        let same = addresses.iter().find(|address| IpFamily::of(**address) == IpFamily::of(net.first()));
        same.or(addresses.first()).map(|address| (net, *address))
    };
    networks(node).into_iter().filter_map(with_node_address).collect()
}

/// The internal addresses of a node.
pub fn addresses(node: &Node) -> Vec<IpAddr> {
    let addresses = node.status.as_ref().and_then(|status| status.addresses.as_ref()).into_iter().flatten();
    let internal = addresses.filter(|address| address.type_ == "InternalIP");
    internal.filter_map(|address| address.address.parse().ok()).collect()
}

/// The pod CIDRs of a node.
pub fn networks(node: &Node) -> Vec<IpNet> {
    let cidrs = node.spec.as_ref().and_then(|spec| spec.pod_cidrs.as_ref()).into_iter().flatten();
    cidrs.filter_map(|text| text.parse::<IpNet>().ok()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn routes_use_addresses_of_the_same_family() {
        let node = |name: &str, cidrs: &[&str], addresses: &[&str]| -> Node {
            let addresses: Vec<_> =
                addresses.iter().map(|address| json!({"type": "InternalIP", "address": address})).collect();
            let node = json!({
                "metadata": {"name": name}, "spec": {"podCIDRs": cidrs}, "status": {"addresses": addresses},
            });
            serde_json::from_value(node).unwrap()
        };
        let nodes = [
            node("here", &["10.42.0.0/24"], &["192.0.2.1"]),
            node("there", &["10.42.1.0/24", "fd42:0:0:1::/64"], &["192.0.2.2", "2001:db8::2"]),
            node("half", &["10.42.2.0/24", "fd42:0:0:2::/64"], &["192.0.2.3"]),
            node("new", &[], &["192.0.2.4"]),
            node("lost", &["10.42.3.0/24"], &[]),
        ];
        let routes = plan(nodes.iter(), "here");
        let routes: Vec<String> = routes.iter().map(|(net, gateway)| format!("{net} {gateway}")).collect();
        assert_eq!(
            routes,
            [
                "10.42.1.0/24 192.0.2.2",
                "10.42.2.0/24 192.0.2.3",
                "fd42:0:0:1::/64 2001:db8::2",
                "fd42:0:0:2::/64 192.0.2.3",
            ]
        );
    }
}
