//! The words rules are made of: what we need of nftables, no more.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use crate::Net;

/// The name of a chain or a set: letters, digits, `/`, `-`, `_` and `.`, beginning with a letter.
pub type Name = Arc<str>;
/// What an element of a set is found by; one atom for each field.
pub type Key = Vec<Atom>;
/// One rule: its statements are done in order, until one does not match or decides.
pub type Rule = Vec<Statement>;

/// A family of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Ip {
    V4,
    V6,
}

impl Ip {
    pub const BOTH: [Ip; 2] = [Ip::V4, Ip::V6];

    pub fn of(address: IpAddr) -> Ip {
        if address.is_ipv6() { Ip::V6 } else { Ip::V4 }
    }

    /// The type of its addresses.
    pub fn address(self) -> Type {
        match self {
            Ip::V4 => Type::V4,
            Ip::V6 => Type::V6,
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
    Source(Ip),
    Destination(Ip),
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
pub enum Atom {
    Address(IpAddr),
    Net(Net),
    Proto(Proto),
    Port(u16),
    /// From and to, both included.
    Ports(u16, u16),
    Family(Ip),
    /// Of 15 bytes at most.
    Link(&'static str),
}

/// The type of a field of a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Type {
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
    Is {
        field: Field,
        not: bool,
        any: Vec<Atom>,
    },
    /// Goes on if the fields together are an element of a set.
    In {
        fields: Vec<Field>,
        set: Name,
    },
    /// Goes on if the address is one of this machine's.
    SourceIsLocal,
    DestinationIsLocal,
    /// Goes on if the connection is not known yet.
    New,
    /// Goes on if the connection is known, or belongs to one that is.
    Known,
    /// Goes on if the connection's destination was changed.
    Redirected,
    /// Goes on if a bit of the mark is set.
    Marked(u32),
    /// Sets a bit of the mark.
    Mark(u32),
    /// Clears a bit of the mark that is set.
    Unmark(u32),
    /// Goes where a map says, or on if it says nothing.
    Lookup {
        fields: Vec<Field>,
        map: Name,
    },
    /// Goes to one of these at random, all alike.
    Pick(Vec<Verdict>),
    /// Changes the destination to one of these at random, all alike, and accepts. The rule must have asked for a
    /// protocol before.
    Redirect(Vec<SocketAddr>),
    /// Changes the source to this machine's address on the way out, and accepts.
    Masquerade,
    /// Puts the source into a set, or renews it there.
    Remember {
        set: Name,
        ip: Ip,
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
    pub fn is(field: Field, value: Atom) -> Statement {
        Statement::Is { field, not: false, any: vec![value] }
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
pub enum Kind {
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
pub struct Base {
    pub kind: Kind,
    pub hook: Hook,
    pub priority: i32,
}

/// What a set is like, apart from its elements.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Set {
    pub key: Vec<Type>,
    /// Elements lead somewhere.
    pub verdicts: bool,
    /// Elements may be networks and ranges.
    pub ranges: bool,
    /// Packets add elements, which stay for this many seconds.
    pub seconds: Option<u32>,
}

impl Set {
    pub fn plain(key: &[Type]) -> Set {
        Set { key: key.into(), verdicts: false, ranges: false, seconds: None }
    }

    pub fn verdicts(key: &[Type]) -> Set {
        Set { verdicts: true, ..Set::plain(key) }
    }
}

/// A part of the table: what one owner asks for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fragment {
    pub bases: BTreeMap<Name, Base>,
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

    pub fn base(&mut self, name: &Name, base: Base, rules: Vec<Rule>) {
        self.bases.insert(name.clone(), base);
        self.chain(name, rules);
    }

    pub fn set(&mut self, name: &Name, set: Set) {
        self.sets.insert(name.clone(), set);
    }

    pub fn element(&mut self, set: &Name, key: Key, verdict: Option<Verdict>) {
        self.elements.insert((set.clone(), key), verdict);
    }
}
