//! Translates NetworkPolicies to nftables rules. Does no I/O.
//!
//! A policy has one chain per direction that accepts what it allows, and sets with the addresses of its
//! peers. A pod that is selected by a policy has a chain that jumps to the chains of all its policies
//! and drops the rest. A verdict map selects the chain by the pod's address.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::net::IpAddr;
use std::sync::Arc;

use api::selector::LabelSelector;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::networking::v1::{IPBlock, NetworkPolicy, NetworkPolicyPeer, NetworkPolicyPort};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use nft::{
    BaseChain, ChainType, DataType, Field, Fragment, Hook, IpFamily, IpNet, MatchValue, Name, Proto, Rule,
    Set, Statement, Verdict, rule,
};
use reconcile::Object as _;

use crate::base_ruleset::name_for_family;
use crate::plan::{disjoint, protocol};

/// Longer names are truncated. The kernel allows 255 bytes.
const MAX_NAME_BYTES: usize = 180;

/// The direction of a connection from the perspective of the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Direction {
    Ingress,
    Egress,
}

impl Direction {
    pub const BOTH: [Direction; 2] = [Direction::Ingress, Direction::Egress];

    fn name(self) -> &'static str {
        match self {
            Direction::Ingress => "in",
            Direction::Egress => "out",
        }
    }

    /// The verdict map from pod addresses to chains.
    pub fn chain_map(self, ip: IpFamily) -> Name {
        name_for_family(if self == Direction::Ingress { "ingress" } else { "egress" }, ip).into()
    }

    /// The packet field with the pod's address.
    fn pod_field(self, ip: IpFamily) -> Field {
        match self {
            Direction::Ingress => Field::Destination(ip),
            Direction::Egress => Field::Source(ip),
        }
    }

    /// The packet field with the peer's address.
    fn peer_field(self, ip: IpFamily) -> Field {
        match self {
            Direction::Ingress => Field::Source(ip),
            Direction::Egress => Field::Destination(ip),
        }
    }
}

/// The pods and namespaces of the cluster.
pub trait ClusterView {
    fn pods(&self, namespace: &str) -> Vec<Arc<Pod>>;
    fn namespaces(&self) -> Vec<Arc<Namespace>>;
}

/// The base chains for policies, with egress before ingress. Traffic between the node itself and its
/// pods is always allowed, so only forwarded packets are checked.
pub fn base_rules() -> Fragment {
    let mut fragment = Fragment::default();
    for (direction, name, priority) in
        [(Direction::Egress, "policy-egress", 10), (Direction::Ingress, "policy-ingress", 11)]
    {
        let mut rules = vec![rule([Statement::StateEstablished, Statement::accept()])];
        for ip in IpFamily::ALL {
            let map = direction.chain_map(ip);
            fragment.set(&map, Set::verdict_map(&[ip.address()]));
            rules.push(rule([Statement::Lookup { fields: vec![direction.pod_field(ip)], map }]));
        }
        fragment.base_chain(
            &name.into(),
            BaseChain { chain_type: ChainType::Filter, hook: Hook::Forward, priority },
            rules,
        );
    }
    fragment
}

/// The fragment of a policy in these families.
pub fn policy(policy: &NetworkPolicy, view: &dyn ClusterView, families: &[IpFamily]) -> Fragment {
    let mut fragment = Fragment::default();
    for direction in policy_types(policy) {
        let rules = rules(policy, direction);
        for ip in families {
            let mut chain = Vec::new();
            for (number, (peers, ports)) in rules.iter().enumerate() {
                let mut part =
                    RuleBuilder { policy, view, direction, ip: *ip, number, fragment: &mut fragment };
                let ports = part.ports(peers, ports);
                let peers = part.peers(peers.as_deref());
                for peer in &peers {
                    for port in &ports {
                        chain.push([peer.clone(), port.clone(), vec![Statement::accept()]].concat());
                    }
                }
            }
            fragment.chain(&policy_chain(policy, direction, *ip), chain);
        }
    }
    fragment
}

