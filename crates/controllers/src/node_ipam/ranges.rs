//! Which parts of the pods' networks are whose. Pure.

use std::collections::BTreeSet;

use api::networking::ip::{self, Cidr};

/// How large the network of a node's pods is, where nothing else is said.
const NODE_BITS_V4: u8 = 24;
const NODE_BITS_V6: u8 = 64;
/// More parts than this are not counted in one network.
const MOST_BITS: u8 = 16;

/// One network, cut into parts of one size.
#[derive(Debug)]
pub struct Range {
    network: Cidr,
    part_bits: u8,
    parts: u32,
    taken: BTreeSet<u32>,
    /// Where to look for a free part: parts given back rest until all others had their turn.
    next: u32,
}

/// Why networks cannot be handed out.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum RangeError {
    #[error("{0:?} is no network")]
    NoNetwork(String),
    #[error("{0} has no room for networks of nodes")]
    TooSmall(String),
}

impl Range {
    pub fn parse(text: &str) -> Result<Range, RangeError> {
        let network = Cidr::parse(text).ok_or_else(|| RangeError::NoNetwork(text.to_owned()))?;
        let part_bits = if network.is_v6() { NODE_BITS_V6 } else { NODE_BITS_V4 };
        let bits = part_bits.checked_sub(network.prefix_length());
        let bits = bits.ok_or_else(|| RangeError::TooSmall(text.to_owned()))?;
        let parts = 1u32 << bits.min(MOST_BITS);
        Ok(Range { network, part_bits, parts, taken: BTreeSet::new(), next: 0 })
    }

    fn width(&self) -> u8 {
        if self.network.is_v6() { 128 } else { 32 }
    }

    fn shift(&self) -> u32 {
        u32::from(self.width() - self.part_bits)
    }

    fn part(&self, index: u32) -> String {
        let first = ip::to_number(self.network.first()) + (u128::from(index) << self.shift());
        format!("{}/{}", ip::from_number(first, self.network.is_v6()), self.part_bits)
    }

    /// The parts a network covers; `None` where it is not of this range.
    fn indexes(&self, text: &str) -> Option<std::ops::RangeInclusive<u32>> {
        let cidr = Cidr::parse(text).filter(|cidr| cidr.is_v6() == self.network.is_v6())?;
        let (first, last) = (ip::to_number(self.network.first()), ip::to_number(self.network.last()));
        let from = ip::to_number(cidr.first()).max(first);
        let to = ip::to_number(cidr.last()).min(last);
        let index = |number: u128| u32::try_from((number - first) >> self.shift()).unwrap_or(u32::MAX);
        let end = self.parts - 1;
        (from <= to && index(from) <= end).then(|| index(from)..=index(to).min(end))
    }

    /// This network is taken, whoever took it.
    pub fn occupy(&mut self, text: &str) {
        self.taken.extend(self.indexes(text).into_iter().flatten());
    }

    pub fn release(&mut self, text: &str) {
        let given_back = self.indexes(text);
        self.taken.retain(|index| given_back.as_ref().is_none_or(|given_back| !given_back.contains(index)));
    }

    /// Takes a part nobody has.
    pub fn take(&mut self) -> Option<String> {
        let order = (self.next..self.parts).chain(0..self.next);
        let free = order.into_iter().find(|index| !self.taken.contains(index))?;
        self.taken.insert(free);
        self.next = (free + 1) % self.parts;
        Some(self.part(free))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn parts_are_handed_out_one_after_the_other() {
        let mut range = Range::parse("10.42.0.0/22").expect("a range");
        range.occupy("10.42.1.0/24");
        range.occupy("10.99.0.0/24");
        let taken: Vec<Option<String>> = (0..4).map(|_| range.take()).collect();
        let parts = ["10.42.0.0/24", "10.42.2.0/24", "10.42.3.0/24"].map(|text| Some(text.to_owned()));
        assert_eq!(taken[..3], parts);
        assert_eq!(taken[3], None);
        range.release("10.42.2.0/24");
        assert_eq!(range.take().as_deref(), Some("10.42.2.0/24"));
        let mut v6 = Range::parse("2001:db8::/56").expect("a range");
        assert_eq!(v6.take().as_deref(), Some("2001:db8::/64"));
        assert_eq!(v6.take().as_deref(), Some("2001:db8:0:1::/64"));
        assert_eq!(Range::parse("10.0.0.0/25").map(|_| ()), Err(RangeError::TooSmall("10.0.0.0/25".into())));
        assert_eq!(Range::parse("x").map(|_| ()), Err(RangeError::NoNetwork("x".into())));
    }

    proptest! {
        #[test]
        fn no_part_is_handed_out_twice(steps in prop::collection::vec(any::<bool>(), 1..60)) {
            let mut range = Range::parse("10.0.0.0/20").expect("a range");
            let mut held: Vec<String> = Vec::new();
            for take in steps {
                match (take, held.is_empty()) {
                    (false, false) => range.release(&held.remove(0)),
                    _ => if let Some(part) = range.take() {
                        prop_assert!(!held.contains(&part));
                        held.push(part);
                    } else {
                        prop_assert_eq!(held.len(), 16);
                    }
                }
            }
        }
    }
}
