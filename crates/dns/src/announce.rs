//! The Service by which pods find this server, as upstream's installers make it.

use std::net::{IpAddr, SocketAddr};

use k8s_openapi::api::core::v1::{Service, ServicePort, ServiceSpec};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointConditions, EndpointPort, EndpointSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use reconcile::{Client, Error, Key, Object as _};

const NAMESPACE: &str = "kube-system";
const NAME: &str = "kube-dns";
const PORT: i32 = 53;

/// Where this server is reached.
#[derive(Clone, Debug)]
pub struct Place {
    pub node: String,
    pub udp: SocketAddr,
    pub tcp: SocketAddr,
}

/// Makes the Service with these cluster IPs, and this place one of its endpoints. A Service that selects pods belongs
/// to another server, which is then left to do the work.
pub async fn announce(client: &Client, cluster_ips: &[IpAddr], place: &Place) -> Result<(), Error> {
    // Asked for first: one that is made again is refused for its addresses, which it has itself.
    let service = match client.get::<Service>(&Key::new(NAMESPACE, NAME)).await {
        Err(error) if error.is_not_found() => client.create(&service(cluster_ips)).await?,
        found => found?,
    };
    if service.spec.as_ref().is_some_and(|spec| spec.selector.is_some()) {
        tracing::info!("the Service kube-dns selects pods, so names are left to them");
        return Ok(());
    }
    let wanted = slice(place);
    match client.create(&wanted).await {
        Err(error) if error.is_already_exists() => {
            let mut found: EndpointSlice = client.get(&wanted.key()).await?;
            if (&found.endpoints, &found.ports) != (&wanted.endpoints, &wanted.ports) {
                found.endpoints = wanted.endpoints;
                found.ports = wanted.ports;
                client.replace(&found).await?;
            }
            Ok(())
        }
        made => made.map(drop),
    }
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
            ..ServiceSpec::default()
        }),
        status: None,
    }
}

fn slice(place: &Place) -> EndpointSlice {
    let port = |name: &str, protocol: &str, address: SocketAddr| EndpointPort {
        name: Some(name.to_owned()),
        port: Some(i32::from(address.port())),
        protocol: Some(protocol.to_owned()),
        ..EndpointPort::default()
    };
    let labels =
        [("kubernetes.io/service-name", NAME), ("endpointslice.kubernetes.io/managed-by", "dns.skiff")];
    let conditions = EndpointConditions { ready: Some(true), ..EndpointConditions::default() };
    EndpointSlice {
        metadata: metadata(format!("{NAME}-{}", place.node), &labels),
        address_type: if place.udp.is_ipv6() { "IPv6" } else { "IPv4" }.to_owned(),
        endpoints: Some(vec![Endpoint {
            addresses: vec![place.udp.ip().to_string()],
            conditions: Some(conditions),
            node_name: Some(place.node.clone()),
            ..Endpoint::default()
        }]),
        ports: Some(vec![port("dns", "UDP", place.udp), port("dns-tcp", "TCP", place.tcp)]),
    }
}