/// The fragment of a pod on this node, given all policies in its namespace.
pub fn pod(pod: &Pod, policies: &[Arc<NetworkPolicy>], families: &[IpFamily]) -> Fragment {
    let mut fragment = Fragment::default();
    let matching: Vec<&Arc<NetworkPolicy>> =
        policies.iter().filter(|policy| applies_to(policy, pod)).collect();
    for direction in Direction::BOTH {
        let policies: Vec<&&Arc<NetworkPolicy>> =
            matching.iter().filter(|policy| policy_types(policy).contains(&direction)).collect();
        if policies.is_empty() {
            continue;
        }
        for ip in families {
            let addresses: Vec<MatchValue> = addresses(pod)
                .filter(|address| IpFamily::of(*address) == *ip)
                .map(MatchValue::Address)
                .collect();
            if addresses.is_empty() {
                continue;
            }
            let chain = chain_name(&format!("pod-{}", direction.name()), *ip, pod.namespace(), pod.name());
            // A pod can always connect to itself.
            let own_traffic =
                Statement::Match { field: direction.peer_field(*ip), not: false, any: addresses.clone() };
            let mut rules = vec![rule([own_traffic, Statement::accept()])];
            rules.extend(
                policies.iter().map(|policy| rule([Statement::jump(&policy_chain(policy, direction, *ip))])),
            );
            rules.push(rule([Statement::drop()]));
            fragment.chain(&chain, rules);
            for address in addresses {
                fragment.element(
                    &direction.chain_map(*ip),
                    vec![address],
                    Some(Verdict::Goto(chain.clone())),
                );
            }
        }
    }
    fragment
}

/// Whether a policy applies to a pod.
pub fn applies_to(policy: &NetworkPolicy, pod: &Pod) -> bool {
    let spec = policy.spec.as_ref();
    let selector = spec.and_then(|spec| spec.pod_selector.as_ref());
    let selector =
        selector.map_or_else(LabelSelector::everything, |selector| reconcile::selector(Some(selector)));
    policy.namespace() == pod.namespace() && has_network(pod) && selector.matches(|name| pod.label(name))
}

/// Whether the rules of a policy may depend on this pod. May return true unnecessarily, but never false
/// wrongly.
pub fn may_reference(policy: &NetworkPolicy, pod: &Pod) -> bool {
    let matches = |peer: &NetworkPolicyPeer| match (&peer.namespace_selector, &peer.pod_selector) {
        (None, None) => false,
        (None, Some(_)) if policy.namespace() != pod.namespace() => false,
        (_, None) => true,
        (_, Some(selector)) => reconcile::selector(Some(selector)).matches(|name| pod.label(name)),
    };
    let in_rules =
        Direction::BOTH.into_iter().flat_map(|direction| rules(policy, direction)).any(|(peers, ports)| {
            // Named ports are resolved in pods; in all pods if the rule has no peers.
            let has_names = ports.iter().any(|port| matches!(port.port, Some(IntOrString::String(_))));
            peers.map_or(has_names, |peers| peers.iter().any(matches))
        });
    in_rules || applies_to(policy, pod)
}

/// Whether the pod has its own network and is not terminated.
pub fn has_network(pod: &Pod) -> bool {
    let on_host = pod.spec.as_ref().and_then(|spec| spec.host_network).unwrap_or(false);
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    !on_host && !matches!(phase, Some("Succeeded" | "Failed"))
}

pub fn addresses(pod: &Pod) -> impl Iterator<Item = IpAddr> {
    let status = pod.status.as_ref().filter(|_| has_network(pod));
    let pod_ips = status.and_then(|status| status.pod_ips.as_ref()).into_iter().flatten();
    pod_ips.filter_map(|ip| ip.ip.parse().ok())
}

