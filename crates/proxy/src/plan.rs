//! Computes what a Service needs on this node: its fragment of the table, its health check port and the
//! endpoints of its UDP ports. Does no I/O.

mod endpoints;
mod service;

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use nft::{
    Field, Fragment, IpFamily, IpNet, Key, MatchValue, Name, Proto, Rule, Set, Statement, Verdict, rule,
};
use reconcile::Object as _;

use crate::base_ruleset::{MASQUERADE, ServiceSets, name_for_family, reject_chain};
use endpoints::{UsableEndpoints, backends, usable};
pub(crate) use service::protocol;
use service::{ServicePortInfo, health_port, service_ports};

/// The node that the plan is for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeTopology {
    /// The name of this node.
    pub node: String,
    /// The node's zone; empty if unknown.
    pub zone: String,
    /// The node's internal addresses from the Node object.
    pub addresses: Vec<IpAddr>,
    /// The cluster's pod networks.
    pub pods: Vec<IpNet>,
}

/// What a Service needs on a node.
#[derive(Debug, Default, PartialEq)]
pub struct ServicePlan {
    pub fragment: Fragment,
    pub health: Option<HealthCheck>,
    pub udp_ports: Vec<UdpPortTargets>,
}

/// The health check of a Service: its node port and the number of local ready endpoints.
#[derive(Clone, Debug, PartialEq)]
pub struct HealthCheck {
    pub port: u16,
    pub endpoints: usize,
}

/// The endpoints of a UDP port. Conntrack entries to anything else are stale and must be deleted.
#[derive(Clone, Debug, PartialEq)]
pub struct UdpPortTargets {
    pub at: Vec<SocketAddr>,
    pub node_port: Option<u16>,
    pub to: BTreeSet<SocketAddr>,
}

/// The plan for a Service with its EndpointSlices.
pub fn plan(service: &Service, slices: &[Arc<EndpointSlice>], topology: &NodeTopology) -> ServicePlan {
    let mut plan = ServicePlan::default();
    let mut local = BTreeSet::new();
    for service_port in service_ports(service) {
        let backends =
            backends(slices, service_port.ip, service_port.port_name, service_port.proto, topology);
        local.extend(backends.iter().filter(|one| one.is_local && one.is_ready).map(|one| one.to.ip()));
        if service_port.proto == Proto::Udp {
            let to = backends.iter().filter(|one| one.is_serving).map(|one| one.to).collect();
            plan.udp_ports.push(udp_port_targets(&service_port, to));
        }
        let usable = usable(&backends, service_port.traffic_scopes(), topology);
        ServiceChains::new(service, service_port, usable, topology).write(&mut plan.fragment);
    }
    plan.health = health_port(service).map(|port| HealthCheck { port, endpoints: local.len() });
    plan
}

fn udp_port_targets(service_port: &ServicePortInfo<'_>, to: BTreeSet<SocketAddr>) -> UdpPortTargets {
    let addresses = [service_port.cluster_ip].into_iter().chain(service_port.external_ips.clone());
    let addresses = addresses.chain(service_port.balancer_ips.clone());
    let at = addresses.map(|address| SocketAddr::new(address, service_port.port)).collect();
    UdpPortTargets { at, node_port: service_port.node_port, to }
}

/// Writes the chains of one Service port in one family.
struct ServiceChains<'a> {
    service_port: ServicePortInfo<'a>,
    usable: UsableEndpoints,
    topology: &'a NodeTopology,
    sets: ServiceSets,
    /// `<namespace>/<name>/<protocol>/<port>`.
    id: String,
}

