//! The devices that a group may use.
//!
//! v1 has control files for them. On v2 the kernel runs a BPF program at every access: [`program`]
//! generates it from the same rules, and [`crate::bpf`] loads it.

use std::fmt;
use std::io;
use std::str::FromStr;

use super::{Cgroups, write};
use crate::bpf::{self, Instruction, Register};

/// Devices that are allowed; all others are denied. The text form is that of v1: `c 1:3 rwm`, or `a`
/// for all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceRule {
    /// `None` is block and character devices.
    pub kind: Option<DeviceKind>,
    /// `None` is any.
    pub major: Option<u32>,
    pub minor: Option<u32>,
    pub read: bool,
    pub write: bool,
    /// Whether nodes for the device may be created (mknod).
    pub mknod: bool,
}

/// The values are those of the kernel's BPF device programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    Block = 1,
    Character = 2,
}

impl DeviceRule {
    /// All devices.
    pub const ALL: DeviceRule =
        DeviceRule { kind: None, major: None, minor: None, read: true, write: true, mknod: true };

    /// The access bits in the context of a program: mknod 1, read 2, write 4.
    fn access(self) -> i32 {
        i32::from(self.mknod) | i32::from(self.read) << 1 | i32::from(self.write) << 2
    }
}

/// The error for a malformed rule.
#[derive(Debug, PartialEq, Eq)]
pub struct ParseDeviceRuleError;

impl FromStr for DeviceRule {
    type Err = ParseDeviceRuleError;

    fn from_str(text: &str) -> Result<DeviceRule, ParseDeviceRuleError> {
        if text == "a" {
            return Ok(DeviceRule::ALL);
        }
        let mut words = text.split(' ');
        let (Some(kind), Some(numbers), Some(access), None) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            return Err(ParseDeviceRuleError);
        };
        let kind = match kind {
            "a" => None,
            "b" => Some(DeviceKind::Block),
            "c" => Some(DeviceKind::Character),
            _ => return Err(ParseDeviceRuleError),
        };
        let number = |text: &str| match text {
            "*" => Ok(None),
            text => text.parse().map(Some).map_err(|_| ParseDeviceRuleError),
        };
        let (major, minor) = numbers.split_once(':').ok_or(ParseDeviceRuleError)?;
        if access.is_empty() || !access.bytes().all(|letter| b"rwm".contains(&letter)) {
            return Err(ParseDeviceRuleError);
        }
        Ok(DeviceRule {
            kind,
            major: number(major)?,
            minor: number(minor)?,
            read: access.contains('r'),
            write: access.contains('w'),
            mknod: access.contains('m'),
        })
    }
}

impl fmt::Display for DeviceRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            None => 'a',
            Some(DeviceKind::Block) => 'b',
            Some(DeviceKind::Character) => 'c',
        };
        let number = |number: Option<u32>| number.map_or("*".to_owned(), |number| number.to_string());
        write!(f, "{kind} {}:{} ", number(self.major), number(self.minor))?;
        for (is_allowed, letter) in [(self.read, "r"), (self.write, "w"), (self.mknod, "m")] {
            f.write_str(if is_allowed { letter } else { "" })?;
        }
        Ok(())
    }
}

impl Cgroups {
    /// Allows a group only these devices. Fails if the host cannot enforce it, since a container may
    /// create a node for any device number.
    pub fn allow_devices(&self, group: &str, rules: &[DeviceRule]) -> io::Result<()> {
        let missing = || io::Error::new(io::ErrorKind::NotFound, "this host has no cgroup device controller");
        let directory = self.directory("devices", group).ok_or_else(missing)?;
        if self.is_v2() {
            if rules.contains(&DeviceRule::ALL) {
                return Ok(());
            }
            return bpf::limit_devices(&directory, &program(rules));
        }
        if rules.contains(&DeviceRule::ALL) {
            return write(&directory.join("devices.allow"), "a");
        }
        write(&directory.join("devices.deny"), "a")?;
        for rule in rules {
            write(&directory.join("devices.allow"), &rule.to_string())?;
        }
        Ok(())
    }
}

/// The program that decides on a device access: returns 1 at the first rule that allows it, 0
/// otherwise.
///
/// Its context has three numbers: type with the access in the upper half, major, minor.
fn program(rules: &[DeviceRule]) -> Vec<Instruction> {
    const CONTEXT: Register = Register(1);
    const RESULT: Register = Register(0);
    const KIND: Register = Register(2);
    const ACCESS: Register = Register(3);
    const MAJOR: Register = Register(4);
    const MINOR: Register = Register(5);
    const SCRATCH: Register = Register(6);
    let mut program = vec![
        Instruction::load(KIND, CONTEXT, 0),
        Instruction::load(MAJOR, CONTEXT, 4),
        Instruction::load(MINOR, CONTEXT, 8),
        Instruction::copy(ACCESS, KIND),
        Instruction::and(KIND, 0xffff),
        Instruction::shift_right(ACCESS, 16),
    ];
    for rule in rules {
        let mut checks = Vec::new();
        checks.extend(rule.kind.map(|kind| (KIND, kind as i32)));
        // The kernel's numbers are unsigned; the bits are the same.
        checks.extend(rule.major.map(|major| (MAJOR, major.cast_signed())));
        checks.extend(rule.minor.map(|minor| (MINOR, minor.cast_signed())));
        let forbidden = !rule.access() & 7;
        let mut body: Vec<Instruction> = Vec::new();
        if forbidden != 0 {
            body.push(Instruction::copy(SCRATCH, ACCESS));
            body.push(Instruction::and(SCRATCH, forbidden));
            checks.push((SCRATCH, 0));
        }
        // All comparisons, then the return of 1. A failed comparison skips the rest of the rule.
        let end = checks.len() + 2;
        for (at, (register, value)) in checks.into_iter().enumerate() {
            let skip = i16::try_from(end - at - 1).expect("a rule has at most six instructions");
            body.push(Instruction::jump_if_not_equal(register, value, skip));
        }
        body.push(Instruction::set(RESULT, 1));
        body.push(Instruction::EXIT);
        program.extend(body);
    }
    program.push(Instruction::set(RESULT, 0));
    program.push(Instruction::EXIT);
    program
}

#[cfg(test)]
mod tests;
