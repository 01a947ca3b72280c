//! Tables of other programs: detects chains that drop packets of pods, and encodes rules that accept
//! these packets.
//!
//! A packet passes the base chains of all tables, and each of them can drop it, whatever the others
//! decide. If Docker, ufw or firewalld drops, the accepting rule must be in its own chain.
//! [`plan_chain`] decides; [`accept`] and [`remove`] encode. The rules are restricted to what iptables
//! can list. Does no I/O: `proxy::host_firewall` applies the batches.

mod parse;

use std::fmt;

use crate::netlink::{BATCH_BEGIN, BATCH_END, SUBSYS_NFTABLES, expressions, message};
use crate::wire::{APPEND, CREATE, DUMP, Writer};
use crate::{Field, Hook, IpFamily, IpNet, MatchValue, Statement, Verdict};
pub use parse::{chain, rule};

/// The comment of our jump rules in tables of other programs, as a userdata TLV.
const COMMENT: &[u8] = b"\x00\x06skiff\x00";

/// The address family of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    Inet,
    Ip,
    Ip6,
}

impl Family {
    fn number(self) -> u8 {
        match self {
            Family::Inet => crate::netlink::INET,
            Family::Ip => 2,
            Family::Ip6 => 10,
        }
    }

    pub(crate) fn of(number: u8) -> Option<Family> {
        [Family::Inet, Family::Ip, Family::Ip6].into_iter().find(|family| family.number() == number)
    }

    /// The family of the object that an nftables message describes.
    pub fn of_message(message: &crate::wire::Message<'_>) -> Option<Family> {
        Family::of(message.family()?)
    }

    fn name(self) -> &'static str {
        match self {
            Family::Inet => "inet",
            Family::Ip => "ip",
            Family::Ip6 => "ip6",
        }
    }

    fn has(self, net: &IpNet) -> bool {
        match self {
            Family::Inet => true,
            Family::Ip => !net.is_v6(),
            Family::Ip6 => net.is_v6(),
        }
    }
}

/// A chain of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    pub family: Family,
    pub table: String,
    pub name: String,
    /// Set only for base chains of type filter.
    pub hook: Option<Hook>,
    /// Whether the policy of the base chain is drop.
    pub policy_drops: bool,
}

/// A rule of a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    pub handle: u64,
    pub expressions: Vec<Expression>,
}

/// An expression of a rule, as far as the analysis needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expression {
    /// Matches if these bytes of the network header, after applying the mask, equal the value.
    NetworkHeader {
        offset: u32,
        mask: Vec<u8>,
        value: Vec<u8>,
    },
    /// Matches packets of this family.
    Family(IpFamily),
    /// Any other condition.
    OtherMatch,
    /// A counter or log expression, which does not affect the verdict.
    NonTerminal,
    Verdict(Verdict),
    Reject,
}

/// A chain of another program that drops packets of pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DroppingChain {
    pub chain: Chain,
    /// The handle of the rule that drops; `None` if the chain's policy does.
    pub handle: Option<u64>,
}

impl fmt::Display for Chain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "table {} {}, chain {}", self.family.name(), self.table, self.name)
    }
}

impl fmt::Display for DroppingChain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.chain)?;
        match self.handle {
            Some(handle) => write!(f, "the rule with handle {handle} drops packets of pods"),
            None => write!(f, "the policy drops packets of pods"),
        }
    }
}

/// What to do with a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChainAction {
    /// Packets of pods are accepted already, or nothing drops them.
    Nothing,
    /// The accepting rules must be added.
    Accept { has_jump: bool },
    /// The chain drops, but belongs to no known program, so it must not be modified.
    Report(DroppingChain),
}

impl Chain {
    /// Whether this is a filter chain outside our table that pod traffic passes.
    pub fn is_filter(&self, own_table: &str) -> bool {
        let is_own = self.family == Family::Inet && self.table == own_table;
        matches!(self.hook, Some(Hook::Input | Hook::Forward)) && !is_own
    }

