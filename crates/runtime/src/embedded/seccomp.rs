//! Filters of system calls for containers: the profile every runtime calls its default, and profiles from files.
//!
//! A filter is a program the kernel runs before every call, so it is made short: calls with the same answer that are
//! next to each other are one range, and ranges are searched by halves. Pure.

mod program;
mod table;

use serde::Deserialize;
use sys::seccomp::Instruction;

use program::{Action, Condition, Rule};
use table::{ALLOWED, BY_CAPABILITY, number};

const EPERM: u16 = 1;
const ENOSYS: u16 = 38;
/// The flags of `clone` that make namespaces.
const NAMESPACES: u64 = 0x7e02_0000;
/// `AF_VSOCK`: sockets to the machine that runs this one.
const VSOCK: u64 = 40;
/// `AF_ALG`: the kernel's cryptography, which few need and which had holes.
const ALG: u64 = 38;
/// Linux as it is, and as it was.
const PERSONALITIES: [u64; 5] = [0, 0x0008, 0x2_0000, 0x2_0008, 0xffff_ffff];
pub(crate) const SYS_ADMIN: u8 = 21;

/// What containers may call by default, more with more capabilities.
pub fn default_filter(capabilities: &[u8]) -> Vec<Instruction> {
    let allow =
        |name: &&str| number(name).map(|number| Rule { number, action: Action::Allow, conditions: vec![] });
    let mut rules: Vec<Rule> = ALLOWED.iter().filter_map(allow).collect();
    for (_, names) in BY_CAPABILITY.iter().filter(|(capability, _)| capabilities.contains(capability)) {
        rules.extend(names.iter().filter_map(allow));
    }
    let mut when = |name: &str, conditions: Vec<Condition>, action| {
        rules.extend(number(name).map(|number| Rule { number, action, conditions }));
    };
    when("socket", vec![Condition::not_equal(0, VSOCK), Condition::not_equal(0, ALG)], Action::Allow);
    for value in PERSONALITIES {
        when("personality", vec![Condition::equal(0, value)], Action::Allow);
    }
    if !capabilities.contains(&SYS_ADMIN) {
        when("clone", vec![Condition::masked(0, NAMESPACES, 0)], Action::Allow);
        // Its flags are behind a pointer, where no filter sees them; programs then use the call before.
        when("clone3", vec![], Action::Errno(ENOSYS));
    }
    program::assemble(&rules, Action::Errno(EPERM))
}

/// A profile as OCI and docker write them.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Profile {
    default_action: String,
    #[serde(default)]
    default_errno_ret: Option<u16>,
    #[serde(default)]
    syscalls: Vec<Entry>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    #[serde(default)]
    names: Vec<String>,
    action: String,
    #[serde(default)]
    errno_ret: Option<u16>,
    #[serde(default)]
    args: Option<Vec<Argument>>,
    #[serde(default)]
    includes: Capabilities,
    #[serde(default)]
    excludes: Capabilities,
}

#[derive(Debug, Default, Deserialize)]
struct Capabilities {
    #[serde(default)]
    caps: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Argument {
    index: u8,
    value: u64,
    #[serde(default)]
    value_two: u64,
    op: String,
}

/// A filter from a profile in a file.
pub fn from_profile(text: &[u8], capabilities: &[u8]) -> Result<Vec<Instruction>, String> {
    let profile: Profile = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    let default = action(&profile.default_action, profile.default_errno_ret)?;
    let mut rules = Vec::new();
    for entry in &profile.syscalls {
        let has = |name: &String| {
            super::capability::number(name).is_some_and(|number| capabilities.contains(&number))
        };
        if !entry.includes.caps.iter().all(has) || entry.excludes.caps.iter().any(has) {
            continue;
        }
        let action = action(&entry.action, entry.errno_ret)?;
        let conditions: Vec<Condition> =
            entry.args.iter().flatten().map(condition).collect::<Result<_, _>>()?;
        // Names of calls that this kernel or machine does not have mean nothing here.
        for number in entry.names.iter().filter_map(|name| number(name)) {
            rules.push(Rule { number, action, conditions: conditions.clone() });
        }
    }
    Ok(program::assemble(&rules, default))
}

fn action(name: &str, errno: Option<u16>) -> Result<Action, String> {
    Ok(match name {
        "SCMP_ACT_ALLOW" => Action::Allow,
        "SCMP_ACT_ERRNO" => Action::Errno(errno.unwrap_or(EPERM)),
        "SCMP_ACT_KILL" | "SCMP_ACT_KILL_THREAD" => Action::KillThread,
        "SCMP_ACT_KILL_PROCESS" => Action::KillProcess,
        "SCMP_ACT_TRAP" => Action::Trap,
        "SCMP_ACT_LOG" => Action::Log,
        "SCMP_ACT_TRACE" => Action::Trace(errno.unwrap_or(EPERM)),
        _ => return Err(format!("unknown action {name:?}")),
    })
}

fn condition(argument: &Argument) -> Result<Condition, String> {
    if argument.index > 5 {
        return Err(format!("no call has an argument {}", argument.index));
    }
    let (index, value) = (argument.index, argument.value);
    Ok(match argument.op.as_str() {
        "SCMP_CMP_EQ" => Condition::equal(index, value),
        "SCMP_CMP_NE" => Condition::not_equal(index, value),
        "SCMP_CMP_MASKED_EQ" => Condition::masked(index, value, argument.value_two),
        "SCMP_CMP_LT" => Condition::below(index, value),
        "SCMP_CMP_LE" => Condition::not(Condition::above(index, value)),
        "SCMP_CMP_GT" => Condition::above(index, value),
        "SCMP_CMP_GE" => Condition::not(Condition::below(index, value)),
        other => return Err(format!("unknown comparison {other:?}")),
    })
}

#[cfg(test)]
mod tests;