impl<'a> ServiceChains<'a> {
    fn new(
        service: &Service,
        service_port: ServicePortInfo<'a>,
        usable: UsableEndpoints,
        topology: &'a NodeTopology,
    ) -> ServiceChains<'a> {
        let (proto, port) = (service_port.proto.name(), service_port.port);
        let id = format!("{}/{}/{proto}/{port}", service.namespace(), service.name());
        ServiceChains { sets: ServiceSets::of(service_port.ip), service_port, usable, topology, id }
    }

    fn name(&self, what: &str) -> Name {
        format!("{}/{}", name_for_family(what, self.service_port.ip), self.id).into()
    }

    /// The name of an endpoint's chain or affinity set.
    fn endpoint_name(&self, what: &str, to: &SocketAddr) -> Name {
        let address = to.ip().to_string().replace(':', ".");
        format!("{}/{}/{address}/{}", name_for_family(what, self.service_port.ip), self.id, to.port()).into()
    }

    fn write(&self, fragment: &mut Fragment) {
        let internal = if self.service_port.internal_local { "local" } else { "cluster" };
        let has_internal =
            self.usable.has_any && (!self.service_port.internal_local || !self.usable.local.is_empty());
        let has_external =
            self.usable.has_any && (!self.service_port.external_local || !self.usable.local.is_empty());
        fragment.element(
            &self.sets.cluster_ips,
            vec![MatchValue::Address(self.service_port.cluster_ip)],
            None,
        );
        let cluster_ip = self.key(self.service_port.cluster_ip);
        if has_internal {
            fragment.element(&self.sets.services, cluster_ip, Some(Verdict::Goto(self.name(internal))));
        } else {
            fragment.element(&self.sets.no_endpoints, cluster_ip, Some(self.reject_verdict()));
        }
        self.write_external(fragment, has_external);
        self.write_firewall(fragment);
        let policies = [("cluster", &self.usable.cluster), ("local", &self.usable.local)];
        for (policy, endpoints) in policies.into_iter().filter(|(_, endpoints)| !endpoints.is_empty()) {
            fragment.chain(&self.name(policy), self.load_balance_rules(endpoints));
        }
        if let Some(seconds) = self.service_port.affinity_seconds {
            self.write_affinity(fragment, seconds);
        }
        for to in &self.usable.local_in_use {
            let (address, port) = (MatchValue::Address(to.ip()), MatchValue::Port(to.port()));
            let key = vec![address, address, MatchValue::Proto(self.service_port.proto), port];
            fragment.element(&self.sets.hairpin_connections, key, None);
        }
    }

    /// Without any endpoint the connection is rejected. If there are only none on this node, packets
    /// are dropped: the load balancer should not have chosen this node.
    fn reject_verdict(&self) -> Verdict {
        if self.usable.has_any { Verdict::Drop } else { Verdict::Goto(reject_chain()) }
    }

    fn key(&self, address: IpAddr) -> Key {
        vec![
            MatchValue::Address(address),
            MatchValue::Proto(self.service_port.proto),
            MatchValue::Port(self.service_port.port),
        ]
    }

    /// Writes node port, external IPs and load balancer IPs.
    fn write_external(&self, fragment: &mut Fragment, has_external: bool) {
        if !self.service_port.is_external() {
            return;
        }
        let chain = self.name("external");
        let addresses = self.service_port.external_ips.iter().chain(&self.service_port.balancer_ips);
        let mut elements: Vec<(&Name, &Name, Key)> = addresses
            .map(|address| (&self.sets.services, &self.sets.no_endpoints, self.key(*address)))
            .collect();
        if let Some(port) = self.service_port.node_port {
            let key = vec![MatchValue::Proto(self.service_port.proto), MatchValue::Port(port)];
            elements.push((&self.sets.node_ports, &self.sets.no_endpoint_ports, key));
        }
        for (map, rejected, key) in elements {
            if self.usable.has_any {
                fragment.element(map, key.clone(), Some(Verdict::Goto(chain.clone())));
            }
            if !has_external {
                fragment.element(rejected, key, Some(self.reject_verdict()));
            }
        }
        if self.usable.has_any {
            fragment.chain(&chain, self.external_rules(has_external));
        }
    }

    fn external_rules(&self, has_external: bool) -> Vec<Rule> {
        let cluster = self.name("cluster");
        if !self.service_port.external_local {
            // The endpoint may be on another node. Its responses must come back through this one.
            return vec![rule([Statement::SetMark(MASQUERADE)]), rule([Statement::goto(&cluster)])];
        }
        let mut rules = Vec::new();
        if !self.usable.cluster.is_empty() {
            // `externalTrafficPolicy` does not apply to traffic from within the cluster, which is
            // treated as if it had left the cluster and come back through the load balancer.
            let pods: Vec<MatchValue> = self
                .topology
                .pods
                .iter()
                .filter(|net| IpFamily::of(net.first()) == self.service_port.ip)
                .copied()
                .map(MatchValue::Net)
                .collect();
            if !pods.is_empty() {
                let is_pod =
                    Statement::Match { field: Field::Source(self.service_port.ip), not: false, any: pods };
                rules.push(rule([is_pod, Statement::goto(&cluster)]));
            }
            rules.push(rule([Statement::SourceIsLocal, Statement::SetMark(MASQUERADE)]));
            rules.push(rule([Statement::SourceIsLocal, Statement::goto(&cluster)]));
        }
        if has_external {
            rules.push(rule([Statement::goto(&self.name("local"))]));
        }
        rules
    }

    fn write_firewall(&self, fragment: &mut Fragment) {
        let service_port = &self.service_port;
        if service_port.sources.is_empty() || service_port.balancer_ips.is_empty() {
            return;
        }
        let mut allowed = service_port.sources.clone();
        let node_is_allowed =
            self.topology.addresses.iter().any(|address| allowed.iter().any(|net| net.contains(*address)));
        if node_is_allowed {
            // The load balancer IP may be assigned to this node, so that its own packets have this
            // source address.
            allowed.extend(service_port.balancer_ips.iter().copied().map(IpNet::from));
        }
        let chain = self.name("firewall");
        let any = disjoint(&allowed).into_iter().map(MatchValue::Net).collect();
        let not_allowed_source = Statement::Match { field: Field::Source(service_port.ip), not: true, any };
        fragment.chain(&chain, vec![rule([not_allowed_source, Statement::drop()])]);
        for address in &service_port.balancer_ips {
            let verdict = Some(Verdict::Goto(chain.clone()));
            fragment.element(&self.sets.firewall_ips, self.key(*address), verdict);
        }
    }

    /// The rules that pick one of these endpoints.
    fn load_balance_rules(&self, endpoints: &[SocketAddr]) -> Vec<Rule> {
        let is_proto = Statement::equals(Field::Proto, MatchValue::Proto(self.service_port.proto));
        if self.service_port.affinity_seconds.is_none() {
            return vec![rule([is_proto, Statement::Dnat(endpoints.to_vec())])];
        }
        let chains: Vec<Name> = endpoints.iter().map(|to| self.endpoint_name("endpoint", to)).collect();
        let fields = [Field::Source(self.service_port.ip)];
        let sticky = endpoints.iter().zip(&chains).map(|(to, chain)| {
            let set = self.endpoint_name("affinity", to);
            rule([Statement::InSet { fields: fields.into(), set }, Statement::goto(chain)])
        });
        let pick = Statement::RandomVerdict(chains.iter().cloned().map(Verdict::Goto).collect());
        sticky.chain([rule([pick])]).collect()
    }

    fn write_affinity(&self, fragment: &mut Fragment, seconds: u32) {
        let endpoints: BTreeSet<&SocketAddr> = self.usable.cluster.iter().chain(&self.usable.local).collect();
        let ip = self.service_port.ip;
        for to in endpoints {
            let set = self.endpoint_name("affinity", to);
            fragment.set(&set, Set { timeout_seconds: Some(seconds), ..Set::new(&[ip.address()]) });
            let is_proto = Statement::equals(Field::Proto, MatchValue::Proto(self.service_port.proto));
            let rules = vec![
                rule([Statement::AddSourceToSet { set, ip }]),
                rule([is_proto, Statement::Dnat(vec![*to])]),
            ];
            fragment.chain(&self.endpoint_name("endpoint", to), rules);
        }
    }
}

/// Removes networks that are contained in others. The kernel rejects overlapping intervals in a set.
pub(crate) fn disjoint(nets: &[IpNet]) -> Vec<IpNet> {
    let mut result: Vec<IpNet> = Vec::new();
    let mut sorted = nets.to_vec();
    sorted.sort_by_key(|net| (net.bits(), *net));
    for net in sorted {
        if !result.iter().any(|larger| larger.contains(net.first())) {
            result.push(net);
        }
    }
    result
}

#[cfg(test)]
pub(crate) mod tests;
