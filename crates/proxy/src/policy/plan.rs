//! What NetworkPolicies allow, as rules. Pure.
//!
//! A policy is a chain for each direction that accepts what it allows, and sets of the addresses it means. A pod that
//! some policy selects has a chain that tries each of its policies and drops the rest; a map leads to it.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::net::IpAddr;
use std::sync::Arc;

use api::selector::LabelSelector;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::networking::v1::{IPBlock, NetworkPolicy, NetworkPolicyPeer, NetworkPolicyPort};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use nft::{
    Atom, Base, Field, Fragment, Hook, Ip, Kind, Name, Net, Proto, Rule, Set, Statement, Type, Verdict, rule,
};
use reconcile::Object as _;

use crate::plan::{disjoint, protocol};
use crate::skeleton::named;

/// Names longer than this are cut: the kernel has room for 255 bytes.
const LONGEST: usize = 180;

/// Which way a packet goes, seen from the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    In,
    Out,
}

impl Way {
    pub const BOTH: [Way; 2] = [Way::In, Way::Out];

    fn name(self) -> &'static str {
        match self {
            Way::In => "in",
            Way::Out => "out",
        }
    }

    /// The map that leads from a pod's address to its chain.
    pub fn map(self, ip: Ip) -> Name {
        named(if self == Way::In { "ingress" } else { "egress" }, ip).into()
    }

    /// The pod's end of the connection.
    fn own(self, ip: Ip) -> Field {
        match self {
            Way::In => Field::Destination(ip),
            Way::Out => Field::Source(ip),
        }
    }

    /// The other end of the connection.
    fn peer(self, ip: Ip) -> Field {
        match self {
            Way::In => Field::Source(ip),
            Way::Out => Field::Destination(ip),
        }
    }
}

/// The pods and namespaces there are.
pub trait View {
    fn pods(&self, namespace: &str) -> Vec<Arc<Pod>>;
    fn namespaces(&self) -> Vec<Arc<Namespace>>;
}

/// Where packets between pods and others are caught: what leaves a pod must be allowed, and then what enters one. What
/// the node itself sends to its pods or gets from them is always allowed, so only what it forwards is looked at.
pub fn skeleton() -> Fragment {
    let mut fragment = Fragment::default();
    for (way, name, priority) in [(Way::Out, "policy-egress", 10), (Way::In, "policy-ingress", 11)] {
        let mut rules = vec![rule([Statement::Known, Statement::accept()])];
        for ip in Ip::BOTH {
            let map = way.map(ip);
            fragment.set(&map, Set::verdicts(&[ip.address()]));
            rules.push(rule([Statement::Lookup { fields: vec![way.own(ip)], map }]));
        }
        fragment.base(&name.into(), Base { kind: Kind::Filter, hook: Hook::Forward, priority }, rules);
    }
    fragment
}

/// What a policy needs in these families.
pub fn policy(policy: &NetworkPolicy, view: &dyn View, families: &[Ip]) -> Fragment {
    let mut fragment = Fragment::default();
    for way in ways(policy) {
        let rules = rules(policy, way);
        for ip in families {
            let mut chain = Vec::new();
            for (number, (peers, ports)) in rules.iter().enumerate() {
                let mut part = Part { policy, view, way, ip: *ip, number, fragment: &mut fragment };
                let ports = part.ports(peers, ports);
                let peers = part.peers(peers.as_deref());
                for peer in &peers {
                    for port in &ports {
                        chain.push([peer.clone(), port.clone(), vec![Statement::accept()]].concat());
                    }
                }
            }
            fragment.chain(&policy_chain(policy, way, *ip), chain);
        }
    }
    fragment
}

