//! What one Service needs on this node: its part of the table, its health port, what to know of its UDP flows. Pure.

mod endpoints;
mod service;

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use nft::{Atom, Field, Fragment, Ip, Key, Name, Net, Proto, Rule, Set, Statement, Verdict, rule};
use reconcile::Object as _;

use crate::skeleton::{MASQUERADE, Sets, named, refuse};
use endpoints::{Usable, backends, usable};
pub(crate) use service::protocol;
use service::{Front, fronts, health_port};

/// Where traffic is looked at from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Place {
    /// The name of this node.
    pub node: String,
    /// Its zone, or nothing.
    pub zone: String,
    /// Its addresses as the Node object has them.
    pub addresses: Vec<IpAddr>,
    /// The networks of pods.
    pub pods: Vec<Net>,
}

/// What a Service needs.
#[derive(Debug, Default, PartialEq)]
pub struct Plan {
    pub fragment: Fragment,
    pub health: Option<Health>,
    pub flows: Vec<Flows>,
}

/// What to answer a load balancer that asks for endpoints on this node.
#[derive(Clone, Debug, PartialEq)]
pub struct Health {
    pub port: u16,
    pub endpoints: usize,
}

/// Where the packets of one UDP port may go. The kernel remembers flows and would go on with one whose endpoint is gone.
#[derive(Clone, Debug, PartialEq)]
pub struct Flows {
    pub at: Vec<SocketAddr>,
    pub node_port: Option<u16>,
    pub to: BTreeSet<SocketAddr>,
}

/// The plan for a Service and the slices that belong to it.
pub fn plan(service: &Service, slices: &[Arc<EndpointSlice>], place: &Place) -> Plan {
    let mut plan = Plan::default();
    let mut local = BTreeSet::new();
    for front in fronts(service) {
        let backends = backends(slices, front.ip, front.port_name, front.proto, place);
        local.extend(backends.iter().filter(|one| one.is_local && one.is_ready).map(|one| one.to.ip()));
        if front.proto == Proto::Udp {
            let to = backends.iter().filter(|one| one.is_serving).map(|one| one.to).collect();
            plan.flows.push(flows(&front, to));
        }
        let usable = usable(&backends, front.uses(), place);
        Chains::new(service, front, usable, place).write(&mut plan.fragment);
    }
    plan.health = health_port(service).map(|port| Health { port, endpoints: local.len() });
    plan
}

fn flows(front: &Front<'_>, to: BTreeSet<SocketAddr>) -> Flows {
    let addresses = [front.cluster_ip].into_iter().chain(front.external_ips.clone());
    let addresses = addresses.chain(front.balancer_ips.clone());
    let at = addresses.map(|address| SocketAddr::new(address, front.port)).collect();
    Flows { at, node_port: front.node_port, to }
}

/// The chains of one port in one family.
struct Chains<'a> {
    front: Front<'a>,
    usable: Usable,
    place: &'a Place,
    sets: Sets,
    /// `namespace/name/tcp/80`.
    id: String,
}

