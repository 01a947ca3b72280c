//! Where a packet goes, by the rules alone. Random choices are all followed, so that one trace tells everything
//! that may happen to a packet.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use crate::{Atom, Field, Hook, Ip, Kind, Name, Proto, Ruleset, Statement, Verdict};

/// How deep chains may lead into each other, as in the kernel.
const DEPTH: usize = 16;

/// The first packet of a connection.
#[derive(Clone, Debug, PartialEq)]
pub struct Packet {
    pub from: IpAddr,
    pub to: SocketAddr,
    pub proto: Proto,
    /// Made by this machine itself rather than received by it.
    pub own: bool,
}

/// What the rules ask of the machine besides the packet.
#[derive(Clone, Debug, Default)]
pub struct Machine {
    /// Its addresses.
    pub local: BTreeSet<IpAddr>,
    /// What packets have put into sets before.
    pub remembered: BTreeMap<Name, BTreeSet<IpAddr>>,
}

/// What becomes of a packet.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fate {
    Reaches { to: SocketAddr, masqueraded: bool, remembered: Vec<Name> },
    Dropped,
    Rejected,
}

impl fmt::Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fate::Reaches { to, masqueraded, .. } => {
                write!(f, "{to}{}", if *masqueraded { " masqueraded" } else { "" })
            }
            Fate::Dropped => f.write_str("dropped"),
            Fate::Rejected => f.write_str("rejected"),
        }
    }
}

/// Everything that may become of `packet`.
pub fn trace(rules: &Ruleset, machine: &Machine, packet: &Packet) -> BTreeSet<Fate> {
    let way =
        Way { packet: packet.clone(), mark: 0, redirected: false, masqueraded: false, remembered: vec![] };
    let tracer = Tracer { rules, machine };
    let first = if packet.own { Hook::Output } else { Hook::Prerouting };
    let mut fates = BTreeSet::new();
    for way in tracer.hooks(&[first], vec![way], &mut fates) {
        let is_local = machine.local.contains(&way.packet.to.ip());
        let hooks: &[Hook] = match (packet.own, is_local) {
            (true, true) => &[Hook::Postrouting, Hook::Input],
            (true, false) => &[Hook::Postrouting],
            (false, true) => &[Hook::Input],
            (false, false) => &[Hook::Forward, Hook::Postrouting],
        };
        for way in tracer.hooks(hooks, vec![way], &mut fates) {
            let Way { packet, masqueraded, remembered, .. } = way;
            fates.insert(Fate::Reaches { to: packet.to, masqueraded, remembered });
        }
    }
    fates
}

/// A packet on one of its possible ways.
#[derive(Clone, Debug)]
struct Way {
    packet: Packet,
    mark: u32,
    redirected: bool,
    masqueraded: bool,
    remembered: Vec<Name>,
}

/// How a chain has ended for a packet.
enum End {
    Accepted,
    /// The chain has nothing more to say.
    Through,
    Dropped,
    Rejected,
}

struct Tracer<'a> {
    rules: &'a Ruleset,
    machine: &'a Machine,
}

