//! The objects of nftables that Skiff uses: chains, sets, rules and their statements.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use crate::IpNet;

/// The name of a chain or a set: letters, digits, `/`, `-`, `_` and `.`, starting with a letter.
pub type Name = Arc<str>;
/// The key of a set element, with one value per field.
pub type Key = Vec<MatchValue>;
/// A rule: statements that are evaluated in order until one does not match or is a verdict.
pub type Rule = Vec<Statement>;

/// An address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum IpFamily {
    V4,
    V6,
}

impl IpFamily {
    pub const ALL: [IpFamily; 2] = [IpFamily::V4, IpFamily::V6];

    pub fn of(address: IpAddr) -> IpFamily {
        if address.is_ipv6() { IpFamily::V6 } else { IpFamily::V4 }
    }

    /// The data type of this family's addresses.
    pub fn address(self) -> DataType {
        match self {
            IpFamily::V4 => DataType::V4,
            IpFamily::V6 => DataType::V6,
        }
    }
}

/// A transport protocol that has ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Proto {
    Tcp,
    Udp,
    Sctp,
}

impl Proto {
    pub fn name(self) -> &'static str {
        match self {
            Proto::Tcp => "tcp",
            Proto::Udp => "udp",
            Proto::Sctp => "sctp",
        }
    }
}

/// A packet field that rules can match.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Field {
    Source(IpFamily),
    Destination(IpFamily),
    /// The transport protocol.
    Proto,
    DestinationPort,
    /// The address family of the packet (`meta nfproto`).
    Family,
    /// The name of the input interface (`iifname`).
    Link,
}

/// A single value, a network or a port range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MatchValue {
    Address(IpAddr),
    Net(IpNet),
    Proto(Proto),
    Port(u16),
    /// First and last port, both inclusive.
    Ports(u16, u16),
    Family(IpFamily),
    /// An interface name of at most 15 bytes.
    Link(&'static str),
}

/// The data type of a set key field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DataType {
    V4,
    V6,
    Proto,
    Port,
}

/// The verdict of a rule or map element.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    Accept,
    Drop,
    Return,
    Jump(Name),
    Goto(Name),
}

/// One statement of a rule.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Statement {
    /// Matches if the field has one of these values, or, with `not`, none of them.
    Match {
        field: Field,
        not: bool,
        any: Vec<MatchValue>,
    },
    /// Matches if the concatenated fields are an element of a set.
    InSet {
        fields: Vec<Field>,
        set: Name,
    },
    /// Matches if the address belongs to this node.
    SourceIsLocal,
    DestinationIsLocal,
    /// Matches packets of new connections.
    StateNew,
    /// Matches packets of established and related connections.
    StateEstablished,
    /// Matches if the destination of the connection was changed (`ct status dnat`).
    IsDnat,
    /// Matches if this bit of the packet mark is set.
    HasMark(u32),
    /// Sets this bit of the packet mark.
    SetMark(u32),
    /// Clears this bit of the packet mark. The bit must be set, because the encoding is XOR.
    ClearMark(u32),
    /// Looks up a verdict map. Without a matching element the rule goes on.
    Lookup {
        fields: Vec<Field>,
        map: Name,
    },
    /// Takes one of these verdicts at random, with equal probability.
    RandomVerdict(Vec<Verdict>),
    /// DNAT to one of these endpoints at random, with equal probability. The rule must match a
    /// transport protocol before.
    Dnat(Vec<SocketAddr>),
    /// Source NAT to the address of the outgoing interface.
    Masquerade,
    /// Adds the source address to a dynamic set, or resets its timeout.
    AddSourceToSet {
        set: Name,
        ip: IpFamily,
    },
    Verdict(Verdict),
    /// Drops the packet and sends an ICMP error to the sender.
    Reject,
}

/// Creates a rule from an array of statements.
pub fn rule<const N: usize>(statements: [Statement; N]) -> Rule {
    statements.into()
}

impl Statement {
    pub fn equals(field: Field, value: MatchValue) -> Statement {
        Statement::Match { field, not: false, any: vec![value] }
    }

    pub fn goto(chain: &Name) -> Statement {
        Statement::Verdict(Verdict::Goto(chain.clone()))
    }

    pub fn jump(chain: &Name) -> Statement {
        Statement::Verdict(Verdict::Jump(chain.clone()))
    }

    pub fn accept() -> Statement {
        Statement::Verdict(Verdict::Accept)
    }

    pub fn drop() -> Statement {
        Statement::Verdict(Verdict::Drop)
    }
}

/// The type of a base chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ChainType {
    Filter,
    Nat,
}

/// The netfilter hook of a base chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Hook {
    Prerouting,
    Input,
    Forward,
    Output,
    Postrouting,
}

/// Type, hook and priority of a base chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BaseChain {
    pub chain_type: ChainType,
    pub hook: Hook,
    pub priority: i32,
}

/// The definition of a set without its elements.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Set {
    pub key: Vec<DataType>,
    /// The set is a verdict map.
    pub is_verdict_map: bool,
    /// Elements may be networks and port ranges (`flags interval`).
    pub ranges: bool,
    /// The set is dynamic: packets add elements, which expire after this many seconds.
    pub timeout_seconds: Option<u32>,
}

impl Set {
    pub fn new(key: &[DataType]) -> Set {
        Set { key: key.into(), is_verdict_map: false, ranges: false, timeout_seconds: None }
    }

    pub fn verdict_map(key: &[DataType]) -> Set {
        Set { is_verdict_map: true, ..Set::new(key) }
    }
}

/// The part of the table that belongs to one owner.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fragment {
    pub base_chains: BTreeMap<Name, BaseChain>,
    pub chains: BTreeMap<Name, Vec<Rule>>,
    pub sets: BTreeMap<Name, Set>,
    /// The elements by set and key. Those of verdict maps have a verdict.
    pub elements: BTreeMap<(Name, Key), Option<Verdict>>,
}

impl Fragment {
    pub fn is_empty(&self) -> bool {
        *self == Fragment::default()
    }

    pub fn chain(&mut self, name: &Name, rules: Vec<Rule>) {
        self.chains.insert(name.clone(), rules);
    }

    pub fn base_chain(&mut self, name: &Name, base: BaseChain, rules: Vec<Rule>) {
        self.base_chains.insert(name.clone(), base);
        self.chain(name, rules);
    }

    pub fn set(&mut self, name: &Name, set: Set) {
        self.sets.insert(name.clone(), set);
    }

    pub fn element(&mut self, set: &Name, key: Key, verdict: Option<Verdict>) {
        self.elements.insert((set.clone(), key), verdict);
    }
}