    /// Whether the chain belongs to iptables (and so to Docker or ufw) or to firewalld.
    fn is_known(&self) -> bool {
        match self.family {
            Family::Ip | Family::Ip6 => self.table == "filter" && ["FORWARD", "INPUT"].contains(&&*self.name),
            Family::Inet => {
                self.table == "firewalld" && ["filter_FORWARD", "filter_INPUT"].contains(&&*self.name)
            }
        }
    }

    /// The name of our accepting chain in the same table.
    pub fn accept_chain_name(&self) -> &'static str {
        if self.hook == Some(Hook::Forward) { "SKIFF-FORWARD" } else { "SKIFF-INPUT" }
    }
}

/// Decides what to do with a chain that has these rules. `has_chain`: our accepting chain exists in the
/// same table.
pub fn plan_chain(chain: &Chain, rules: &[Rule], has_chain: bool, pods: &[IpNet]) -> ChainAction {
    let accept_jump = Expression::Verdict(Verdict::Jump(chain.accept_chain_name().into()));
    let has_jump = rules.iter().any(|rule| rule.expressions.contains(&accept_jump));
    let Some(dropping) = find_drop(chain, rules, pods) else { return ChainAction::Nothing };
    match (chain.is_known(), has_jump && has_chain) {
        (true, true) => ChainAction::Nothing,
        (true, false) => ChainAction::Accept { has_jump },
        (false, _) => ChainAction::Report(dropping),
    }
}

/// What in a chain may drop packets of pods. In chains of known programs every rule counts, because it
/// may jump to many others that are not analyzed.
fn find_drop(chain: &Chain, rules: &[Rule], pods: &[IpNet]) -> Option<DroppingChain> {
    let mut left: Vec<&IpNet> = pods.iter().filter(|net| chain.family.has(net)).collect();
    let found = |handle| Some(DroppingChain { chain: chain.clone(), handle });
    for rule in rules {
        if chain.is_known() || rule.drops_everything() {
            return if left.is_empty() { None } else { found(Some(rule.handle)) };
        }
        left.retain(|net| !rule.accepts(net));
    }
    if left.is_empty() || !chain.policy_drops { None } else { found(None) }
}

impl Rule {
    fn drops_everything(&self) -> bool {
        let is_drop =
            |part: &Expression| matches!(part, Expression::Reject | Expression::Verdict(Verdict::Drop));
        self.expressions.iter().all(|part| is_drop(part) || *part == Expression::NonTerminal)
            && self.expressions.iter().any(is_drop)
    }

    /// Whether the rule accepts all packets from this network.
    fn accepts(&self, net: &IpNet) -> bool {
        let accept = Expression::Verdict(Verdict::Accept);
        self.expressions.contains(&accept)
            && self.expressions.iter().all(|part| match part {
                Expression::NonTerminal => true,
                Expression::Family(ip) => *ip == IpFamily::of(net.first()),
                Expression::NetworkHeader { offset, mask, value } => is_source(net, *offset, mask, value),
                other => *other == accept,
            })
    }
}

/// Whether the compared bytes are the source address and match every address of the network.
fn is_source(net: &IpNet, offset: u32, mask: &[u8], value: &[u8]) -> bool {
    let (expected, bytes) = match net.first() {
        std::net::IpAddr::V4(first) => (12, first.octets().to_vec()),
        std::net::IpAddr::V6(first) => (8, first.octets().to_vec()),
    };
    let length: u32 = mask.iter().map(|byte| byte.count_ones()).sum();
    offset == expected
        && length <= u32::from(net.bits())
        && mask.iter().zip(value).zip(&bytes).all(|((mask, value), byte)| byte & mask == *value)
}

/// Encodes a request for all chains.
pub fn list_chains() -> Vec<u8> {
    let mut out = Writer::starting_at(1);
    out.message(SUBSYS_NFTABLES << 8 | message::GET_CHAIN, DUMP, (0, 0), |_| {});
    out.bytes
}

/// Encodes a request for the rules of a chain.
pub fn list_rules(chain: &Chain) -> Vec<u8> {
    let mut out = Writer::starting_at(1);
    out.message(SUBSYS_NFTABLES << 8 | message::GET_RULE, DUMP, (chain.family.number(), 0), |out| {
        out.text(1, &chain.table);
        out.text(2, &chain.name);
    });
    out.bytes
}

