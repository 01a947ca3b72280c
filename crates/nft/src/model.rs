//! The words rules are made of: what we need of nftables, no more.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use crate::IpNet;

/// The name of a chain or a set: letters, digits, `/`, `-`, `_` and `.`, beginning with a letter.
pub type Name = Arc<str>;
/// What an element of a set is found by; one atom for each field.
pub type Key = Vec<MatchValue>;
/// One rule: its statements are done in order, until one does not match or decides.
pub type Rule = Vec<Statement>;

/// A family of addresses.
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

    /// The type of its addresses.
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

/// What can be asked of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Field {
    Source(IpFamily),
    Destination(IpFamily),
    /// The transport protocol.
    Proto,
    DestinationPort,
    /// The family of the packet.
    Family,
    /// The name of the link that the packet came in by.
    Link,
}

/// One value, or several that lie together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MatchValue {
    Address(IpAddr),
    Net(IpNet),
    Proto(Proto),
    Port(u16),
    /// From and to, both included.
    Ports(u16, u16),
    Family(IpFamily),
    /// Of 15 bytes at most.
    Link(&'static str),
}

/// The type of a field of a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DataType {
    V4,
    V6,
    Proto,
    Port,
}

/// Where a packet goes next.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    Accept,
    Drop,
    Return,
    Jump(Name),
    Goto(Name),
}

/// A part of a rule.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Statement {
    /// Goes on if the field has one of these values, or, with `not`, none of them.
    Match {
        field: Field,
        not: bool,
        any: Vec<MatchValue>,
    },
    /// Goes on if the fields together are an element of a set.
    InSet {
        fields: Vec<Field>,
        set: Name,
    },
    /// Goes on if the address is one of this machine's.
    SourceIsLocal,
    DestinationIsLocal,
    /// Goes on if the connection is not known yet.
    StateNew,
    /// Goes on if the connection is known, or belongs to one that is.
    StateEstablished,
    /// Goes on if the connection's destination was changed.
    IsDnat,
    /// Goes on if a bit of the mark is set.
    HasMark(u32),
    /// Sets a bit of the mark.
    SetMark(u32),
    /// Clears a bit of the mark that is set.
    ClearMark(u32),
    /// Goes where a map says, or on if it says nothing.
    Lookup {
        fields: Vec<Field>,
        map: Name,
    },
    /// Goes to one of these at random, all alike.
    RandomVerdict(Vec<Verdict>),
    /// Changes the destination to one of these at random, all alike, and accepts. The rule must have asked for a
    /// protocol before.
    Dnat(Vec<SocketAddr>),
    /// Changes the source to this machine's address on the way out, and accepts.
    Masquerade,
    /// Puts the source into a set, or renews it there.
    AddSourceToSet {
        set: Name,
        ip: IpFamily,
    },
    Verdict(Verdict),
    /// Drops, and tells the sender.
    Reject,
}

/// Makes a rule, for readability.
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

/// What a base chain does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ChainType {
    Filter,
    Nat,
}

/// Where on its way a packet meets a base chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Hook {
    Prerouting,
    Input,
    Forward,
    Output,
    Postrouting,
}

/// How a chain hangs in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BaseChain {
    pub chain_type: ChainType,
    pub hook: Hook,
    pub priority: i32,
}

/// What a set is like, apart from its elements.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Set {
    pub key: Vec<DataType>,
    /// Elements lead somewhere.
    pub is_verdict_map: bool,
    /// Elements may be networks and ranges.
    pub ranges: bool,
    /// Packets add elements, which stay for this many seconds.
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

/// A part of the table: what one owner asks for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fragment {
    pub base_chains: BTreeMap<Name, BaseChain>,
    pub chains: BTreeMap<Name, Vec<Rule>>,
    pub sets: BTreeMap<Name, Set>,
    /// By set and key, where they lead.
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