/// What a pod of this node needs, given all policies of its namespace.
pub fn pod(pod: &Pod, policies: &[Arc<NetworkPolicy>], families: &[Ip]) -> Fragment {
    let mut fragment = Fragment::default();
    let selecting: Vec<&Arc<NetworkPolicy>> = policies.iter().filter(|policy| selects(policy, pod)).collect();
    for way in Way::BOTH {
        let policies: Vec<&&Arc<NetworkPolicy>> =
            selecting.iter().filter(|policy| ways(policy).contains(&way)).collect();
        if policies.is_empty() {
            continue;
        }
        for ip in families {
            let addresses: Vec<Atom> =
                addresses(pod).filter(|address| Ip::of(*address) == *ip).map(Atom::Address).collect();
            if addresses.is_empty() {
                continue;
            }
            let chain = short(&format!("pod-{}", way.name()), *ip, pod.namespace(), pod.name());
            // Nothing keeps a pod from itself.
            let itself = Statement::Is { field: way.peer(*ip), not: false, any: addresses.clone() };
            let mut rules = vec![rule([itself, Statement::accept()])];
            rules.extend(
                policies.iter().map(|policy| rule([Statement::jump(&policy_chain(policy, way, *ip))])),
            );
            rules.push(rule([Statement::drop()]));
            fragment.chain(&chain, rules);
            for address in addresses {
                fragment.element(&way.map(*ip), vec![address], Some(Verdict::Goto(chain.clone())));
            }
        }
    }
    fragment
}

/// Whether a policy is about a pod.
pub fn selects(policy: &NetworkPolicy, pod: &Pod) -> bool {
    let spec = policy.spec.as_ref();
    let selector = spec.and_then(|spec| spec.pod_selector.as_ref());
    let selector =
        selector.map_or_else(LabelSelector::everything, |selector| reconcile::selector(Some(selector)));
    policy.namespace() == pod.namespace() && has_network(pod) && selector.matches(|name| pod.label(name))
}

/// Whether what a policy allows may depend on this pod. May say yes too often.
pub fn mentions(policy: &NetworkPolicy, pod: &Pod) -> bool {
    let matches = |peer: &NetworkPolicyPeer| match (&peer.namespace_selector, &peer.pod_selector) {
        (None, None) => false,
        (None, Some(_)) if policy.namespace() != pod.namespace() => false,
        (_, None) => true,
        (_, Some(selector)) => reconcile::selector(Some(selector)).matches(|name| pod.label(name)),
    };
    let in_rules = Way::BOTH.into_iter().flat_map(|way| rules(policy, way)).any(|(peers, ports)| {
        // Names of ports are looked up in pods, in all of them where no peer is named.
        let has_names = ports.iter().any(|port| matches!(port.port, Some(IntOrString::String(_))));
        peers.map_or(has_names, |peers| peers.iter().any(matches))
    });
    in_rules || selects(policy, pod)
}

/// A pod with a network of its own that is not over.
pub fn has_network(pod: &Pod) -> bool {
    let on_host = pod.spec.as_ref().and_then(|spec| spec.host_network).unwrap_or(false);
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    !on_host && !matches!(phase, Some("Succeeded" | "Failed"))
}

pub fn addresses(pod: &Pod) -> impl Iterator<Item = IpAddr> {
    let status = pod.status.as_ref().filter(|_| has_network(pod));
    let several = status.and_then(|status| status.pod_ips.as_ref()).into_iter().flatten();
    several.filter_map(|ip| ip.ip.parse().ok())
}

/// Which ways a policy restricts.
fn ways(policy: &NetworkPolicy) -> Vec<Way> {
    let Some(spec) = policy.spec.as_ref() else { return vec![Way::In] };
    match spec.policy_types.as_deref() {
        Some(types) if !types.is_empty() => {
            let has = |name: &str| types.iter().any(|one| one == name);
            let wanted = [(Way::In, has("Ingress")), (Way::Out, has("Egress"))];
            wanted.into_iter().filter(|(_, wanted)| *wanted).map(|(way, _)| way).collect()
        }
        _ if spec.egress.as_ref().is_some_and(|rules| !rules.is_empty()) => Way::BOTH.into(),
        _ => vec![Way::In],
    }
}

/// Peers, or everybody, and ports, or all.
type Allowed = (Option<Vec<NetworkPolicyPeer>>, Vec<NetworkPolicyPort>);

