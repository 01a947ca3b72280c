//! Which numbers of the map of endpoints belong to which chain.
//!
//! A rule picks one of the numbers that are its chain's at random and goes where the map leads from there. Numbers are
//! never used twice, so a rule that is still being run while its chain changes finds its own endpoints or none.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;

use crate::{Ip, Name};

/// What has been taken since the table was made.
#[derive(Debug, Default)]
pub struct Slots {
    next: u32,
    taken: HashMap<Name, Vec<(Ip, Range<u32>)>>,
}

/// All numbers have been used. A new table begins at the first one.
#[derive(Debug, PartialEq)]
pub struct Full;

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no numbers for endpoints are left in this table")
    }
}

impl std::error::Error for Full {}

impl Slots {
    /// Takes so many numbers in a row for a chain. Returns the first.
    pub(super) fn take(&mut self, chain: &Name, ip: Ip, count: usize) -> Result<u32, Full> {
        let start = self.next;
        let end = u32::try_from(count).ok().and_then(|count| start.checked_add(count)).ok_or(Full)?;
        self.next = end;
        self.taken.entry(chain.clone()).or_default().push((ip, start..end));
        Ok(start)
    }

    /// Gives up the numbers of a chain.
    pub(super) fn free(&mut self, chain: &Name) -> Vec<(Ip, Range<u32>)> {
        self.taken.remove(chain).unwrap_or_default()
    }
}

/// The map of a family.
pub(super) fn endpoints(ip: Ip) -> &'static str {
    match ip {
        Ip::V4 => "endpoints4",
        Ip::V6 => "endpoints6",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_taken_once() {
        let (mut slots, one, two) = (Slots::default(), Name::from("one"), Name::from("two"));
        assert_eq!(slots.take(&one, Ip::V4, 3), Ok(0));
        assert_eq!(slots.take(&two, Ip::V6, 2), Ok(3));
        assert_eq!(slots.free(&one), [(Ip::V4, 0..3)]);
        assert_eq!(slots.free(&one), []);
        assert_eq!(slots.take(&one, Ip::V4, 1), Ok(5));
        assert_eq!(slots.take(&one, Ip::V4, usize::MAX), Err(Full));
        slots.next = u32::MAX;
        assert_eq!(slots.take(&one, Ip::V4, 1), Err(Full));
    }
}
