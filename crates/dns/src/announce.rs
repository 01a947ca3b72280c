//! The Service by which pods find this server, as upstream's installers make it.
//!
//! Every node of the cluster may be one of its endpoints, and each is meant for the pods of its own node first: names
//! are known there whatever becomes of others, and NetworkPolicies never stand between a pod and its own node. Nodes
//! that may not write endpoints themselves say so of themselves ([`ANSWERS`]), and `nodes` makes them endpoints.

use std::net::{IpAddr, SocketAddr};

use k8s_openapi::api::core::v1::{Service, ServicePort, ServiceSpec};
use k8s_openapi::api::discovery::v1::{
    Endpoint, EndpointConditions, EndpointHints, EndpointPort, EndpointSlice, ForNode,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use reconcile::{Client, Error, Key, Object as _};

/// The Service's namespace and name.
pub const SERVICE: &str = "kube-system/kube-dns";
pub(crate) const NAMESPACE: &str = "kube-system";
pub(crate) const NAME: &str = "kube-dns";
const PORT: i32 = 53;

/// On a node that answers for names at its address: the ports for UDP and TCP, as in `"5300,5300"`.
pub const ANSWERS: &str = "skiff.dev/dns";

/// Where a server is reached.
#[derive(Clone, Debug, PartialEq)]
pub struct Place {
    pub node: String,
    pub udp: SocketAddr,
    pub tcp: SocketAddr,
    /// Whether it is to be asked.
    pub ready: bool,
}

/// Makes the Service with these cluster IPs, and this place one of its endpoints. A Service that selects pods belongs
/// to another server, which is then left to do the work.
pub async fn announce(client: &Client, cluster_ips: &[IpAddr], place: &Place) -> Result<(), Error> {
    // Asked for first: one that is made again is refused for its addresses, which it has itself.
    let service = match client.get::<Service>(&Key::new(NAMESPACE, NAME)).await {
        Err(error) if error.is_not_found() => client.create(&service(cluster_ips)).await?,
        found => found?,
    };
    if selects(&service) {
        tracing::info!("the Service kube-dns selects pods, so names are left to them");
        return Ok(());
    }
    put(client, &slice(place, None)).await
}

/// Whether the Service is one of pods, which then answer for names.
pub(crate) fn selects(service: &Service) -> bool {
    service.spec.as_ref().is_some_and(|spec| spec.selector.is_some())
}

/// Makes these the endpoints at a place.
pub(crate) async fn put(client: &Client, wanted: &EndpointSlice) -> Result<(), Error> {
    let mut found: EndpointSlice = match client.get(&wanted.key()).await {
        Err(error) if error.is_not_found() => return client.create(wanted).await.map(drop),
        found => found?,
    };
    if (&found.endpoints, &found.ports) != (&wanted.endpoints, &wanted.ports) {
        found.endpoints = wanted.endpoints.clone();
        found.ports = wanted.ports.clone();
        client.replace(&found).await?;
    }
    Ok(())
}

fn metadata(name: String, labels: &[(&str, &str)]) -> ObjectMeta {
    let labels = labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    ObjectMeta {
        name: Some(name),
        namespace: Some(NAMESPACE.to_owned()),
        labels: Some(labels),
        ..ObjectMeta::default()
    }
}

fn service(cluster_ips: &[IpAddr]) -> Service {
    let port = |name: &str, protocol: &str| ServicePort {
        name: Some(name.to_owned()),
        port: PORT,
        protocol: Some(protocol.to_owned()),
        ..ServicePort::default()
    };
    let ips: Vec<String> = cluster_ips.iter().map(IpAddr::to_string).collect();
    let labels = [
        ("k8s-app", "kube-dns"),
        ("kubernetes.io/cluster-service", "true"),
        ("kubernetes.io/name", "CoreDNS"),
    ];
    Service {
        metadata: metadata(NAME.to_owned(), &labels),
        spec: Some(ServiceSpec {
            cluster_ip: ips.first().cloned(),
            ip_family_policy: (ips.len() > 1).then(|| "RequireDualStack".to_owned()),
            cluster_ips: Some(ips),
            ports: Some(vec![port("dns", "UDP"), port("dns-tcp", "TCP")]),
            traffic_distribution: Some("PreferSameNode".to_owned()),
            ..ServiceSpec::default()
        }),
        status: None,
    }
}

/// The endpoints at a place. Those of an owner go when it does.
pub(crate) fn slice(place: &Place, owner: Option<OwnerReference>) -> EndpointSlice {
    let port = |name: &str, protocol: &str, address: SocketAddr| EndpointPort {
        name: Some(name.to_owned()),
        port: Some(i32::from(address.port())),
        protocol: Some(protocol.to_owned()),
        ..EndpointPort::default()
    };
    let labels =
        [("kubernetes.io/service-name", NAME), ("endpointslice.kubernetes.io/managed-by", "dns.skiff")];
    let conditions = EndpointConditions { ready: Some(place.ready), ..EndpointConditions::default() };
    let hints = EndpointHints {
        for_nodes: Some(vec![ForNode { name: place.node.clone() }]),
        ..EndpointHints::default()
    };
    EndpointSlice {
        metadata: ObjectMeta {
            owner_references: owner.map(|owner| vec![owner]),
            ..metadata(slice_name(&place.node), &labels)
        },
        address_type: if place.udp.is_ipv6() { "IPv6" } else { "IPv4" }.to_owned(),
        endpoints: Some(vec![Endpoint {
            addresses: vec![place.udp.ip().to_string()],
            conditions: Some(conditions),
            hints: Some(hints),
            node_name: Some(place.node.clone()),
            ..Endpoint::default()
        }]),
        ports: Some(vec![port("dns", "UDP", place.udp), port("dns-tcp", "TCP", place.tcp)]),
    }
}

pub(crate) fn slice_name(node: &str) -> String {
    format!("{NAME}-{node}")
}