impl Tracer<'_> {
    /// The ways on which a packet gets through all base chains of these hooks.
    fn hooks(&self, hooks: &[Hook], mut ways: Vec<Way>, fates: &mut BTreeSet<Fate>) -> Vec<Way> {
        for hook in hooks {
            let mut bases: Vec<_> = self.rules.bases().filter(|(_, base)| base.hook == *hook).collect();
            bases.sort_by_key(|(name, base)| (base.priority, *name));
            for (name, base) in bases {
                let mut left = Vec::new();
                for way in ways {
                    // A connection's destination is chosen once, and so is its source.
                    let is_done = way.redirected && *hook != Hook::Postrouting || way.masqueraded;
                    if base.kind == Kind::Nat && is_done {
                        left.push(way);
                        continue;
                    }
                    for (way, end) in self.chain(name, way, 0) {
                        match end {
                            End::Accepted | End::Through => left.push(way),
                            End::Dropped => _ = fates.insert(Fate::Dropped),
                            End::Rejected => _ = fates.insert(Fate::Rejected),
                        }
                    }
                }
                ways = left;
            }
        }
        ways
    }

    fn chain(&self, name: &str, way: Way, depth: usize) -> Vec<(Way, End)> {
        let rules = self.rules.chain(name).unwrap_or_else(|| panic!("there is no chain {name}"));
        assert!(depth < DEPTH, "chains lead into each other too deeply at {name}");
        let (mut ends, mut ways) = (Vec::new(), vec![way]);
        for rule in rules {
            let mut left = Vec::new();
            for way in ways {
                for (way, next) in self.rule(rule, way, depth) {
                    match next {
                        None => left.push(way),
                        Some(end) => ends.push((way, end)),
                    }
                }
            }
            ways = left;
        }
        ends.extend(ways.into_iter().map(|way| (way, End::Through)));
        ends
    }

    /// How one rule leaves a packet: `None` goes on with the next rule.
    fn rule(&self, rule: &[Statement], mut way: Way, depth: usize) -> Vec<(Way, Option<End>)> {
        for statement in rule {
            let goes_on = match statement {
                Statement::Is { field, not, any } => {
                    let (value, wrong_family) = (self.value(*field, &way), is_other_family(*field, &way));
                    !wrong_family && any.iter().any(|atom| matches(atom, &value)) != *not
                }
                Statement::In { fields, set } => {
                    fields.iter().all(|field| !is_other_family(*field, &way))
                        && (self.found(fields, set, &way).is_some() || self.is_remembered(set, &way))
                }
                Statement::SourceIsLocal => self.machine.local.contains(&way.packet.from),
                Statement::DestinationIsLocal => self.machine.local.contains(&way.packet.to.ip()),
                Statement::New => true,
                Statement::Known => false,
                Statement::Redirected => way.redirected,
                Statement::Marked(bit) => way.mark & bit != 0,
                Statement::Mark(bit) => {
                    way.mark |= bit;
                    true
                }
                Statement::Unmark(bit) => {
                    way.mark ^= bit;
                    true
                }
                Statement::Remember { set, .. } => {
                    way.remembered.push(set.clone());
                    true
                }
                Statement::Lookup { fields, map } => match self.found(fields, map, &way) {
                    Some(Some(verdict)) => return self.verdict(verdict, way, depth),
                    _ => true,
                },
                Statement::Verdict(verdict) => return self.verdict(verdict, way, depth),
                Statement::Pick(verdicts) => {
                    let go = |verdict| self.verdict(verdict, way.clone(), depth);
                    return verdicts.iter().flat_map(go).collect();
                }
                Statement::Redirect(to) => {
                    let go = |to: &SocketAddr| {
                        let packet = Packet { to: *to, ..way.packet.clone() };
                        (Way { packet, redirected: true, ..way.clone() }, Some(End::Accepted))
                    };
                    return to.iter().map(go).collect();
                }
                Statement::Masquerade => {
                    way.masqueraded = true;
                    return vec![(way, Some(End::Accepted))];
                }
                Statement::Reject => return vec![(way, Some(End::Rejected))],
            };
            if !goes_on {
                break;
            }
        }
        vec![(way, None)]
    }

    fn verdict(&self, verdict: &Verdict, way: Way, depth: usize) -> Vec<(Way, Option<End>)> {
        match verdict {
            Verdict::Accept => vec![(way, Some(End::Accepted))],
            Verdict::Drop => vec![(way, Some(End::Dropped))],
            Verdict::Return => vec![(way, Some(End::Through))],
            Verdict::Goto(chain) => {
                self.chain(chain, way, depth + 1).into_iter().map(|(way, end)| (way, Some(end))).collect()
            }
            Verdict::Jump(chain) => {
                let back = |(way, end)| match end {
                    End::Through => (way, None),
                    end => (way, Some(end)),
                };
                self.chain(chain, way, depth + 1).into_iter().map(back).collect()
            }
        }
    }

    /// Where the packet's element of a set leads, if there is one.
    fn found(&self, fields: &[Field], set: &str, way: &Way) -> Option<Option<&Verdict>> {
        let values: Vec<Atom> = fields.iter().map(|field| self.value(*field, way)).collect();
        let is_it =
            |key: &[Atom]| key.len() == values.len() && key.iter().zip(&values).all(|(a, v)| matches(a, v));
        self.rules.elements(set).find(|(key, _)| is_it(key)).map(|(_, verdict)| verdict)
    }

    fn is_remembered(&self, set: &str, way: &Way) -> bool {
        self.machine.remembered.get(set).is_some_and(|sources| sources.contains(&way.packet.from))
    }

    fn value(&self, field: Field, way: &Way) -> Atom {
        match field {
            Field::Source(_) => Atom::Address(way.packet.from),
            Field::Destination(_) => Atom::Address(way.packet.to.ip()),
            Field::Proto => Atom::Proto(way.packet.proto),
            Field::DestinationPort => Atom::Port(way.packet.to.port()),
            Field::Family => Atom::Family(Ip::of(way.packet.to.ip())),
            // What is received comes by some link that no rule has a name for.
            Field::Link => Atom::Link(if way.packet.own { "lo" } else { "" }),
        }
    }
}

/// Asking for addresses of one family asks for that family.
fn is_other_family(field: Field, way: &Way) -> bool {
    match field {
        Field::Source(ip) | Field::Destination(ip) => ip != Ip::of(way.packet.to.ip()),
        _ => false,
    }
}

fn matches(atom: &Atom, value: &Atom) -> bool {
    match (atom, value) {
        (Atom::Net(net), Atom::Address(address)) => net.contains(*address),
        (Atom::Ports(from, to), Atom::Port(port)) => (from..=to).contains(&port),
        (atom, value) => atom == value,
    }
}