/// The effective policy types of a policy.
fn policy_types(policy: &NetworkPolicy) -> Vec<Direction> {
    let Some(spec) = policy.spec.as_ref() else { return vec![Direction::Ingress] };
    match spec.policy_types.as_deref() {
        Some(types) if !types.is_empty() => {
            let has = |name: &str| types.iter().any(|one| one == name);
            let declared = [(Direction::Ingress, has("Ingress")), (Direction::Egress, has("Egress"))];
            declared.into_iter().filter(|(_, declared)| *declared).map(|(direction, _)| direction).collect()
        }
        _ if spec.egress.as_ref().is_some_and(|rules| !rules.is_empty()) => Direction::BOTH.into(),
        _ => vec![Direction::Ingress],
    }
}

/// Peers (`None`: all) and ports (empty: all) of a rule.
type AllowRule = (Option<Vec<NetworkPolicyPeer>>, Vec<NetworkPolicyPort>);

fn rules(policy: &NetworkPolicy, direction: Direction) -> Vec<AllowRule> {
    let Some(spec) = policy.spec.as_ref() else { return Vec::new() };
    let peers = |peers: &Option<Vec<NetworkPolicyPeer>>| peers.clone().filter(|peers| !peers.is_empty());
    match direction {
        Direction::Ingress => {
            let rules = spec.ingress.iter().flatten();
            rules.map(|rule| (peers(&rule.from), rule.ports.clone().unwrap_or_default())).collect()
        }
        Direction::Egress => {
            let rules = spec.egress.iter().flatten();
            rules.map(|rule| (peers(&rule.to), rule.ports.clone().unwrap_or_default())).collect()
        }
    }
}

/// Builds the statements of one policy rule in one family.
struct RuleBuilder<'a> {
    policy: &'a NetworkPolicy,
    view: &'a dyn ClusterView,
    direction: Direction,
    ip: IpFamily,
    number: usize,
    fragment: &'a mut Fragment,
}

