//! Seccomp filters of containers: the default profile, and `Localhost` profiles in OCI and docker
//! format.
//!
//! The kernel runs a filter before every syscall, so filters are kept short: adjacent syscalls with the
//! same action form one range, and ranges are found by binary search. Pure.

mod arch;
mod compat_syscalls;
mod program;
mod table;

use serde::Deserialize;
use sys::seccomp::SockFilter;

use arch::Arch;
use program::{Action, Condition, Rule};
use table::{ALLOWED, ALLOWED_32, BY_CAPABILITY};

const EPERM: u16 = 1;
const ENOSYS: u16 = 38;
/// The flags of `clone` that create namespaces.
const NAMESPACES: u64 = 0x7e02_0000;
/// `AF_VSOCK`: sockets to the hypervisor of this machine.
const VSOCK: u64 = 40;
/// `AF_ALG`: the kernel's crypto API, rarely needed and with a history of vulnerabilities.
const ALG: u64 = 38;
/// The allowed arguments of `personality`: `PER_LINUX`, `PER_LINUX32`, both with `UNAME26`, and the
/// query value.
const ALLOWED_PERSONALITY_VALUES: [u64; 5] = [0, 0x0008, 0x2_0000, 0x2_0008, 0xffff_ffff];
pub(crate) const SYS_ADMIN: u8 = 21;

/// A rule that names its syscall.
#[derive(Clone, Debug)]
struct NamedRule {
    name: String,
    action: Action,
    conditions: Vec<Condition>,
}

impl NamedRule {
    fn new(name: &str, conditions: Vec<Condition>, action: Action) -> NamedRule {
        NamedRule { name: name.to_owned(), action, conditions }
    }
}

/// The default profile of containers; capabilities allow more syscalls. Programs of all architectures
/// that run here get the same rules, with their own syscall numbers.
pub fn default_filter(capabilities: &[u8]) -> Vec<SockFilter> {
    let allow = |name: &&str| NamedRule::new(name, vec![], Action::Allow);
    let mut rules: Vec<NamedRule> = ALLOWED.iter().chain(ALLOWED_32).map(allow).collect();
    for (_, names) in BY_CAPABILITY.iter().filter(|(capability, _)| capabilities.contains(capability)) {
        rules.extend(names.iter().map(allow));
    }
    let sockets = vec![Condition::not_equal(0, VSOCK), Condition::not_equal(0, ALG)];
    rules.push(NamedRule::new("socket", sockets, Action::Allow));
    for value in ALLOWED_PERSONALITY_VALUES {
        rules.push(NamedRule::new("personality", vec![Condition::equal(0, value)], Action::Allow));
    }
    if !capabilities.contains(&SYS_ADMIN) {
        rules.push(NamedRule::new("clone", vec![Condition::masked(0, NAMESPACES, 0)], Action::Allow));
        // The flags of clone3 are behind a pointer, which a filter cannot read. On ENOSYS programs fall
        // back to clone.
        rules.push(NamedRule::new("clone3", vec![], Action::Errno(ENOSYS)));
    }
    let machines: Vec<Arch> = Arch::ALL.iter().map(|(_, machine)| *machine).collect();
    build_filter(&rules, &machines, Action::Errno(EPERM))
}

/// Compiles rules for the given architectures. Syscalls that an architecture does not have are skipped.
fn build_filter(rules: &[NamedRule], machines: &[Arch], default: Action) -> Vec<SockFilter> {
    let of = |machine: &Arch| {
        let rule = |named: &NamedRule| {
            let number = machine.syscall_number(&named.name)?;
            Some(Rule { number, action: named.action, conditions: named.conditions.clone() })
        };
        (*machine, rules.iter().filter_map(rule).collect())
    };
    let machines: Vec<(Arch, Vec<Rule>)> = machines.iter().map(of).collect();
    program::build_program(&machines, default)
}

/// A seccomp profile in OCI or docker format.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Profile {
    default_action: String,
    #[serde(default)]
    default_errno_ret: Option<u16>,
    /// The architectures it applies to, in addition to the native one.
    #[serde(default)]
    architectures: Option<Vec<String>>,
    /// The same by native architecture, as docker writes it.
    #[serde(default)]
    arch_map: Option<Vec<ArchMapEntry>>,
    #[serde(default)]
    syscalls: Vec<SyscallEntry>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ArchMapEntry {
    architecture: String,
    #[serde(default)]
    sub_architectures: Option<Vec<String>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SyscallEntry {
    #[serde(default)]
    names: Vec<String>,
    action: String,
    #[serde(default)]
    errno_ret: Option<u16>,
    #[serde(default)]
    args: Option<Vec<Argument>>,
    #[serde(default)]
    includes: Filter,
    #[serde(default)]
    excludes: Filter,
}

/// Conditions for an entry to apply. Empty lists always match.
#[derive(Debug, Default, Deserialize)]
struct Filter {
    #[serde(default)]
    caps: Vec<String>,
    #[serde(default)]
    arches: Vec<String>,
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

/// Compiles a profile from a file.
pub fn from_profile(text: &[u8], capabilities: &[u8]) -> Result<Vec<SockFilter>, String> {
    let profile: Profile = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    let default = action(&profile.default_action, profile.default_errno_ret)?;
    let mut rules = Vec::new();
    for entry in &profile.syscalls {
        let has = |name: &String| {
            super::capability::number(name).is_some_and(|number| capabilities.contains(&number))
        };
        let here = |arches: &[String]| arches.iter().any(|arch| arch == arch::GO);
        let is_in = entry.includes.arches.is_empty() || here(&entry.includes.arches);
        let is_out = here(&entry.excludes.arches) || entry.excludes.caps.iter().any(has);
        if !is_in || is_out || !entry.includes.caps.iter().all(has) {
            continue;
        }
        let action = action(&entry.action, entry.errno_ret)?;
        // A rule with the default action has no effect of its own, but would shadow later rules for the
        // same syscall.
        if action == default {
            continue;
        }
        let conditions: Vec<Condition> =
            entry.args.iter().flatten().map(condition).collect::<Result<_, _>>()?;
        // As in runc: if several conditions are on the same argument, the conditions of the entry are
        // alternatives.
        let is_twice = conditions.iter().enumerate().any(|(at, one)| one.same_argument(&conditions[..at]));
        let each = if is_twice { conditions.chunks(1).collect() } else { vec![&conditions[..]] };
        for name in &entry.names {
            rules.extend(each.iter().map(|conditions| NamedRule::new(name, conditions.to_vec(), action)));
        }
    }
    // Rules without conditions take precedence over rules with conditions for the same syscall.
    rules.sort_by_key(|rule| !rule.conditions.is_empty());
    Ok(build_filter(&rules, &machines(&profile)?, default))
}

/// The architectures a profile applies to: always the native one, plus those it names.
fn machines(profile: &Profile) -> Result<Vec<Arch>, String> {
    let plain = profile.architectures.as_deref().unwrap_or_default();
    let map = profile.arch_map.as_deref().unwrap_or_default();
    if !plain.is_empty() && !map.is_empty() {
        return Err("both 'architectures' and 'archMap' are specified".to_owned());
    }
    let families = map.iter().filter(|family| Arch::is_native_name(&family.architecture));
    let more = families.flat_map(|family| family.sub_architectures.iter().flatten());
    let mut machines = vec![Arch::Own];
    for name in plain.iter().chain(more) {
        machines.extend(Arch::from_name(name)?.filter(|machine| !machines.contains(machine)));
    }
    Ok(machines)
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
        return Err(format!("invalid syscall argument index {}", argument.index));
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