impl<'a> Chains<'a> {
    fn new(service: &Service, front: Front<'a>, usable: Usable, place: &'a Place) -> Chains<'a> {
        let (proto, port) = (front.proto.name(), front.port);
        let id = format!("{}/{}/{proto}/{port}", service.namespace(), service.name());
        Chains { sets: Sets::of(front.ip), front, usable, place, id }
    }

    fn name(&self, what: &str) -> Name {
        format!("{}/{}", named(what, self.front.ip), self.id).into()
    }

    /// The chain or the affinity of one endpoint.
    fn endpoint_name(&self, what: &str, to: &SocketAddr) -> Name {
        let address = to.ip().to_string().replace(':', ".");
        format!("{}/{}/{address}/{}", named(what, self.front.ip), self.id, to.port()).into()
    }

    fn write(&self, fragment: &mut Fragment) {
        let internal = if self.front.internal_local { "local" } else { "cluster" };
        let has_internal = self.usable.any && (!self.front.internal_local || !self.usable.local.is_empty());
        let has_external = self.usable.any && (!self.front.external_local || !self.usable.local.is_empty());
        fragment.element(&self.sets.cluster_ips, vec![Atom::Address(self.front.cluster_ip)], None);
        let cluster_ip = self.key(self.front.cluster_ip);
        if has_internal {
            fragment.element(&self.sets.services, cluster_ip, Some(Verdict::Goto(self.name(internal))));
        } else {
            fragment.element(&self.sets.no_endpoints, cluster_ip, Some(self.refusal()));
        }
        self.write_external(fragment, has_external);
        self.write_firewall(fragment);
        let policies = [("cluster", &self.usable.cluster), ("local", &self.usable.local)];
        for (policy, endpoints) in policies.into_iter().filter(|(_, endpoints)| !endpoints.is_empty()) {
            fragment.chain(&self.name(policy), self.spread(endpoints));
        }
        if let Some(seconds) = self.front.affinity_seconds {
            self.write_affinity(fragment, seconds);
        }
        for to in &self.usable.here {
            let (address, port) = (Atom::Address(to.ip()), Atom::Port(to.port()));
            let key = vec![address, address, Atom::Proto(self.front.proto), port];
            fragment.element(&self.sets.hairpins, key, None);
        }
    }

    /// Nobody there is told to the sender; nobody here is not, since it is the balancer's mistake.
    fn refusal(&self) -> Verdict {
        if self.usable.any { Verdict::Drop } else { Verdict::Goto(refuse()) }
    }

    fn key(&self, address: IpAddr) -> Key {
        vec![Atom::Address(address), Atom::Proto(self.front.proto), Atom::Port(self.front.port)]
    }

    /// Node port, external addresses and load balancer.
    fn write_external(&self, fragment: &mut Fragment, has_external: bool) {
        if !self.front.is_external() {
            return;
        }
        let chain = self.name("external");
        let addresses = self.front.external_ips.iter().chain(&self.front.balancer_ips);
        let mut elements: Vec<(&Name, &Name, Key)> = addresses
            .map(|address| (&self.sets.services, &self.sets.no_endpoints, self.key(*address)))
            .collect();
        if let Some(port) = self.front.node_port {
            let key = vec![Atom::Proto(self.front.proto), Atom::Port(port)];
            elements.push((&self.sets.node_ports, &self.sets.no_endpoint_ports, key));
        }
        for (map, refused, key) in elements {
            if self.usable.any {
                fragment.element(map, key.clone(), Some(Verdict::Goto(chain.clone())));
            }
            if !has_external {
                fragment.element(refused, key, Some(self.refusal()));
            }
        }
        if self.usable.any {
            fragment.chain(&chain, self.external_rules(has_external));
        }
    }

    fn external_rules(&self, has_external: bool) -> Vec<Rule> {
        let cluster = self.name("cluster");
        if !self.front.external_local {
            // The endpoint may be on another node, whose answer would miss us.
            return vec![rule([Statement::Mark(MASQUERADE)]), rule([Statement::goto(&cluster)])];
        }
        let mut rules = Vec::new();
        if !self.usable.cluster.is_empty() {
            // From inside the cluster no policy applies, as if it went out to the load balancer and came back.
            let pods: Vec<Atom> = self
                .place
                .pods
                .iter()
                .filter(|net| Ip::of(net.first()) == self.front.ip)
                .copied()
                .map(Atom::Net)
                .collect();
            if !pods.is_empty() {
                let is_pod = Statement::Is { field: Field::Source(self.front.ip), not: false, any: pods };
                rules.push(rule([is_pod, Statement::goto(&cluster)]));
            }
            rules.push(rule([Statement::SourceIsLocal, Statement::Mark(MASQUERADE)]));
            rules.push(rule([Statement::SourceIsLocal, Statement::goto(&cluster)]));
        }
        if has_external {
            rules.push(rule([Statement::goto(&self.name("local"))]));
        }
        rules
    }

    fn write_firewall(&self, fragment: &mut Fragment) {
        let front = &self.front;
        if front.sources.is_empty() || front.balancer_ips.is_empty() {
            return;
        }
        let mut allowed = front.sources.clone();
        let node_is_allowed =
            self.place.addresses.iter().any(|address| allowed.iter().any(|net| net.contains(*address)));
        if node_is_allowed {
            // This node may have the balancer's address itself, and come from there.
            allowed.extend(front.balancer_ips.iter().copied().map(Net::from));
        }
        let chain = self.name("firewall");
        let any = disjoint(&allowed).into_iter().map(Atom::Net).collect();
        let stranger = Statement::Is { field: Field::Source(front.ip), not: true, any };
        fragment.chain(&chain, vec![rule([stranger, Statement::drop()])]);
        for address in &front.balancer_ips {
            let verdict = Some(Verdict::Goto(chain.clone()));
            fragment.element(&self.sets.firewalls, self.key(*address), verdict);
        }
    }

    /// The rules that lead to one of these endpoints.
    fn spread(&self, endpoints: &[SocketAddr]) -> Vec<Rule> {
        let is_proto = Statement::is(Field::Proto, Atom::Proto(self.front.proto));
        if self.front.affinity_seconds.is_none() {
            return vec![rule([is_proto, Statement::Redirect(endpoints.to_vec())])];
        }
        let chains: Vec<Name> = endpoints.iter().map(|to| self.endpoint_name("endpoint", to)).collect();
        let fields = [Field::Source(self.front.ip)];
        let again = endpoints.iter().zip(&chains).map(|(to, chain)| {
            let set = self.endpoint_name("affinity", to);
            rule([Statement::In { fields: fields.into(), set }, Statement::goto(chain)])
        });
        let pick = Statement::Pick(chains.iter().cloned().map(Verdict::Goto).collect());
        again.chain([rule([pick])]).collect()
    }

    fn write_affinity(&self, fragment: &mut Fragment, seconds: u32) {
        let endpoints: BTreeSet<&SocketAddr> = self.usable.cluster.iter().chain(&self.usable.local).collect();
        let ip = self.front.ip;
        for to in endpoints {
            let set = self.endpoint_name("affinity", to);
            fragment.set(&set, Set { seconds: Some(seconds), ..Set::plain(&[ip.address()]) });
            let is_proto = Statement::is(Field::Proto, Atom::Proto(self.front.proto));
            let rules = vec![
                rule([Statement::Remember { set, ip }]),
                rule([is_proto, Statement::Redirect(vec![*to])]),
            ];
            fragment.chain(&self.endpoint_name("endpoint", to), rules);
        }
    }
}

/// The same addresses in networks of which none is inside another, as the kernel wants them.
pub(crate) fn disjoint(nets: &[Net]) -> Vec<Net> {
    let mut kept: Vec<Net> = Vec::new();
    let mut sorted = nets.to_vec();
    sorted.sort_by_key(|net| (net.bits(), *net));
    for net in sorted {
        if !kept.iter().any(|larger| larger.contains(net.first())) {
            kept.push(net);
        }
    }
    kept
}

#[cfg(test)]
pub(crate) mod tests;
