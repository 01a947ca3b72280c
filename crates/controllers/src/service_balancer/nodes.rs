//! The balancer that needs no cloud: a Service is reached at the addresses of the nodes, or at one of a pool that
//! somebody leads to the nodes. Nothing is made outside the cluster: what is taken stands in the statuses of Services.

use std::collections::BTreeSet;
use std::net::IpAddr;

use api::networking::ip::{self, Cidr};
use async_trait::async_trait;
use k8s_openapi::api::core::v1::{LoadBalancerIngress, LoadBalancerStatus, Service};
use reconcile::Object;
use reconcile::cloud::{Around, Balancer, Cloud, CloudError, Routes};

use super::plan;

/// A pool is searched from its beginning; this far and no further.
const MOST_SEARCHED: u128 = 1 << 16;

/// The nodes of the cluster as its cloud.
#[derive(Clone, Debug, Default)]
pub struct Nodes {
    pool: Vec<(IpAddr, IpAddr)>,
}

/// A pool that cannot be understood.
#[derive(Debug, PartialEq, thiserror::Error)]
#[error("{0:?} is neither a network, as in 192.0.2.0/28, nor a range, as in 192.0.2.10-192.0.2.20")]
pub struct NoPool(String);

impl Nodes {
    /// With addresses to give to Services; without any, those of the nodes are given.
    pub fn with_pool(pool: &[String]) -> Result<Nodes, NoPool> {
        let parse = |text: &String| {
            let range = || {
                let (first, last) = text.split_once('-')?;
                let (first, last) =
                    (first.trim().parse::<IpAddr>().ok()?, last.trim().parse::<IpAddr>().ok()?);
                (first.is_ipv6() == last.is_ipv6() && first <= last).then_some((first, last))
            };
            let network = Cidr::parse(text).map(|network| (network.first(), network.last()));
            network.or_else(range).ok_or_else(|| NoPool(text.clone()))
        };
        Ok(Nodes { pool: pool.iter().map(parse).collect::<Result<_, _>>()? })
    }

    /// One address of each family the Service has.
    fn out_of_pool(&self, service: &Service, around: &Around) -> Result<Vec<String>, CloudError> {
        let taken: BTreeSet<IpAddr> = around.others.iter().flat_map(|other| given(other)).collect();
        let spec = service.spec.as_ref();
        let asked = spec.and_then(|spec| spec.load_balancer_ip.as_deref()).filter(|ip| !ip.is_empty());
        if let Some(asked) = asked {
            let ip = asked.parse().ok().filter(|ip| self.has(*ip));
            let ip = ip.ok_or_else(|| CloudError(format!("address {asked} is not in the pool")))?;
            return match taken.contains(&ip) {
                true => Err(CloudError(format!("address {asked} is taken"))),
                false => Ok(vec![asked.to_owned()]),
            };
        }
        let held: Vec<IpAddr> = given(service).collect();
        let mut found = Vec::new();
        for family in families(service) {
            let fits =
                |ip: &IpAddr| ip.is_ipv6() == (family == "IPv6") && self.has(*ip) && !taken.contains(ip);
            // What a Service has it keeps.
            let kept = held.iter().copied().find(fits);
            let free = kept.or_else(|| self.pool.iter().flat_map(|range| each(*range)).find(fits));
            found.extend(free.map(|ip| ip.to_string()));
        }
        match found.is_empty() {
            true => Err(CloudError("no address is left in the pool".into())),
            false => Ok(found),
        }
    }

    fn has(&self, ip: IpAddr) -> bool {
        self.pool.iter().any(|(first, last)| ip.is_ipv6() == first.is_ipv6() && *first <= ip && ip <= *last)
    }
}

fn each((first, last): (IpAddr, IpAddr)) -> impl Iterator<Item = IpAddr> {
    let (from, to) = (ip::to_number(first), ip::to_number(last));
    (from..=to.min(from.saturating_add(MOST_SEARCHED)))
        .map(move |number| ip::from_number(number, first.is_ipv6()))
}

fn given(service: &Service) -> impl Iterator<Item = IpAddr> {
    plan::addresses(service).into_iter().filter_map(|(ip, _)| ip.parse().ok())
}

fn families(service: &Service) -> Vec<String> {
    let families = service.spec.as_ref().and_then(|spec| spec.ip_families.clone()).unwrap_or_default();
    if families.is_empty() { vec!["IPv4".into()] } else { families }
}

/// The addresses of the nodes that can take the Service's traffic. Each port of a node leads to one Service.
fn of_nodes(service: &Service, around: &Around) -> Result<Vec<String>, CloudError> {
    let ports = |service: &Service| -> BTreeSet<(String, i32)> {
        let ports = service.spec.iter().flat_map(|spec| spec.ports.iter().flatten());
        ports.map(|port| (port.protocol.clone().unwrap_or_else(|| "TCP".into()), port.port)).collect()
    };
    let own = ports(service);
    for other in around.others.iter().filter(|other| !plan::addresses(other).is_empty()) {
        if let Some((protocol, port)) = ports(other).intersection(&own).next() {
            return Err(CloudError(format!("port {port}/{protocol} is taken by Service {}", other.key())));
        }
    }
    let local = plan::is_local(service);
    let serving = around.nodes.iter().filter(|node| !local || around.serving.contains(node.name()));
    let mut addresses: Vec<IpAddr> =
        serving.flat_map(|node| plan::reached_at(node)).filter_map(|ip| ip.parse().ok()).collect();
    let families = families(service);
    addresses.retain(|ip| families.iter().any(|family| (family == "IPv6") == ip.is_ipv6()));
    addresses.sort();
    addresses.dedup();
    // In the order of the Service's families.
    addresses.sort_by_key(|ip| families.iter().position(|family| (family == "IPv6") == ip.is_ipv6()));
    Ok(addresses.iter().map(IpAddr::to_string).collect())
}

impl Cloud for Nodes {
    fn balancer(&self) -> Option<&dyn Balancer> {
        Some(self)
    }

    fn routes(&self) -> Option<&dyn Routes> {
        None
    }
}

#[async_trait]
impl Balancer for Nodes {
    fn needs_cleanup(&self) -> bool {
        false
    }

    async fn ensure(&self, service: &Service, around: &Around) -> Result<LoadBalancerStatus, CloudError> {
        let addresses = match self.pool.is_empty() {
            true => of_nodes(service, around)?,
            false => self.out_of_pool(service, around)?,
        };
        let way = |ip: String| LoadBalancerIngress {
            ip: Some(ip),
            ip_mode: Some("VIP".into()),
            ..LoadBalancerIngress::default()
        };
        let ingress: Vec<LoadBalancerIngress> = addresses.into_iter().map(way).collect();
        Ok(LoadBalancerStatus { ingress: (!ingress.is_empty()).then_some(ingress) })
    }

    async fn remove(&self, _: &Service) -> Result<(), CloudError> {
        Ok(())
    }
}