fn rules(policy: &NetworkPolicy, way: Way) -> Vec<Allowed> {
    let Some(spec) = policy.spec.as_ref() else { return Vec::new() };
    let peers = |peers: &Option<Vec<NetworkPolicyPeer>>| peers.clone().filter(|peers| !peers.is_empty());
    match way {
        Way::In => {
            let rules = spec.ingress.iter().flatten();
            rules.map(|rule| (peers(&rule.from), rule.ports.clone().unwrap_or_default())).collect()
        }
        Way::Out => {
            let rules = spec.egress.iter().flatten();
            rules.map(|rule| (peers(&rule.to), rule.ports.clone().unwrap_or_default())).collect()
        }
    }
}

/// One rule of a policy in one family.
struct Part<'a> {
    policy: &'a NetworkPolicy,
    view: &'a dyn View,
    way: Way,
    ip: Ip,
    number: usize,
    fragment: &'a mut Fragment,
}

impl Part<'_> {
    fn set_name(&self, what: &str) -> Name {
        let what = format!("{what}-{}-{}", self.way.name(), self.number);
        short(&what, self.ip, self.policy.namespace(), self.policy.name())
    }

    /// Each way for a peer to be allowed.
    fn peers(&mut self, peers: Option<&[NetworkPolicyPeer]>) -> Vec<Rule> {
        let Some(peers) = peers else { return vec![Vec::new()] };
        let mut rules: Vec<Rule> =
            peers.iter().filter_map(|peer| self.block(peer.ip_block.as_ref()?)).collect();
        if peers.iter().any(|peer| peer.ip_block.is_none()) {
            let set = self.set_name("peers");
            self.fragment.set(&set, Set::plain(&[self.ip.address()]));
            for pod in self.pods(peers) {
                for address in addresses(&pod).filter(|address| Ip::of(*address) == self.ip) {
                    self.fragment.element(&set, vec![Atom::Address(address)], None);
                }
            }
            rules.push(rule([Statement::In { fields: vec![self.way.peer(self.ip)], set }]));
        }
        rules
    }

    fn block(&self, block: &IPBlock) -> Option<Rule> {
        let field = self.way.peer(self.ip);
        let is_ours = |net: &Net| Ip::of(net.first()) == self.ip;
        let net = block.cidr.parse::<Net>().ok().filter(is_ours)?;
        let mut rule = rule([Statement::is(field, Atom::Net(net))]);
        let except =
            block.except.iter().flatten().filter_map(|text| text.parse::<Net>().ok()).filter(is_ours);
        let except = disjoint(&except.collect::<Vec<_>>());
        if !except.is_empty() {
            let any = except.into_iter().map(Atom::Net).collect();
            rule.push(Statement::Is { field, not: true, any });
        }
        Some(rule)
    }

    /// The pods that these peers mean.
    fn pods(&self, peers: &[NetworkPolicyPeer]) -> Vec<Arc<Pod>> {
        let mut found = Vec::new();
        for peer in peers.iter().filter(|peer| peer.ip_block.is_none()) {
            let namespaces: Vec<String> = match &peer.namespace_selector {
                None => vec![self.policy.namespace().to_owned()],
                Some(selector) => {
                    let selector = reconcile::selector(Some(selector));
                    let all = self.view.namespaces();
                    let chosen = all.iter().filter(|one| selector.matches(|name| one.label(name)));
                    chosen.map(|one| one.name().to_owned()).collect()
                }
            };
            let selector = peer.pod_selector.as_ref().map(|selector| reconcile::selector(Some(selector)));
            for namespace in namespaces {
                let pods = self.view.pods(&namespace).into_iter();
                found.extend(pods.filter(|pod| {
                    selector.as_ref().is_none_or(|selector| selector.matches(|name| pod.label(name)))
                }));
            }
        }
        found
    }

    /// Each way for a port to be allowed. `peers` are those of the same rule.
    fn ports(&mut self, peers: &Option<Vec<NetworkPolicyPeer>>, ports: &[NetworkPolicyPort]) -> Vec<Rule> {
        if ports.is_empty() {
            return vec![Vec::new()];
        }
        let mut numbers: BTreeMap<Proto, Vec<(u16, u16)>> = BTreeMap::new();
        let mut names: BTreeSet<(Proto, &str)> = BTreeSet::new();
        for port in ports {
            let Some(proto) = protocol(&port.protocol) else { continue };
            match &port.port {
                None => numbers.entry(proto).or_default().push((0, u16::MAX)),
                Some(IntOrString::Int(first)) => {
                    let last = port.end_port.unwrap_or(*first);
                    if let (Ok(first), Ok(last)) = (u16::try_from(*first), u16::try_from(last)) {
                        numbers.entry(proto).or_default().push((first, last));
                    }
                }
                Some(IntOrString::String(name)) => _ = names.insert((proto, name)),
            }
        }
        let mut rules: Vec<Rule> = numbers
            .into_iter()
            .map(|(proto, ranges)| {
                let mut rule = rule([Statement::is(Field::Proto, Atom::Proto(proto))]);
                let any = merged(ranges);
                if any != [Atom::Ports(0, u16::MAX)] {
                    rule.push(Statement::Is { field: Field::DestinationPort, not: false, any });
                }
                rule
            })
            .collect();
        if !names.is_empty() {
            rules.push(self.named_ports(peers.as_deref(), &names));
        }
        rules
    }

    /// Names of ports are those of the pod that is reached: one the policy selects, or one of its peers.
    fn named_ports(&mut self, peers: Option<&[NetworkPolicyPeer]>, names: &BTreeSet<(Proto, &str)>) -> Rule {
        let set = self.set_name("ports");
        self.fragment.set(&set, Set::plain(&[self.ip.address(), Type::Proto, Type::Port]));
        let reached = match (self.way, peers) {
            (Way::In, _) => {
                let pods = self.view.pods(self.policy.namespace()).into_iter();
                pods.filter(|pod| selects(self.policy, pod)).collect()
            }
            (Way::Out, Some(peers)) => self.pods(peers),
            (Way::Out, None) => {
                let all = self.view.namespaces();
                all.iter().flat_map(|namespace| self.view.pods(namespace.name())).collect()
            }
        };
        for pod in reached {
            let containers = pod.spec.as_ref().map(|spec| spec.containers.as_slice()).unwrap_or_default();
            for port in containers.iter().flat_map(|container| container.ports.iter().flatten()) {
                let (Some(proto), Some(name)) = (protocol(&port.protocol), port.name.as_deref()) else {
                    continue;
                };
                let number = u16::try_from(port.container_port).ok();
                let Some(number) = number.filter(|_| names.contains(&(proto, name))) else { continue };
                for address in addresses(&pod).filter(|address| Ip::of(*address) == self.ip) {
                    let key = vec![Atom::Address(address), Atom::Proto(proto), Atom::Port(number)];
                    self.fragment.element(&set, key, None);
                }
            }
        }
        let fields = vec![Field::Destination(self.ip), Field::Proto, Field::DestinationPort];
        rule([Statement::In { fields, set }])
    }
}

