//! From rules to the kernel's instructions.

use sys::seccomp::Instruction;

use super::machine::{Machine, SHORT_POINTERS};

const ENOSYS: u16 = 38;

/// What becomes of a call.
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

/// One call, with what its arguments must be like. Of several rules for a call the first that fits counts.
#[derive(Clone, Debug)]
pub struct Rule {
    pub number: u32,
    pub action: Action,
    pub conditions: Vec<Condition>,
}

/// What an argument must be like.
#[derive(Clone, Debug)]
pub struct Condition {
    argument: u8,
    test: Test,
    is_negated: bool,
}

#[derive(Clone, Debug)]
enum Test {
    Masked { mask: u64, value: u64 },
    Above(u64),
    Below(u64),
}

impl Condition {
    fn new(argument: u8, test: Test) -> Condition {
        Condition { argument, test, is_negated: false }
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
        Condition { is_negated: !condition.is_negated, ..condition }
    }

    /// Whether any of these is about the same argument.
    pub fn shares_argument(&self, others: &[Condition]) -> bool {
        others.iter().any(|other| other.argument == self.argument)
    }

    /// Instructions that go on behind their end where the condition holds, and jump `over` instructions further where
    /// it does not.
    fn emit(&self, over: usize) -> Vec<Instruction> {
        let low = 16 + 8 * u32::from(self.argument);
        let high = low + 4;
        let (Test::Masked { value, .. } | Test::Above(value) | Test::Below(value)) = self.test;
        let (top, bottom) = ((value >> 32) as u32, value as u32);
        // Each part ends in the two places `yes` and `no` right behind it, which are jumps.
        let mut code = match self.test {
            Test::Masked { mask, .. } => vec![
                load(high),
                and((mask >> 32) as u32),
                jump(EQUAL, top, 0, 4),
                load(low),
                and(mask as u32),
                jump(EQUAL, bottom, 0, 1),
                // yes: over `no`
                jump_to(1),
            ],
            Test::Above(_) => vec![
                load(high),
                jump(ABOVE, top, 3, 0),
                jump(EQUAL, top, 0, 3),
                load(low),
                jump(ABOVE, bottom, 0, 1),
                jump_to(1),
            ],
            Test::Below(_) => vec![
                load(high),
                jump(AT_LEAST, top, 0, 3),
                jump(EQUAL, top, 0, 3),
                load(low),
                jump(AT_LEAST, bottom, 1, 0),
                jump_to(1),
            ],
        };
        let over = u32::try_from(over).unwrap_or(u32::MAX);
        if self.is_negated {
            // The two places exchanged: yes goes over everything, no goes on.
            let last = code.len() - 1;
            code[last] = jump_to(over + 1);
            code.push(jump_to(0));
        } else {
            code.push(jump_to(over));
        }
        code
    }
}

/// Makes the whole program, of the rules for each machine. What is of none of them ends.
pub fn assemble(machines: &[(Machine, Vec<Rule>)], default: Action) -> Vec<Instruction> {
    let mut program = vec![give(Action::KillProcess)];
    let short = machines.iter().find(|(machine, _)| machine.has_short_pointers());
    // The last is asked for first, which is to be this machine's own.
    for (machine, rules) in machines.iter().rev().filter(|(machine, _)| !machine.has_short_pointers()) {
        let mut section = vec![load(0)];
        if *machine == Machine::Own && cfg!(target_arch = "x86_64") {
            let short = match short {
                Some((_, rules)) => numbers(rules, default),
                None => vec![give(Action::Errno(ENOSYS))],
            };
            // A comparison jumps no further than 255, a plain jump any distance.
            section.extend([jump(AT_LEAST, SHORT_POINTERS, 1, 0), over(&short)]);
            section.extend(short);
        }
        section.extend(numbers(rules, default));
        let mut before = vec![jump(EQUAL, machine.token(), 1, 0), over(&section)];
        before.extend(section);
        before.extend(program);
        program = before;
    }
    program.insert(0, load(4));
    program
}

/// What becomes of each number.
fn numbers(rules: &[Rule], default: Action) -> Vec<Instruction> {
    let mut numbers: Vec<u32> = rules.iter().map(|rule| rule.number).collect();
    numbers.sort_unstable();
    numbers.dedup();
    // From each number on, what happens, until the next one.
    let mut ranges: Vec<(u32, Vec<Instruction>)> = vec![(0, vec![give(default)])];
    let mut add = |from: u32, code: Vec<Instruction>| match ranges.last_mut() {
        Some((start, last)) if *start == from => *last = code,
        Some((_, last)) if *last == code => {}
        _ => ranges.push((from, code)),
    };
    for number in numbers {
        add(number, decide(rules.iter().filter(|rule| rule.number == number), default));
        add(number + 1, vec![give(default)]);
    }
    search(&ranges)
}

fn over(code: &[Instruction]) -> Instruction {
    jump_to(u32::try_from(code.len()).unwrap_or(u32::MAX))
}

/// Halves what is left until it is one.
fn search(ranges: &[(u32, Vec<Instruction>)]) -> Vec<Instruction> {
    if let [(_, code)] = ranges {
        return code.clone();
    }
    let (left, right) = ranges.split_at(ranges.len() / 2);
    let from = right[0].0;
    let left = search(left);
    let mut code = vec![jump(AT_LEAST, from, 0, 1), over(&left)];
    code.extend(left);
    code.extend(search(right));
    code
}

fn decide<'a>(rules: impl Iterator<Item = &'a Rule>, default: Action) -> Vec<Instruction> {
    let mut code = Vec::new();
    for rule in rules {
        let mut block = vec![give(rule.action)];
        for condition in rule.conditions.iter().rev() {
            let over = block.len();
            block = [condition.emit(over), block].concat();
        }
        code.extend(block);
        if rule.conditions.is_empty() {
            return code;
        }
    }
    code.push(give(default));
    code
}

const EQUAL: u16 = 0x15;
const ABOVE: u16 = 0x25;
const AT_LEAST: u16 = 0x35;

fn instruction(code: u16, yes: u8, no: u8, value: u32) -> Instruction {
    Instruction { code, yes, no, value }
}

fn load(offset: u32) -> Instruction {
    instruction(0x20, 0, 0, offset)
}

fn and(mask: u32) -> Instruction {
    instruction(0x54, 0, 0, mask)
}

fn jump(comparison: u16, value: u32, yes: u8, no: u8) -> Instruction {
    instruction(comparison, yes, no, value)
}

fn jump_to(distance: u32) -> Instruction {
    instruction(0x05, 0, 0, distance)
}

fn give(action: Action) -> Instruction {
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
