//! Sets of allocated CIDRs (upstream's `cidrset`). Does no I/O.

use std::collections::BTreeSet;

use api::networking::ip::{self, Cidr};

/// The prefix length of a node's pod CIDR (upstream's defaults of `--node-cidr-mask-size-ipv4` and `-ipv6`).
const NODE_BITS_V4: u8 = 24;
const NODE_BITS_V6: u8 = 64;
/// Limits the number of node CIDRs in one cluster CIDR to 2^16.
const MAX_CIDR_BITS: u8 = 16;

/// A cluster CIDR, divided into node CIDRs of equal size.
#[derive(Debug)]
pub struct CidrSet {
    network: Cidr,
    node_prefix_length: u8,
    max_cidrs: u32,
    used: BTreeSet<u32>,
    /// Where the search for a free CIDR starts. Released CIDRs are reused last.
    next: u32,
}

/// Why a cluster CIDR is unusable.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum CidrSetError {
    #[error("invalid CIDR {0:?}")]
    InvalidCidr(String),
    #[error("cluster CIDR {0} is smaller than a node CIDR")]
    TooSmall(String),
}

impl CidrSet {
    pub fn parse(text: &str) -> Result<CidrSet, CidrSetError> {
        let network = Cidr::parse(text).ok_or_else(|| CidrSetError::InvalidCidr(text.to_owned()))?;
        let node_prefix_length = if network.is_v6() { NODE_BITS_V6 } else { NODE_BITS_V4 };
        let bits = node_prefix_length.checked_sub(network.prefix_length());
        let bits = bits.ok_or_else(|| CidrSetError::TooSmall(text.to_owned()))?;
        let max_cidrs = 1u32 << bits.min(MAX_CIDR_BITS);
        Ok(CidrSet { network, node_prefix_length, max_cidrs, used: BTreeSet::new(), next: 0 })
    }

    fn width(&self) -> u8 {
        if self.network.is_v6() { 128 } else { 32 }
    }

    fn shift(&self) -> u32 {
        u32::from(self.width() - self.node_prefix_length)
    }

    fn cidr_at(&self, index: u32) -> String {
        let first = ip::to_number(self.network.first()) + (u128::from(index) << self.shift());
        format!("{}/{}", ip::from_number(first, self.network.is_v6()), self.node_prefix_length)
    }

    /// The indexes of the node CIDRs that overlap with a CIDR. `None` if it is outside of the cluster CIDR.
    fn indexes(&self, text: &str) -> Option<std::ops::RangeInclusive<u32>> {
        let cidr = Cidr::parse(text).filter(|cidr| cidr.is_v6() == self.network.is_v6())?;
        let (first, last) = (ip::to_number(self.network.first()), ip::to_number(self.network.last()));
        let from = ip::to_number(cidr.first()).max(first);
        let to = ip::to_number(cidr.last()).min(last);
        let index = |number: u128| u32::try_from((number - first) >> self.shift()).unwrap_or(u32::MAX);
        let end = self.max_cidrs - 1;
        (from <= to && index(from) <= end).then(|| index(from)..=index(to).min(end))
    }

    /// Marks a CIDR as used.
    pub fn mark_used(&mut self, text: &str) {
        self.used.extend(self.indexes(text).into_iter().flatten());
    }

    pub fn release(&mut self, text: &str) {
        let given_back = self.indexes(text);
        self.used.retain(|index| given_back.as_ref().is_none_or(|given_back| !given_back.contains(index)));
    }

    /// Allocates the next free CIDR.
    pub fn allocate_next(&mut self) -> Option<String> {
        let order = (self.next..self.max_cidrs).chain(0..self.next);
        let free = order.into_iter().find(|index| !self.used.contains(index))?;
        self.used.insert(free);
        self.next = (free + 1) % self.max_cidrs;
        Some(self.cidr_at(free))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn cidrs_are_allocated_in_order() {
        let mut cidr_set = CidrSet::parse("10.42.0.0/22").expect("a range");
        cidr_set.mark_used("10.42.1.0/24");
        cidr_set.mark_used("10.99.0.0/24");
        let taken: Vec<Option<String>> = (0..4).map(|_| cidr_set.allocate_next()).collect();
        let parts = ["10.42.0.0/24", "10.42.2.0/24", "10.42.3.0/24"].map(|text| Some(text.to_owned()));
        assert_eq!(taken[..3], parts);
        assert_eq!(taken[3], None);
        cidr_set.release("10.42.2.0/24");
        assert_eq!(cidr_set.allocate_next().as_deref(), Some("10.42.2.0/24"));
        let mut v6 = CidrSet::parse("2001:db8::/56").expect("a range");
        assert_eq!(v6.allocate_next().as_deref(), Some("2001:db8::/64"));
        assert_eq!(v6.allocate_next().as_deref(), Some("2001:db8:0:1::/64"));
        assert_eq!(
            CidrSet::parse("10.0.0.0/25").map(|_| ()),
            Err(CidrSetError::TooSmall("10.0.0.0/25".into()))
        );
        assert_eq!(CidrSet::parse("x").map(|_| ()), Err(CidrSetError::InvalidCidr("x".into())));
    }

    proptest! {
        #[test]
        fn no_cidr_is_allocated_twice(steps in prop::collection::vec(any::<bool>(), 1..60)) {
            let mut cidr_set = CidrSet::parse("10.0.0.0/20").expect("a range");
            let mut allocated: Vec<String> = Vec::new();
            for take in steps {
                match (take, allocated.is_empty()) {
                    (false, false) => cidr_set.release(&allocated.remove(0)),
                    _ => if let Some(part) = cidr_set.allocate_next() {
                        prop_assert!(!allocated.contains(&part));
                        allocated.push(part);
                    } else {
                        prop_assert_eq!(allocated.len(), 16);
                    }
                }
            }
        }
    }
}
