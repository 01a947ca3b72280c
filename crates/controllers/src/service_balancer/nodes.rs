//! The built-in load balancer: a Service gets the addresses of the nodes, or an address from a pool that is
//! routed to the nodes by other means. It creates nothing outside of the cluster; allocations are read from
//! the Service statuses.

use std::collections::BTreeSet;
use std::net::IpAddr;

use api::networking::ip::{self, Cidr};
use async_trait::async_trait;
use k8s_openapi::api::core::v1::{LoadBalancerIngress, LoadBalancerStatus, Service};
use reconcile::Object;
use reconcile::cloud::{Cloud, CloudError, LoadBalancer, LoadBalancerContext, Routes};

use super::plan;

/// The maximum number of addresses of a pool range that are scanned for a free one.
const MAX_POOL_SCAN: u128 = 1 << 16;

/// The cluster's nodes as the cloud provider.
#[derive(Clone, Debug, Default)]
pub struct NodeBalancer {
    pool: Vec<(IpAddr, IpAddr)>,
}

/// An invalid pool entry.
#[derive(Debug, PartialEq, thiserror::Error)]
#[error(
    "invalid address pool {0:?}: must be a CIDR such as 192.0.2.0/28 or a range such as 192.0.2.10-192.0.2.20"
)]
pub struct InvalidPool(String);

impl NodeBalancer {
    /// With a pool of addresses for Services. If it is empty, node addresses are used.
    pub fn with_pool(pool: &[String]) -> Result<NodeBalancer, InvalidPool> {
        let parse = |text: &String| {
            let range = || {
                let (first, last) = text.split_once('-')?;
                let (first, last) =
                    (first.trim().parse::<IpAddr>().ok()?, last.trim().parse::<IpAddr>().ok()?);
                (first.is_ipv6() == last.is_ipv6() && first <= last).then_some((first, last))
            };
            let network = Cidr::parse(text).map(|network| (network.first(), network.last()));
            network.or_else(range).ok_or_else(|| InvalidPool(text.clone()))
        };
        Ok(NodeBalancer { pool: pool.iter().map(parse).collect::<Result<_, _>>()? })
    }

    /// Allocates one address for each IP family of the Service.
    fn allocate_from_pool(
        &self,
        service: &Service,
        cluster_state: &LoadBalancerContext,
    ) -> Result<Vec<String>, CloudError> {
        let taken: BTreeSet<IpAddr> =
            cluster_state.others.iter().flat_map(|other| assigned_addresses(other)).collect();
        let spec = service.spec.as_ref();
        let requested = spec.and_then(|spec| spec.load_balancer_ip.as_deref()).filter(|ip| !ip.is_empty());
        if let Some(requested) = requested {
            let ip = requested.parse().ok().filter(|ip| self.contains(*ip));
            let ip = ip.ok_or_else(|| CloudError(format!("address {requested} is not in the pool")))?;
            return match taken.contains(&ip) {
                true => Err(CloudError(format!("address {requested} is already in use"))),
                false => Ok(vec![requested.to_owned()]),
            };
        }
        let assigned: Vec<IpAddr> = assigned_addresses(service).collect();
        let mut found = Vec::new();
        for family in families(service) {
            let fits =
                |ip: &IpAddr| ip.is_ipv6() == (family == "IPv6") && self.contains(*ip) && !taken.contains(ip);
            // A Service keeps its current address.
            let current = assigned.iter().copied().find(fits);
            let free =
                current.or_else(|| self.pool.iter().flat_map(|range| range_addresses(*range)).find(fits));
            found.extend(free.map(|ip| ip.to_string()));
        }
        match found.is_empty() {
            true => Err(CloudError("the address pool is exhausted".into())),
            false => Ok(found),
        }
    }

    fn contains(&self, ip: IpAddr) -> bool {
        self.pool.iter().any(|(first, last)| ip.is_ipv6() == first.is_ipv6() && *first <= ip && ip <= *last)
    }
}

fn range_addresses((first, last): (IpAddr, IpAddr)) -> impl Iterator<Item = IpAddr> {
    let (from, to) = (ip::to_number(first), ip::to_number(last));
    (from..=to.min(from.saturating_add(MAX_POOL_SCAN)))
        .map(move |number| ip::from_number(number, first.is_ipv6()))
}

fn assigned_addresses(service: &Service) -> impl Iterator<Item = IpAddr> {
    plan::ingress_addresses(service).into_iter().filter_map(|(ip, _)| ip.parse().ok())
}

fn families(service: &Service) -> Vec<String> {
    let families = service.spec.as_ref().and_then(|spec| spec.ip_families.clone()).unwrap_or_default();
    if families.is_empty() { vec!["IPv4".into()] } else { families }
}

/// The addresses of the nodes that can serve the Service. A port of the nodes can be used by one Service
/// only.
fn node_addresses(service: &Service, cluster_state: &LoadBalancerContext) -> Result<Vec<String>, CloudError> {
    let ports = |service: &Service| -> BTreeSet<(String, i32)> {
        let ports = service.spec.iter().flat_map(|spec| spec.ports.iter().flatten());
        ports.map(|port| (port.protocol.clone().unwrap_or_else(|| "TCP".into()), port.port)).collect()
    };
    let own = ports(service);
    for other in cluster_state.others.iter().filter(|other| !plan::ingress_addresses(other).is_empty()) {
        if let Some((protocol, port)) = ports(other).intersection(&own).next() {
            return Err(CloudError(format!(
                "port {port}/{protocol} is already used by Service {}",
                other.key()
            )));
        }
    }
    let local = plan::is_local_traffic_policy(service);
    let serving =
        cluster_state.nodes.iter().filter(|node| !local || cluster_state.serving.contains(node.name()));
    let mut addresses: Vec<IpAddr> =
        serving.flat_map(|node| plan::external_addresses(node)).filter_map(|ip| ip.parse().ok()).collect();
    let families = families(service);
    addresses.retain(|ip| families.iter().any(|family| (family == "IPv6") == ip.is_ipv6()));
    addresses.sort();
    addresses.dedup();
    // Sorted by the order of the Service's IP families. The sort is stable.
    addresses.sort_by_key(|ip| families.iter().position(|family| (family == "IPv6") == ip.is_ipv6()));
    Ok(addresses.iter().map(IpAddr::to_string).collect())
}

impl Cloud for NodeBalancer {
    fn load_balancer(&self) -> Option<&dyn LoadBalancer> {
        Some(self)
    }

    fn routes(&self) -> Option<&dyn Routes> {
        None
    }
}

#[async_trait]
impl LoadBalancer for NodeBalancer {
    fn needs_cleanup(&self) -> bool {
        false
    }

    async fn ensure(
        &self,
        service: &Service,
        cluster_state: &LoadBalancerContext,
    ) -> Result<LoadBalancerStatus, CloudError> {
        let addresses = match self.pool.is_empty() {
            true => node_addresses(service, cluster_state)?,
            false => self.allocate_from_pool(service, cluster_state)?,
        };
        let ingress_for = |ip: String| LoadBalancerIngress {
            ip: Some(ip),
            ip_mode: Some("VIP".into()),
            ..LoadBalancerIngress::default()
        };
        let ingress: Vec<LoadBalancerIngress> = addresses.into_iter().map(ingress_for).collect();
        Ok(LoadBalancerStatus { ingress: (!ingress.is_empty()).then_some(ingress) })
    }

    async fn remove(&self, _: &Service) -> Result<(), CloudError> {
        Ok(())
    }
}
