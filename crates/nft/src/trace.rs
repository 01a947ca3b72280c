//! Where a packet goes, by the rules alone. Random choices are all followed, so that one trace tells everything
//! that may happen to a packet.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use crate::{ChainType, Field, Hook, IpFamily, MatchValue, Name, Proto, Ruleset, Statement, Verdict};

/// How deep chains may lead into each other, as in the kernel.
const MAX_CHAIN_DEPTH: usize = 16;

/// The first packet of a connection.
#[derive(Clone, Debug, PartialEq)]
pub struct Packet {
    pub from: IpAddr,
    pub to: SocketAddr,
    pub proto: Proto,
    /// Made by this machine itself rather than received by it.
    pub host_generated: bool,
}

/// What the rules ask of the machine besides the packet.
#[derive(Clone, Debug, Default)]
pub struct HostState {
    /// Its addresses.
    pub local: BTreeSet<IpAddr>,
    /// What packets have put into sets before.
    pub dynamic_sets: BTreeMap<Name, BTreeSet<IpAddr>>,
}

/// What becomes of a packet.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TraceResult {
    Delivered { to: SocketAddr, masquerade_applied: bool, updated_sets: Vec<Name> },
    Dropped,
    Rejected,
}

impl fmt::Display for TraceResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TraceResult::Delivered { to, masquerade_applied, .. } => {
                write!(f, "{to}{}", if *masquerade_applied { " masqueraded" } else { "" })
            }
            TraceResult::Dropped => f.write_str("dropped"),
            TraceResult::Rejected => f.write_str("rejected"),
        }
    }
}

/// Everything that may become of `packet`.
pub fn trace(rules: &Ruleset, machine: &HostState, packet: &Packet) -> BTreeSet<TraceResult> {
    let path = PacketPath {
        packet: packet.clone(),
        mark: 0,
        dnat_applied: false,
        masquerade_applied: false,
        updated_sets: vec![],
    };
    let tracer = Tracer { rules, machine };
    let first = if packet.host_generated { Hook::Output } else { Hook::Prerouting };
    let mut results = BTreeSet::new();
    for path in tracer.hooks(&[first], vec![path], &mut results) {
        let is_local = machine.local.contains(&path.packet.to.ip());
        let hooks: &[Hook] = match (packet.host_generated, is_local) {
            (true, true) => &[Hook::Postrouting, Hook::Input],
            (true, false) => &[Hook::Postrouting],
            (false, true) => &[Hook::Input],
            (false, false) => &[Hook::Forward, Hook::Postrouting],
        };
        for path in tracer.hooks(hooks, vec![path], &mut results) {
            let PacketPath { packet, masquerade_applied: masqueraded, updated_sets: remembered, .. } = path;
            results.insert(TraceResult::Delivered {
                to: packet.to,
                masquerade_applied: masqueraded,
                updated_sets: remembered,
            });
        }
    }
    results
}

/// A packet on one of its possible ways.
#[derive(Clone, Debug)]
struct PacketPath {
    packet: Packet,
    mark: u32,
    dnat_applied: bool,
    masquerade_applied: bool,
    updated_sets: Vec<Name>,
}

/// How a chain has ended for a packet.
enum ChainResult {
    Accepted,
    /// The chain has nothing more to say.
    Returned,
    Dropped,
    Rejected,
}

struct Tracer<'a> {
    rules: &'a Ruleset,
    machine: &'a HostState,
}

