//! Which devices a group may use.
//!
//! The first version has files for it. In the second a small program is asked at every use: [`program`] writes it from the
//! same rules, [`crate::bpf`] hands it to the kernel.

use std::fmt;
use std::io;
use std::str::FromStr;

use super::{Cgroups, write};
use crate::bpf::{self, Instruction, Register};

/// Devices that may be used; what no rule names may not. Written as the first version has it: `c 1:3 rwm`, `a` for all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceRule {
    /// `None` is both.
    pub kind: Option<DeviceKind>,
    /// `None` is any.
    pub major: Option<u32>,
    pub minor: Option<u32>,
    pub read: bool,
    pub write: bool,
    /// Whether a file for it may be made.
    pub mknod: bool,
}

/// Numbered as the kernel does for its programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    Block = 1,
    Character = 2,
}

impl DeviceRule {
    /// Whatever there is.
    pub const ALL: DeviceRule =
        DeviceRule { kind: None, major: None, minor: None, read: true, write: true, mknod: true };

    /// The bits of a program's question: make 1, read 2, write 4.
    fn access(self) -> i32 {
        i32::from(self.mknod) | i32::from(self.read) << 1 | i32::from(self.write) << 2
    }
}

/// Not a rule.
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
    /// Lets a group use only these devices. A host that cannot see to that is an error: a container may make any device
    /// it knows the number of.
    pub fn allow_devices(&self, group: &str, rules: &[DeviceRule]) -> io::Result<()> {
        let missing = || io::Error::new(io::ErrorKind::NotFound, "no cgroup limits devices on this host");
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

/// The program that answers whether a device may be used: 1 as soon as a rule allows it, 0 in the end.
///
/// It is given three numbers: kind and access (in the upper half), major, minor.
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
        // The kernel counts them as numbers without a sign; the bits are the same.
        checks.extend(rule.major.map(|major| (MAJOR, major.cast_signed())));
        checks.extend(rule.minor.map(|minor| (MINOR, minor.cast_signed())));
        let forbidden = !rule.access() & 7;
        let mut body: Vec<Instruction> = Vec::new();
        if forbidden != 0 {
            body.push(Instruction::copy(SCRATCH, ACCESS));
            body.push(Instruction::and(SCRATCH, forbidden));
            checks.push((SCRATCH, 0));
        }
        // The comparisons, then what to do where all of them hold; each of the first skips what is after it.
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