/// Ranges that do not touch each other.
fn merged(mut ranges: Vec<(u16, u16)>) -> Vec<Atom> {
    ranges.sort();
    let mut kept: Vec<(u16, u16)> = Vec::new();
    for (first, last) in ranges {
        match kept.last_mut() {
            Some(before) if first <= before.1.saturating_add(1) => before.1 = before.1.max(last),
            _ => kept.push((first, last)),
        }
    }
    let atom = |(first, last)| if first == last { Atom::Port(first) } else { Atom::Ports(first, last) };
    kept.into_iter().map(atom).collect()
}

fn policy_chain(policy: &NetworkPolicy, way: Way, ip: Ip) -> Name {
    short(&format!("allow-{}", way.name()), ip, policy.namespace(), policy.name())
}

/// A name that the kernel has room for.
pub(crate) fn short(what: &str, ip: Ip, namespace: &str, name: &str) -> Name {
    let full = format!("{}/{namespace}/{name}", named(what, ip));
    if full.len() <= LONGEST {
        return full.into();
    }
    let mut hasher = DefaultHasher::new();
    full.hash(&mut hasher);
    // Names of objects are ASCII, so every byte is a place to cut.
    format!("{}-{:016x}", full.get(..LONGEST).unwrap_or_default(), hasher.finish()).into()
}

#[cfg(test)]
mod tests;