impl Tracer<'_> {
    /// The ways on which a packet gets through all base chains of these hooks.
    fn hooks(
        &self,
        hooks: &[Hook],
        mut paths: Vec<PacketPath>,
        results: &mut BTreeSet<TraceResult>,
    ) -> Vec<PacketPath> {
        for hook in hooks {
            let mut base_chains: Vec<_> =
                self.rules.base_chains().filter(|(_, base)| base.hook == *hook).collect();
            base_chains.sort_by_key(|(name, base)| (base.priority, *name));
            for (name, base) in base_chains {
                let mut left = Vec::new();
                for path in paths {
                    // A connection's destination is chosen once, and so is its source.
                    let is_done = path.dnat_applied && *hook != Hook::Postrouting || path.masquerade_applied;
                    if base.chain_type == ChainType::Nat && is_done {
                        left.push(path);
                        continue;
                    }
                    for (path, end) in self.chain(name, path, 0) {
                        match end {
                            ChainResult::Accepted | ChainResult::Returned => left.push(path),
                            ChainResult::Dropped => _ = results.insert(TraceResult::Dropped),
                            ChainResult::Rejected => _ = results.insert(TraceResult::Rejected),
                        }
                    }
                }
                paths = left;
            }
        }
        paths
    }

    fn chain(&self, name: &str, path: PacketPath, depth: usize) -> Vec<(PacketPath, ChainResult)> {
        let rules = self.rules.chain(name).unwrap_or_else(|| panic!("there is no chain {name}"));
        assert!(depth < MAX_CHAIN_DEPTH, "chains lead into each other too deeply at {name}");
        let (mut ends, mut paths) = (Vec::new(), vec![path]);
        for rule in rules {
            let mut left = Vec::new();
            for path in paths {
                for (path, next) in self.rule(rule, path, depth) {
                    match next {
                        None => left.push(path),
                        Some(end) => ends.push((path, end)),
                    }
                }
            }
            paths = left;
        }
        ends.extend(paths.into_iter().map(|path| (path, ChainResult::Returned)));
        ends
    }

    /// How one rule leaves a packet: `None` goes on with the next rule.
    fn rule(
        &self,
        rule: &[Statement],
        mut path: PacketPath,
        depth: usize,
    ) -> Vec<(PacketPath, Option<ChainResult>)> {
        for statement in rule {
            let matched = match statement {
                Statement::Match { field, not, any } => {
                    let (value, wrong_family) = (self.value(*field, &path), is_other_family(*field, &path));
                    !wrong_family && any.iter().any(|expected| matches(expected, &value)) != *not
                }
                Statement::InSet { fields, set } => {
                    fields.iter().all(|field| !is_other_family(*field, &path))
                        && (self.lookup(fields, set, &path).is_some() || self.is_in_dynamic_set(set, &path))
                }
                Statement::SourceIsLocal => self.machine.local.contains(&path.packet.from),
                Statement::DestinationIsLocal => self.machine.local.contains(&path.packet.to.ip()),
                Statement::StateNew => true,
                Statement::StateEstablished => false,
                Statement::IsDnat => path.dnat_applied,
                Statement::HasMark(bit) => path.mark & bit != 0,
                Statement::SetMark(bit) => {
                    path.mark |= bit;
                    true
                }
                Statement::ClearMark(bit) => {
                    path.mark ^= bit;
                    true
                }
                Statement::AddSourceToSet { set, .. } => {
                    path.updated_sets.push(set.clone());
                    true
                }
                Statement::Lookup { fields, map } => match self.lookup(fields, map, &path) {
                    Some(Some(verdict)) => return self.verdict(verdict, path, depth),
                    _ => true,
                },
                Statement::Verdict(verdict) => return self.verdict(verdict, path, depth),
                Statement::RandomVerdict(verdicts) => {
                    let go = |verdict| self.verdict(verdict, path.clone(), depth);
                    return verdicts.iter().flat_map(go).collect();
                }
                Statement::Dnat(to) => {
                    let go = |to: &SocketAddr| {
                        let packet = Packet { to: *to, ..path.packet.clone() };
                        (
                            PacketPath { packet, dnat_applied: true, ..path.clone() },
                            Some(ChainResult::Accepted),
                        )
                    };
                    return to.iter().map(go).collect();
                }
                Statement::Masquerade => {
                    path.masquerade_applied = true;
                    return vec![(path, Some(ChainResult::Accepted))];
                }
                Statement::Reject => return vec![(path, Some(ChainResult::Rejected))],
            };
            if !matched {
                break;
            }
        }
        vec![(path, None)]
    }

    fn verdict(
        &self,
        verdict: &Verdict,
        path: PacketPath,
        depth: usize,
    ) -> Vec<(PacketPath, Option<ChainResult>)> {
        match verdict {
            Verdict::Accept => vec![(path, Some(ChainResult::Accepted))],
            Verdict::Drop => vec![(path, Some(ChainResult::Dropped))],
            Verdict::Return => vec![(path, Some(ChainResult::Returned))],
            Verdict::Goto(chain) => {
                self.chain(chain, path, depth + 1).into_iter().map(|(path, end)| (path, Some(end))).collect()
            }
            Verdict::Jump(chain) => {
                let back = |(path, end)| match end {
                    ChainResult::Returned => (path, None),
                    end => (path, Some(end)),
                };
                self.chain(chain, path, depth + 1).into_iter().map(back).collect()
            }
        }
    }

    /// Where the packet's element of a set leads, if there is one.
    fn lookup(&self, fields: &[Field], set: &str, path: &PacketPath) -> Option<Option<&Verdict>> {
        let values: Vec<MatchValue> = fields.iter().map(|field| self.value(*field, path)).collect();
        let is_it = |key: &[MatchValue]| {
            key.len() == values.len() && key.iter().zip(&values).all(|(a, v)| matches(a, v))
        };
        self.rules.elements(set).find(|(key, _)| is_it(key)).map(|(_, verdict)| verdict)
    }

    fn is_in_dynamic_set(&self, set: &str, path: &PacketPath) -> bool {
        self.machine.dynamic_sets.get(set).is_some_and(|sources| sources.contains(&path.packet.from))
    }

    fn value(&self, field: Field, path: &PacketPath) -> MatchValue {
        match field {
            Field::Source(_) => MatchValue::Address(path.packet.from),
            Field::Destination(_) => MatchValue::Address(path.packet.to.ip()),
            Field::Proto => MatchValue::Proto(path.packet.proto),
            Field::DestinationPort => MatchValue::Port(path.packet.to.port()),
            Field::Family => MatchValue::Family(IpFamily::of(path.packet.to.ip())),
            // What is received comes by some link that no rule has a name for.
            Field::Link => MatchValue::Link(if path.packet.host_generated { "lo" } else { "" }),
        }
    }
}

/// Asking for addresses of one family asks for that family.
fn is_other_family(field: Field, path: &PacketPath) -> bool {
    match field {
        Field::Source(ip) | Field::Destination(ip) => ip != IpFamily::of(path.packet.to.ip()),
        _ => false,
    }
}

fn matches(expected: &MatchValue, value: &MatchValue) -> bool {
    match (expected, value) {
        (MatchValue::Net(net), MatchValue::Address(address)) => net.contains(*address),
        (MatchValue::Ports(from, to), MatchValue::Port(port)) => (from..=to).contains(&port),
        (expected, value) => expected == value,
    }
}
