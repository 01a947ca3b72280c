//! The Service `kube-dns` by which pods reach this server, in the form that upstream's installers
//! create.
//!
//! Every node may be an endpoint, and each endpoint is preferred for the pods of its own node. So
//! DNS does not depend on other nodes, and NetworkPolicies never block it, because they do not
//! apply between a pod and its own node. Nodes without permission to write EndpointSlices announce
//! themselves by an annotation ([`DNS_PORTS_ANNOTATION`]), and `nodes` creates their endpoints.

use std::net::{IpAddr, SocketAddr};

use k8s_openapi::api::core::v1::{Service, ServicePort, ServiceSpec};
use k8s_openapi::api::discovery::v1::{
    Endpoint, EndpointConditions, EndpointHints, EndpointPort, EndpointSlice, ForNode,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use reconcile::{Client, Error, Key, Object as _};

pub const SERVICE_KEY: &str = "kube-system/kube-dns";
pub(crate) const SERVICE_NAMESPACE: &str = "kube-system";
pub(crate) const SERVICE_NAME: &str = "kube-dns";
const DNS_PORT: i32 = 53;

/// The annotation of a node that serves DNS at its internal IP: the ports for UDP and TCP, such as
/// `"5300,5300"`.
pub const DNS_PORTS_ANNOTATION: &str = "skiff.dev/dns";

/// The addresses of a DNS server.
#[derive(Clone, Debug, PartialEq)]
pub struct DnsEndpoint {
    pub node: String,
    pub udp: SocketAddr,
    pub tcp: SocketAddr,
    /// The ready condition of the endpoint.
    pub ready: bool,
}

/// Creates the Service with these cluster IPs and adds this server as endpoint. A Service with a
/// selector belongs to another DNS server, which is left alone.
pub async fn publish(client: &Client, cluster_ips: &[IpAddr], endpoint: &DnsEndpoint) -> Result<(), Error> {
    // A read comes first: creating an existing Service fails with an error about its cluster IPs,
    // which it has allocated itself.
    let service = match client.get::<Service>(&Key::new(SERVICE_NAMESPACE, SERVICE_NAME)).await {
        Err(error) if error.is_not_found() => client.create(&service(cluster_ips)).await?,
        found => found?,
    };
    if has_selector(&service) {
        tracing::info!("service kube-dns has a selector, leaving DNS to its pods");
        return Ok(());
    }
    apply_slice(client, &endpoint_slice(endpoint, None)).await
}

/// Whether the Service selects pods, so that they serve DNS.
pub(crate) fn has_selector(service: &Service) -> bool {
    service.spec.as_ref().is_some_and(|spec| spec.selector.is_some())
}

/// Creates or updates an EndpointSlice.
pub(crate) async fn apply_slice(client: &Client, desired: &EndpointSlice) -> Result<(), Error> {
    let mut found: EndpointSlice = match client.get(&desired.key()).await {
        Err(error) if error.is_not_found() => return client.create(desired).await.map(drop),
        found => found?,
    };
    if (&found.endpoints, &found.ports) != (&desired.endpoints, &desired.ports) {
        found.endpoints = desired.endpoints.clone();
        found.ports = desired.ports.clone();
        client.replace(&found).await?;
    }
    Ok(())
}

fn metadata(name: String, labels: &[(&str, &str)]) -> ObjectMeta {
    let labels = labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    ObjectMeta {
        name: Some(name),
        namespace: Some(SERVICE_NAMESPACE.to_owned()),
        labels: Some(labels),
        ..ObjectMeta::default()
    }
}

fn service(cluster_ips: &[IpAddr]) -> Service {
    let port = |name: &str, protocol: &str| ServicePort {
        name: Some(name.to_owned()),
        port: DNS_PORT,
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
        metadata: metadata(SERVICE_NAME.to_owned(), &labels),
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

/// The EndpointSlice of a server. With an owner it is garbage collected with the owner.
pub(crate) fn endpoint_slice(endpoint: &DnsEndpoint, owner: Option<OwnerReference>) -> EndpointSlice {
    let port = |name: &str, protocol: &str, address: SocketAddr| EndpointPort {
        name: Some(name.to_owned()),
        port: Some(i32::from(address.port())),
        protocol: Some(protocol.to_owned()),
        ..EndpointPort::default()
    };
    let labels = [
        ("kubernetes.io/service-name", SERVICE_NAME),
        ("endpointslice.kubernetes.io/managed-by", "dns.skiff"),
    ];
    let conditions = EndpointConditions { ready: Some(endpoint.ready), ..EndpointConditions::default() };
    let hints = EndpointHints {
        for_nodes: Some(vec![ForNode { name: endpoint.node.clone() }]),
        ..EndpointHints::default()
    };
    EndpointSlice {
        metadata: ObjectMeta {
            owner_references: owner.map(|owner| vec![owner]),
            ..metadata(slice_name(&endpoint.node), &labels)
        },
        address_type: if endpoint.udp.is_ipv6() { "IPv6" } else { "IPv4" }.to_owned(),
        endpoints: Some(vec![Endpoint {
            addresses: vec![endpoint.udp.ip().to_string()],
            conditions: Some(conditions),
            hints: Some(hints),
            node_name: Some(endpoint.node.clone()),
            ..Endpoint::default()
        }]),
        ports: Some(vec![port("dns", "UDP", endpoint.udp), port("dns-tcp", "TCP", endpoint.tcp)]),
    }
}

pub(crate) fn slice_name(node: &str) -> String {
    format!("{SERVICE_NAME}-{node}")
}