/// Encodes a batch that accepts packets of pods in a chain. `has_jump`: the chain jumps to our
/// accepting chain already.
pub fn accept(chain: &Chain, has_jump: bool, pods: &[IpNet], masquerade: u32) -> crate::netlink::Encoded {
    let own = chain.accept_chain_name();
    batch(|out| {
        let mut message = |kind: u16, flags: u16, fill: &dyn Fn(&mut Writer)| {
            out.message(SUBSYS_NFTABLES << 8 | kind, flags, (chain.family.number(), 0), |out| {
                out.text(1, &chain.table);
                fill(out);
            });
        };
        message(message::NEW_CHAIN, CREATE, &|out| out.text(3, own));
        message(message::DELETE_RULE, 0, &|out| out.text(2, own));
        for statements in accept_rules(chain, pods, masquerade) {
            let expressions = expressions(chain.family.number(), &statements);
            message(message::NEW_RULE, CREATE | APPEND, &|out| {
                out.text(2, own);
                out.nested(4, |out| out.bytes.extend(&expressions));
            });
        }
        if !has_jump {
            let jump = expressions(chain.family.number(), &[Statement::jump(&own.into())]);
            // Inserted at the beginning of the chain, before any rule that may drop.
            message(message::NEW_RULE, CREATE, &|out| {
                out.text(2, &chain.name);
                out.nested(4, |out| out.bytes.extend(&jump));
                out.attribute(7, COMMENT);
            });
        }
    })
}

/// The rules of our accepting chain. Input: packets from pods. Forward: packets from and to pods, and
/// packets that were marked for masquerading because of a Service.
fn accept_rules(chain: &Chain, pods: &[IpNet], masquerade: u32) -> Vec<crate::Rule> {
    let is_forward = chain.hook == Some(Hook::Forward);
    let mut rules = Vec::new();
    for net in pods.iter().filter(|net| chain.family.has(net)) {
        let ip = IpFamily::of(net.first());
        let mut fields = vec![Field::Source(ip)];
        fields.extend(is_forward.then_some(Field::Destination(ip)));
        for field in fields {
            rules.push(crate::rule([Statement::equals(field, MatchValue::Net(*net)), Statement::accept()]));
        }
    }
    if is_forward {
        rules.push(crate::rule([Statement::HasMark(masquerade), Statement::accept()]));
    }
    rules
}

/// Encodes a batch that removes our jump rules from a chain and, if `has_chain`, deletes our accepting
/// chain.
pub fn remove(chain: &Chain, rules: &[Rule], has_chain: bool) -> Option<crate::netlink::Encoded> {
    let own = chain.accept_chain_name();
    let jump = Expression::Verdict(Verdict::Jump(own.into()));
    let jump_handles: Vec<u64> =
        rules.iter().filter(|rule| rule.expressions.contains(&jump)).map(|rule| rule.handle).collect();
    if jump_handles.is_empty() && !has_chain {
        return None;
    }
    Some(batch(|out| {
        let mut message = |kind: u16, fill: &dyn Fn(&mut Writer)| {
            out.message(SUBSYS_NFTABLES << 8 | kind, 0, (chain.family.number(), 0), |out| {
                out.text(1, &chain.table);
                fill(out);
            });
        };
        for handle in jump_handles {
            message(message::DELETE_RULE, &|out| {
                out.text(2, &chain.name);
                out.u64(3, handle);
            });
        }
        if has_chain {
            message(message::DELETE_RULE, &|out| out.text(2, own));
            message(message::DELETE_CHAIN, &|out| out.text(3, own));
        }
    }))
}

fn batch(fill: impl FnOnce(&mut Writer)) -> crate::netlink::Encoded {
    let mut out = Writer::starting_at(1);
    out.message(BATCH_BEGIN, 0, (0, SUBSYS_NFTABLES), |_| {});
    fill(&mut out);
    // Kernels before 6.10 do not acknowledge the end of a batch, but the last message in it.
    let last = out.request_ack();
    out.message(BATCH_END, 0, (0, SUBSYS_NFTABLES), |_| {});
    crate::netlink::Encoded { bytes: out.bytes, first: 1, last }
}

#[cfg(test)]
mod tests;
