//! Renders a batch as input for `nft -f`.

use std::fmt::Write as _;
use std::net::SocketAddr;

use crate::{
    BaseChain, Batch, ChainType, Command, DataType, Field, Hook, IpFamily, Key, MatchValue, Rule, Set,
    Statement, Verdict,
};

/// Renders the batch for the table `inet <table>`.
pub fn render(table: &str, batch: &Batch) -> String {
    let mut out = String::new();
    for command in &batch.commands {
        render_command(table, command, &mut out);
    }
    out
}

// Writing to a String cannot fail, so the results of `write!` are ignored in this module.
fn render_command(table: &str, command: &Command, out: &mut String) {
    let _ = match command {
        Command::RecreateTable => {
            writeln!(out, "add table inet {table}\ndelete table inet {table}\nadd table inet {table}")
        }
        Command::DeleteTable => writeln!(out, "add table inet {table}\ndelete table inet {table}"),
        Command::AddSet(name, set) => {
            writeln!(out, "add {} inet {table} {name} {}", set_keyword(set), set_text(set))
        }
        Command::AddChain(name, None) => writeln!(out, "add chain inet {table} {name}"),
        Command::AddChain(name, Some(base)) => {
            writeln!(out, "add chain inet {table} {name} {}", base_text(base))
        }
        Command::FlushChain(name) => writeln!(out, "flush chain inet {table} {name}"),
        Command::AddRule(chain, rule) => writeln!(out, "add rule inet {table} {chain} {}", rule_text(rule)),
        Command::AddElements(set, elements) => {
            writeln!(out, "add element inet {table} {set} {{ {} }}", elements_text(elements, true))
        }
        Command::DeleteElements(set, elements) => {
            writeln!(out, "delete element inet {table} {set} {{ {} }}", elements_text(elements, false))
        }
        Command::DeleteChain(name) => writeln!(out, "delete chain inet {table} {name}"),
        Command::DeleteSet(name) => writeln!(out, "delete set inet {table} {name}"),
    };
}

fn set_keyword(set: &Set) -> &'static str {
    if set.is_verdict_map { "map" } else { "set" }
}

fn set_text(set: &Set) -> String {
    let types: Vec<&str> = set
        .key
        .iter()
        .map(|key| match key {
            DataType::V4 => "ipv4_addr",
            DataType::V6 => "ipv6_addr",
            DataType::Proto => "inet_proto",
            DataType::Port => "inet_service",
        })
        .collect();
    let verdict = if set.is_verdict_map { " : verdict" } else { "" };
    let mut text = format!("{{ type {}{verdict} ;", types.join(" . "));
    if set.ranges {
        text.push_str(" flags interval ;");
    }
    if let Some(seconds) = set.timeout_seconds {
        let _ = write!(text, " flags dynamic,timeout ; timeout {seconds}s ;");
    }
    text + " }"
}

fn base_text(base: &BaseChain) -> String {
    let kind = match base.chain_type {
        ChainType::Filter => "filter",
        ChainType::Nat => "nat",
    };
    let hook = match base.hook {
        Hook::Prerouting => "prerouting",
        Hook::Input => "input",
        Hook::Forward => "forward",
        Hook::Output => "output",
        Hook::Postrouting => "postrouting",
    };
    format!("{{ type {kind} hook {hook} priority {} ; }}", base.priority)
}

fn elements_text(elements: &[(Key, Option<Verdict>)], with_verdict: bool) -> String {
    let text = |(key, verdict): &(Key, Option<Verdict>)| match verdict {
        Some(verdict) if with_verdict => format!("{} : {}", key_text(key), verdict_text(verdict)),
        _ => key_text(key),
    };
    elements.iter().map(text).collect::<Vec<_>>().join(", ")
}

fn key_text(key: &Key) -> String {
    key.iter().map(value_text).collect::<Vec<_>>().join(" . ")
}

