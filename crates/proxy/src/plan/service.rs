//! Parses the fields of a Service that the proxy needs. Counterpart: `BaseServicePortInfo` in
//! `pkg/proxy/serviceport.go`.

use std::net::IpAddr;

use k8s_openapi::api::core::v1::{Service, ServicePort, ServiceSpec};
use nft::{IpFamily, IpNet, Proto};
use reconcile::Object as _;

use super::endpoints::TrafficScopes;

/// Services with this label are handled by another proxy.
const PROXY_NAME_LABEL: &str = "service.kubernetes.io/service-proxy-name";
/// The default of `sessionAffinityConfig.clientIP.timeoutSeconds`, the same as upstream.
const DEFAULT_AFFINITY_SECONDS: u32 = 10_800;

/// A Service port in one address family.
#[derive(Clone, Debug)]
pub struct ServicePortInfo<'a> {
    pub ip: IpFamily,
    pub cluster_ip: IpAddr,
    pub proto: Proto,
    pub port: u16,
    pub port_name: &'a str,
    pub node_port: Option<u16>,
    pub external_ips: Vec<IpAddr>,
    pub balancer_ips: Vec<IpAddr>,
    /// `loadBalancerSourceRanges`; empty if all sources are allowed.
    pub sources: Vec<IpNet>,
    pub affinity_seconds: Option<u32>,
    pub internal_local: bool,
    pub external_local: bool,
}

impl ServicePortInfo<'_> {
    pub fn is_external(&self) -> bool {
        self.node_port.is_some() || !self.external_ips.is_empty() || !self.balancer_ips.is_empty()
    }

    /// Which endpoints the port needs. External traffic from this node itself ignores policy Local, so
    /// it needs those for policy Cluster as well.
    pub fn traffic_scopes(&self) -> TrafficScopes {
        TrafficScopes {
            cluster: !self.internal_local || self.is_external(),
            local: self.internal_local || self.external_local && self.is_external(),
        }
    }
}

/// All ports of a Service in all its families. Empty for Services that are not proxied.
pub fn service_ports(service: &Service) -> Vec<ServicePortInfo<'_>> {
    let Some(spec) = service.spec.as_ref().filter(|spec| is_proxied(service, spec)) else {
        return Vec::new();
    };
    let mut ips: Vec<IpAddr> =
        spec.cluster_ips.iter().flatten().filter_map(|text| text.parse().ok()).collect();
    if ips.is_empty() {
        ips.extend(spec.cluster_ip.iter().filter_map(|text| text.parse::<IpAddr>().ok()));
    }
    let ports = spec.ports.iter().flatten();
    ports.flat_map(|port| ips.iter().filter_map(|ip| service_port(service, spec, port, *ip))).collect()
}

fn is_proxied(service: &Service, spec: &ServiceSpec) -> bool {
    spec.type_.as_deref() != Some("ExternalName") && service.label(PROXY_NAME_LABEL).is_none()
}

fn service_port<'a>(
    service: &Service,
    spec: &ServiceSpec,
    port: &'a ServicePort,
    cluster_ip: IpAddr,
) -> Option<ServicePortInfo<'a>> {
    let ip = IpFamily::of(cluster_ip);
    let is_local = |policy: &Option<String>| policy.as_deref() == Some("Local");
    Some(ServicePortInfo {
        ip,
        cluster_ip,
        proto: protocol(&port.protocol)?,
        port: u16::try_from(port.port).ok()?,
        port_name: port.name.as_deref().unwrap_or_default(),
        node_port: port.node_port.and_then(|port| u16::try_from(port).ok()).filter(|port| *port != 0),
        external_ips: of_family(ip, spec.external_ips.iter().flatten().map(String::as_str)),
        balancer_ips: of_family(ip, balancer_ips(service)),
        sources: sources(spec, ip),
        affinity_seconds: affinity(spec),
        internal_local: is_local(&spec.internal_traffic_policy),
        external_local: is_external(spec) && is_local(&spec.external_traffic_policy),
    })
}

/// `externalTrafficPolicy` applies only to Services that are reachable from outside the cluster.
fn is_external(spec: &ServiceSpec) -> bool {
    let by_type = matches!(spec.type_.as_deref(), Some("NodePort" | "LoadBalancer"));
    by_type || spec.external_ips.as_ref().is_some_and(|ips| !ips.is_empty())
}

/// The load balancer IPs with `ipMode: VIP`, which receive packets with the original destination. With
/// `ipMode: Proxy` the load balancer must not be bypassed.
fn balancer_ips(service: &Service) -> impl Iterator<Item = &str> {
    let status = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
    let ingress = status.and_then(|balancer| balancer.ingress.as_ref()).into_iter().flatten();
    ingress.filter(|one| one.ip_mode.as_deref() != Some("Proxy")).filter_map(|one| one.ip.as_deref())
}

fn of_family<'a>(ip: IpFamily, ranges: impl Iterator<Item = &'a str>) -> Vec<IpAddr> {
    ranges.filter_map(|text| text.parse().ok()).filter(|address| IpFamily::of(*address) == ip).collect()
}

fn sources(spec: &ServiceSpec, ip: IpFamily) -> Vec<IpNet> {
    let ranges = spec.load_balancer_source_ranges.iter().flatten();
    let networks: Vec<IpNet> = ranges
        .filter_map(|text| text.trim().parse::<IpNet>().ok())
        .filter(|net| IpFamily::of(net.first()) == ip)
        .collect();
    if networks.iter().any(|net| net.bits() == 0) { Vec::new() } else { networks }
}

fn affinity(spec: &ServiceSpec) -> Option<u32> {
    if spec.session_affinity.as_deref() != Some("ClientIP") {
        return None;
    }
    let config = spec.session_affinity_config.as_ref().and_then(|config| config.client_ip.as_ref());
    let seconds = config.and_then(|config| u32::try_from(config.timeout_seconds?).ok());
    Some(seconds.unwrap_or(DEFAULT_AFFINITY_SECONDS))
}

pub fn protocol(name: &Option<String>) -> Option<Proto> {
    match name.as_deref().unwrap_or("TCP") {
        "TCP" => Some(Proto::Tcp),
        "UDP" => Some(Proto::Udp),
        "SCTP" => Some(Proto::Sctp),
        _ => None,
    }
}

/// The health check node port, for load balancer Services with `externalTrafficPolicy: Local`.
pub fn health_port(service: &Service) -> Option<u16> {
    let spec = service.spec.as_ref()?;
    let applies = spec.type_.as_deref() == Some("LoadBalancer")
        && spec.external_traffic_policy.as_deref() == Some("Local");
    let port = spec.health_check_node_port.filter(|_| applies)?;
    u16::try_from(port).ok().filter(|port| *port != 0)
}
