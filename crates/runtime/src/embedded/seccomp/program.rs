//! Compiles rules to a seccomp filter in classic BPF.

use sys::seccomp::SockFilter;

use super::arch::{Arch, X32_SYSCALL_BIT};

const ENOSYS: u16 = 38;

/// The result of a filter for a syscall (`SECCOMP_RET_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Allow,
    Errno(u16),
    KillThread,
    KillProcess,
    Trap,
    Trace(u16),
    Log,
}

/// A rule for one syscall. The first rule whose conditions all hold applies.
#[derive(Clone, Debug)]
pub struct Rule {
    pub number: u32,
    pub action: Action,
    pub conditions: Vec<Condition>,
}

/// A condition on one argument.
#[derive(Clone, Debug)]
pub struct Condition {
    argument: u8,
    test: Test,
    negate: bool,
}

#[derive(Clone, Debug)]
enum Test {
    Masked { mask: u64, value: u64 },
    Above(u64),
    Below(u64),
}

impl Condition {
    fn new(argument: u8, test: Test) -> Condition {
        Condition { argument, test, negate: false }
    }

    pub fn equal(argument: u8, value: u64) -> Condition {
        Condition::masked(argument, u64::MAX, value)
    }

    pub fn not_equal(argument: u8, value: u64) -> Condition {
        Condition::not(Condition::equal(argument, value))
    }

    pub fn masked(argument: u8, mask: u64, value: u64) -> Condition {
        Condition::new(argument, Test::Masked { mask, value })
    }

    pub fn above(argument: u8, value: u64) -> Condition {
        Condition::new(argument, Test::Above(value))
    }

    pub fn below(argument: u8, value: u64) -> Condition {
        Condition::new(argument, Test::Below(value))
    }

    pub fn not(condition: Condition) -> Condition {
        Condition { negate: !condition.negate, ..condition }
    }

    /// Whether one of `others` is on the same argument.
    pub fn same_argument(&self, others: &[Condition]) -> bool {
        others.iter().any(|other| other.argument == self.argument)
    }

    /// Emits code that falls through if the condition holds, and otherwise skips `over` further
    /// instructions. Arguments have 64 bits and BPF registers 32, so both halves are compared
    /// separately.
    fn emit(&self, over: usize) -> Vec<SockFilter> {
        let low = 16 + 8 * u32::from(self.argument);
        let high = low + 4;
        let (Test::Masked { value, .. } | Test::Above(value) | Test::Below(value)) = self.test;
        let (top, bottom) = ((value >> 32) as u32, value as u32);
        // The comparison exits through the two jumps that follow it: the first is for true, the second
        // for false.
        let mut code = match self.test {
            Test::Masked { mask, .. } => vec![
                load(high),
                and((mask >> 32) as u32),
                jump(JUMP_EQUAL, top, 0, 4),
                load(low),
                and(mask as u32),
                jump(JUMP_EQUAL, bottom, 0, 1),
                // True: skip the jump for false.
                jump_to(1),
            ],
            Test::Above(_) => vec![
                load(high),
                jump(JUMP_GREATER, top, 3, 0),
                jump(JUMP_EQUAL, top, 0, 3),
                load(low),
                jump(JUMP_GREATER, bottom, 0, 1),
                jump_to(1),
            ],
            Test::Below(_) => vec![
                load(high),
                jump(JUMP_GREATER_OR_EQUAL, top, 0, 3),
                jump(JUMP_EQUAL, top, 0, 3),
                load(low),
                jump(JUMP_GREATER_OR_EQUAL, bottom, 1, 0),
                jump_to(1),
            ],
        };
        let over = u32::try_from(over).unwrap_or(u32::MAX);
        if self.negate {
            // Negated: true skips everything, false continues.
            let last = code.len() - 1;
            code[last] = jump_to(over + 1);
            code.push(jump_to(0));
        } else {
            code.push(jump_to(over));
        }
        code
    }
}