fn value_text(atom: &MatchValue) -> String {
    match atom {
        MatchValue::Address(address) => address.to_string(),
        MatchValue::Net(net) => net.to_string(),
        MatchValue::Proto(proto) => proto.name().to_owned(),
        MatchValue::Port(port) => port.to_string(),
        MatchValue::Ports(from, to) => format!("{from}-{to}"),
        MatchValue::Family(IpFamily::V4) => "ipv4".to_owned(),
        MatchValue::Family(IpFamily::V6) => "ipv6".to_owned(),
        MatchValue::Link(name) => format!("{name:?}"),
    }
}

fn field_text(field: &Field) -> &'static str {
    match field {
        Field::Source(IpFamily::V4) => "ip saddr",
        Field::Source(IpFamily::V6) => "ip6 saddr",
        Field::Destination(IpFamily::V4) => "ip daddr",
        Field::Destination(IpFamily::V6) => "ip6 daddr",
        Field::Proto => "meta l4proto",
        Field::DestinationPort => "th dport",
        Field::Family => "meta nfproto",
        Field::Link => "iifname",
    }
}

fn fields_text(fields: &[Field]) -> String {
    fields.iter().map(field_text).collect::<Vec<_>>().join(" . ")
}

fn verdict_text(verdict: &Verdict) -> String {
    match verdict {
        Verdict::Accept => "accept".to_owned(),
        Verdict::Drop => "drop".to_owned(),
        Verdict::Return => "return".to_owned(),
        Verdict::Jump(chain) => format!("jump {chain}"),
        Verdict::Goto(chain) => format!("goto {chain}"),
    }
}

/// Renders a rule in `nft` syntax.
pub fn rule_text(rule: &Rule) -> String {
    rule.iter().map(statement_text).collect::<Vec<_>>().join(" ")
}

fn statement_text(part: &Statement) -> String {
    match part {
        Statement::Match { field: what, not, any } => {
            let not = if *not { " !=" } else { "" };
            match any.as_slice() {
                [one] => format!("{}{not} {}", field_text(what), value_text(one)),
                several => {
                    let values: Vec<String> = several.iter().map(value_text).collect();
                    format!("{}{not} {{ {} }}", field_text(what), values.join(", "))
                }
            }
        }
        Statement::InSet { fields: what, set } => format!("{} @{set}", fields_text(what)),
        Statement::SourceIsLocal => "fib saddr type local".to_owned(),
        Statement::DestinationIsLocal => "fib daddr type local".to_owned(),
        Statement::StateNew => "ct state new".to_owned(),
        Statement::StateEstablished => "ct state established,related".to_owned(),
        Statement::IsDnat => "ct status dnat".to_owned(),
        Statement::HasMark(bit) => format!("meta mark and {bit:#x} != 0"),
        Statement::SetMark(bit) => format!("meta mark set meta mark or {bit:#x}"),
        Statement::ClearMark(bit) => format!("meta mark set meta mark xor {bit:#x}"),
        Statement::Lookup { fields: what, map } => format!("{} vmap @{map}", fields_text(what)),
        Statement::RandomVerdict(verdicts) => {
            let rows =
                verdicts.iter().enumerate().map(|(n, verdict)| format!("{n} : {}", verdict_text(verdict)));
            format!("numgen random mod {} vmap {{ {} }}", verdicts.len(), rows.collect::<Vec<_>>().join(", "))
        }
        Statement::Dnat(to) => dnat_text(to),
        Statement::Masquerade => "masquerade fully-random".to_owned(),
        Statement::AddSourceToSet { set, ip } => {
            format!("update @{set} {{ {} }}", field_text(&Field::Source(*ip)))
        }
        Statement::Verdict(verdict) => verdict_text(verdict),
        Statement::Reject => "reject".to_owned(),
    }
}

fn dnat_text(to: &[SocketAddr]) -> String {
    let family = if to.first().is_some_and(SocketAddr::is_ipv6) { "ip6" } else { "ip" };
    match to {
        [one] => format!("dnat {family} to {one}"),
        several => {
            let row = |(n, to): (usize, &SocketAddr)| format!("{n} : {} . {}", to.ip(), to.port());
            let rows: Vec<String> = several.iter().enumerate().map(row).collect();
            let count = several.len();
            format!("dnat {family} addr . port to numgen random mod {count} map {{ {} }}", rows.join(", "))
        }
    }
}
