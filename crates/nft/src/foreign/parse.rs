//! Parses chains and rules from the kernel's netlink messages.

use super::{Chain, Expression, Family, Rule};
use crate::wire::{Message, attribute, attributes};
use crate::{Hook, IpFamily, Verdict};

/// NFT_PAYLOAD_NETWORK_HEADER.
const NETWORK_HEADER_BASE: u32 = 1;
const CMP_EQUAL: u32 = 0;
const META_FAMILY: u32 = 15;
const DROP_POLICY: u32 = 0;

/// Parses a chain from a dump or a notification.
pub fn chain(message: &Message<'_>) -> Option<Chain> {
    let find = |kind| message.attributes().find(|(found, _)| *found == kind).map(|(_, value)| value);
    let is_filter = find(7).map(text).as_deref() == Some("filter");
    let hook = find(4).and_then(|hook| attribute(hook, 1)).and_then(number).and_then(hook);
    Some(Chain {
        family: Family::of(message.family()?)?,
        table: text(find(1)?),
        name: text(find(3)?),
        hook: hook.filter(|_| is_filter),
        policy_drops: find(5).and_then(number) == Some(DROP_POLICY),
    })
}

/// Parses a rule from a dump.
pub fn rule(message: &Message<'_>) -> Option<Rule> {
    let find = |kind| message.attributes().find(|(found, _)| *found == kind).map(|(_, value)| value);
    let handle = u64::from_be_bytes(find(3)?.try_into().ok()?);
    Some(Rule { handle, expressions: find(4).map(parts).unwrap_or_default() })
}

fn parts(expressions: &[u8]) -> Vec<Expression> {
    let mut parts = Vec::new();
    // What the next comparison refers to: offset and mask in the network header.
    let mut loaded: Option<(u32, Vec<u8>)> = None;
    let mut is_family = false;
    for (_, expression) in attributes(expressions) {
        let name = attribute(expression, 1).map(text).unwrap_or_default();
        let data = attribute(expression, 2).unwrap_or_default();
        let value = |kind| attribute(data, kind).and_then(number);
        match name.as_str() {
            "payload" if value(2) == Some(NETWORK_HEADER_BASE) => {
                let length = usize::try_from(value(4).unwrap_or_default()).unwrap_or_default();
                loaded = value(3).map(|offset| (offset, vec![u8::MAX; length.min(16)]));
            }
            "bitwise" => {
                let mask = attribute(data, 4).and_then(|mask| attribute(mask, 1));
                loaded = loaded.zip(mask).map(|((offset, _), mask)| (offset, mask.to_vec()));
            }
            "cmp" => {
                let compare_value = attribute(data, 3).and_then(|data| attribute(data, 1));
                let is_equal = value(2) == Some(CMP_EQUAL);
                let family =
                    compare_value.and_then(family).filter(|_| std::mem::take(&mut is_family) && is_equal);
                parts.push(match loaded.take().zip(compare_value).filter(|_| is_equal) {
                    Some(((offset, mask), value)) => {
                        Expression::NetworkHeader { offset, mask, value: value.to_vec() }
                    }
                    None => family.map_or(Expression::OtherMatch, Expression::Family),
                });
            }
            "immediate" => parts.push(verdict(data).map_or(Expression::OtherMatch, Expression::Verdict)),
            "reject" => parts.push(Expression::Reject),
            "counter" | "log" => parts.push(Expression::NonTerminal),
            // A load has no effect by itself. The expression that uses its register is the condition.
            "payload" | "meta" | "ct" | "fib" => {
                loaded = None;
                is_family = name == "meta" && value(2) == Some(META_FAMILY);
            }
            _ => parts.push(Expression::OtherMatch),
        }
    }
    parts
}

fn family(value: &[u8]) -> Option<IpFamily> {
    match value {
        [2] => Some(IpFamily::V4),
        [10] => Some(IpFamily::V6),
        _ => None,
    }
}

fn verdict(data: &[u8]) -> Option<Verdict> {
    let verdict = attribute(attribute(data, 2)?, 2)?;
    let chain = || attribute(verdict, 2).map(|name| text(name).into());
    match i32::from_be_bytes(attribute(verdict, 1)?.try_into().ok()?) {
        0 => Some(Verdict::Drop),
        1 => Some(Verdict::Accept),
        -3 => Some(Verdict::Jump(chain()?)),
        -4 => Some(Verdict::Goto(chain()?)),
        -5 => Some(Verdict::Return),
        _ => None,
    }
}

fn hook(number: u32) -> Option<Hook> {
    let all = [Hook::Prerouting, Hook::Input, Hook::Forward, Hook::Output, Hook::Postrouting];
    all.get(usize::try_from(number).ok()?).copied()
}

fn number(bytes: &[u8]) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.try_into().ok()?))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned()
}