/// Compiles the whole filter from the rules of each architecture. Syscalls of any other architecture
/// kill the process.
pub fn build_program(machines: &[(Arch, Vec<Rule>)], default: Action) -> Vec<SockFilter> {
    let mut program = vec![return_action(Action::KillProcess)];
    let short = machines.iter().find(|(machine, _)| machine.is_x32());
    // Sections are prepended, so the loop runs backwards and the native architecture is checked first.
    for (machine, rules) in machines.iter().rev().filter(|(machine, _)| !machine.is_x32()) {
        let mut section = vec![load(0)];
        if *machine == Arch::Own && cfg!(target_arch = "x86_64") {
            let short = match short {
                Some((_, rules)) => emit_syscalls(rules, default),
                None => vec![return_action(Action::Errno(ENOSYS))],
            };
            // Conditional jumps have 8-bit offsets, unconditional jumps 32-bit ones.
            section.extend([jump(JUMP_GREATER_OR_EQUAL, X32_SYSCALL_BIT, 1, 0), jump_over(&short)]);
            section.extend(short);
        }
        section.extend(emit_syscalls(rules, default));
        let mut before = vec![jump(JUMP_EQUAL, machine.audit_arch(), 1, 0), jump_over(&section)];
        before.extend(section);
        before.extend(program);
        program = before;
    }
    program.insert(0, load(4));
    program
}

/// Emits the rules of all syscalls, selected by syscall number.
fn emit_syscalls(rules: &[Rule], default: Action) -> Vec<SockFilter> {
    let mut numbers: Vec<u32> = rules.iter().map(|rule| rule.number).collect();
    numbers.sort_unstable();
    numbers.dedup();
    // Each entry applies from its number up to the next entry's.
    let mut ranges: Vec<(u32, Vec<SockFilter>)> = vec![(0, vec![return_action(default)])];
    let mut add = |from: u32, code: Vec<SockFilter>| match ranges.last_mut() {
        Some((start, last)) if *start == from => *last = code,
        Some((_, last)) if *last == code => {}
        _ => ranges.push((from, code)),
    };
    for number in numbers {
        add(number, emit_rules(rules.iter().filter(|rule| rule.number == number), default));
        add(number + 1, vec![return_action(default)]);
    }
    binary_search(&ranges)
}

fn jump_over(code: &[SockFilter]) -> SockFilter {
    jump_to(u32::try_from(code.len()).unwrap_or(u32::MAX))
}

/// Emits a binary search for the range of a syscall number.
fn binary_search(ranges: &[(u32, Vec<SockFilter>)]) -> Vec<SockFilter> {
    if let [(_, code)] = ranges {
        return code.clone();
    }
    let (left, right) = ranges.split_at(ranges.len() / 2);
    let from = right[0].0;
    let left = binary_search(left);
    let mut code = vec![jump(JUMP_GREATER_OR_EQUAL, from, 0, 1), jump_over(&left)];
    code.extend(left);
    code.extend(binary_search(right));
    code
}

fn emit_rules<'a>(rules: impl Iterator<Item = &'a Rule>, default: Action) -> Vec<SockFilter> {
    let mut code = Vec::new();
    for rule in rules {
        let mut block = vec![return_action(rule.action)];
        for condition in rule.conditions.iter().rev() {
            let over = block.len();
            block = [condition.emit(over), block].concat();
        }
        code.extend(block);
        if rule.conditions.is_empty() {
            return code;
        }
    }
    code.push(return_action(default));
    code
}

const JUMP_EQUAL: u16 = 0x15;
const JUMP_GREATER: u16 = 0x25;
const JUMP_GREATER_OR_EQUAL: u16 = 0x35;

fn instruction(code: u16, yes: u8, no: u8, value: u32) -> SockFilter {
    SockFilter { code, jump_true: yes, jump_false: no, value }
}

fn load(offset: u32) -> SockFilter {
    instruction(0x20, 0, 0, offset)
}

fn and(mask: u32) -> SockFilter {
    instruction(0x54, 0, 0, mask)
}

fn jump(comparison: u16, value: u32, yes: u8, no: u8) -> SockFilter {
    instruction(comparison, yes, no, value)
}

fn jump_to(distance: u32) -> SockFilter {
    instruction(0x05, 0, 0, distance)
}

fn return_action(action: Action) -> SockFilter {
    let value = match action {
        Action::Allow => 0x7fff_0000,
        Action::Errno(errno) => 0x0005_0000 | u32::from(errno),
        Action::KillThread => 0,
        Action::KillProcess => 0x8000_0000,
        Action::Trap => 0x0003_0000,
        Action::Trace(errno) => 0x7ff0_0000 | u32::from(errno),
        Action::Log => 0x7ffc_0000,
    };
    instruction(0x06, 0, 0, value)
}