impl RuleBuilder<'_> {
    fn set_name(&self, what: &str) -> Name {
        let what = format!("{what}-{}-{}", self.direction.name(), self.number);
        chain_name(&what, self.ip, self.policy.namespace(), self.policy.name())
    }

    /// The alternative matches for peers.
    fn peers(&mut self, peers: Option<&[NetworkPolicyPeer]>) -> Vec<Rule> {
        let Some(peers) = peers else { return vec![Vec::new()] };
        let mut rules: Vec<Rule> =
            peers.iter().filter_map(|peer| self.block(peer.ip_block.as_ref()?)).collect();
        if peers.iter().any(|peer| peer.ip_block.is_none()) {
            let set = self.set_name("peers");
            self.fragment.set(&set, Set::new(&[self.ip.address()]));
            for pod in self.pods(peers) {
                for address in addresses(&pod).filter(|address| IpFamily::of(*address) == self.ip) {
                    self.fragment.element(&set, vec![MatchValue::Address(address)], None);
                }
            }
            rules.push(rule([Statement::InSet { fields: vec![self.direction.peer_field(self.ip)], set }]));
        }
        rules
    }

    fn block(&self, block: &IPBlock) -> Option<Rule> {
        let field = self.direction.peer_field(self.ip);
        let is_same_family = |net: &IpNet| IpFamily::of(net.first()) == self.ip;
        let net = block.cidr.parse::<IpNet>().ok().filter(is_same_family)?;
        let mut rule = rule([Statement::equals(field, MatchValue::Net(net))]);
        let except = block
            .except
            .iter()
            .flatten()
            .filter_map(|text| text.parse::<IpNet>().ok())
            .filter(is_same_family);
        let except = disjoint(&except.collect::<Vec<_>>());
        if !except.is_empty() {
            let any = except.into_iter().map(MatchValue::Net).collect();
            rule.push(Statement::Match { field, not: true, any });
        }
        Some(rule)
    }

    /// The pods selected by these peers.
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

    /// The alternative matches for ports. `peers` are those of the same rule.
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
                let mut rule = rule([Statement::equals(Field::Proto, MatchValue::Proto(proto))]);
                let any = merge_ranges(ranges);
                if any != [MatchValue::Ports(0, u16::MAX)] {
                    rule.push(Statement::Match { field: Field::DestinationPort, not: false, any });
                }
                rule
            })
            .collect();
        if !names.is_empty() {
            rules.push(self.named_ports(peers.as_deref(), &names));
        }
        rules
    }

    /// Named ports are resolved in the destination pods: for ingress those that the policy selects, for
    /// egress the peers.
    fn named_ports(&mut self, peers: Option<&[NetworkPolicyPeer]>, names: &BTreeSet<(Proto, &str)>) -> Rule {
        let set = self.set_name("ports");
        self.fragment.set(&set, Set::new(&[self.ip.address(), DataType::Proto, DataType::Port]));
        let target_pods = match (self.direction, peers) {
            (Direction::Ingress, _) => {
                let pods = self.view.pods(self.policy.namespace()).into_iter();
                pods.filter(|pod| applies_to(self.policy, pod)).collect()
            }
            (Direction::Egress, Some(peers)) => self.pods(peers),
            (Direction::Egress, None) => {
                let all = self.view.namespaces();
                all.iter().flat_map(|namespace| self.view.pods(namespace.name())).collect()
            }
        };
        for pod in target_pods {
            let containers = pod.spec.as_ref().map(|spec| spec.containers.as_slice()).unwrap_or_default();
            for port in containers.iter().flat_map(|container| container.ports.iter().flatten()) {
                let (Some(proto), Some(name)) = (protocol(&port.protocol), port.name.as_deref()) else {
                    continue;
                };
                let number = u16::try_from(port.container_port).ok();
                let Some(number) = number.filter(|_| names.contains(&(proto, name))) else { continue };
                for address in addresses(&pod).filter(|address| IpFamily::of(*address) == self.ip) {
                    let key = vec![
                        MatchValue::Address(address),
                        MatchValue::Proto(proto),
                        MatchValue::Port(number),
                    ];
                    self.fragment.element(&set, key, None);
                }
            }
        }
        let fields = vec![Field::Destination(self.ip), Field::Proto, Field::DestinationPort];
        rule([Statement::InSet { fields, set }])
    }
}

/// Merges overlapping and adjacent ranges.
fn merge_ranges(mut ranges: Vec<(u16, u16)>) -> Vec<MatchValue> {
    ranges.sort();
    let mut result: Vec<(u16, u16)> = Vec::new();
    for (first, last) in ranges {
        match result.last_mut() {
            Some(before) if first <= before.1.saturating_add(1) => before.1 = before.1.max(last),
            _ => result.push((first, last)),
        }
    }
    let to_match =
        |(first, last)| if first == last { MatchValue::Port(first) } else { MatchValue::Ports(first, last) };
    result.into_iter().map(to_match).collect()
}

fn policy_chain(policy: &NetworkPolicy, direction: Direction, ip: IpFamily) -> Name {
    chain_name(&format!("allow-{}", direction.name()), ip, policy.namespace(), policy.name())
}

/// A chain or set name, truncated and made unique with a hash if it is too long for the kernel.
pub(crate) fn chain_name(what: &str, ip: IpFamily, namespace: &str, name: &str) -> Name {
    let full = format!("{}/{namespace}/{name}", name_for_family(what, ip));
    if full.len() <= MAX_NAME_BYTES {
        return full.into();
    }
    let mut hasher = DefaultHasher::new();
    full.hash(&mut hasher);
    // Object names are ASCII, so any byte index is a character boundary.
    format!("{}-{:016x}", full.get(..MAX_NAME_BYTES).unwrap_or_default(), hasher.finish()).into()
}

#[cfg(test)]
mod tests;
