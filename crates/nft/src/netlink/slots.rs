//! Allocates the slots of chains in the endpoint maps.
//!
//! A rule picks one of its chain's slots at random and looks up the endpoint in a map. One map per rule
//! would be simplest, but the kernel walks all sets of a table when it creates one. A single map for
//! all rules does not work either: the kernel walks all elements of a map, and all rules that use it,
//! when a rule is bound to it. So many rules share a map, and there are many maps.

use std::collections::HashMap;
use std::ops::Range;

use crate::{IpFamily, Name};

/// The number of slots in a map, unless a single rule needs more.
const MIN_SLOTS_PER_MAP: u32 = 256;

/// The slots allocated since the table was created.
#[derive(Debug, Default)]
pub struct EndpointSlots {
    /// The number of the current batch.
    batch: u64,
    maps: HashMap<IpFamily, Vec<EndpointMap>>,
    allocated: HashMap<Name, Vec<SlotRange>>,
}

/// The slots of one map. They are allocated once in order, and again from the beginning when none is in
/// use.
#[derive(Debug)]
struct EndpointMap {
    size: u32,
    next: u32,
    used: u32,
    /// The batch in which the last slot was released.
    free_since: u64,
}

/// Consecutive slots of one map.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SlotRange {
    pub ip: IpFamily,
    pub map_index: usize,
    pub numbers: Range<u32>,
    /// The map does not exist yet and must be created first.
    pub is_new: bool,
}

impl SlotRange {
    pub fn map_name(&self) -> String {
        format!("endpoints{}/{}", if self.ip == IpFamily::V4 { 4 } else { 6 }, self.map_index)
    }
}

impl EndpointSlots {
    /// Starts a batch. Slots that were released in an earlier batch can be reused. Within the same
    /// batch they cannot, because a packet in flight may have picked such a slot by an old rule.
    pub(super) fn begin_batch(&mut self) {
        self.batch += 1;
    }

    /// Allocates `count` consecutive slots for a chain.
    pub(super) fn allocate(&mut self, chain: &Name, ip: IpFamily, count: usize) -> SlotRange {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        let (batch, pages) = (self.batch, self.maps.entry(ip).or_default());
        for page in pages.iter_mut().filter(|page| page.used == 0 && page.free_since < batch) {
            page.next = 0;
        }
        let fits = |page: &EndpointMap| page.size - page.next >= count;
        let found = pages.iter().rposition(fits);
        let is_new = found.is_none();
        let page = found.unwrap_or_else(|| {
            pages.push(EndpointMap { size: MIN_SLOTS_PER_MAP.max(count), next: 0, used: 0, free_since: 0 });
            pages.len() - 1
        });
        let start = pages[page].next;
        pages[page].next += count;
        pages[page].used += count;
        let slot_range = SlotRange { ip, map_index: page, numbers: start..start + count, is_new };
        self.allocated.entry(chain.clone()).or_default().push(slot_range.clone());
        slot_range
    }

    /// Releases all slots of a chain and returns them.
    pub(super) fn free(&mut self, chain: &Name) -> Vec<SlotRange> {
        let released = self.allocated.remove(chain).unwrap_or_default();
        for slot_range in &released {
            if let Some(page) =
                self.maps.get_mut(&slot_range.ip).and_then(|pages| pages.get_mut(slot_range.map_index))
            {
                page.used -= slot_range.numbers.end - slot_range.numbers.start;
                page.free_since = self.batch;
            }
        }
        released
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn name(number: u8) -> Name {
        format!("c{number}").into()
    }

    #[test]
    fn slots_are_reused_after_the_next_batch() {
        let mut slots = EndpointSlots::default();
        slots.begin_batch();
        let first = slots.allocate(&name(1), IpFamily::V4, 200);
        assert_eq!((first.map_index, first.numbers, first.is_new), (0, 0..200, true));
        let second = slots.allocate(&name(2), IpFamily::V4, 50);
        assert_eq!((second.map_index, second.numbers, second.is_new), (0, 200..250, false));
        assert_eq!(slots.allocate(&name(3), IpFamily::V4, 1000).numbers, 0..1000, "a separate map");
        slots.free(&name(1));
        slots.free(&name(2));
        assert_eq!(
            slots.allocate(&name(4), IpFamily::V4, 200).map_index,
            2,
            "slots are not reused in the same batch"
        );
        slots.begin_batch();
        slots.free(&name(4));
        let again = slots.allocate(&name(5), IpFamily::V4, 100);
        assert_eq!((again.map_index, again.numbers, again.is_new), (0, 0..100, false));
    }

    proptest! {
        /// Every slot has one owner, and the number of maps stays close to the minimum.
        #[test]
        fn slots_have_one_owner(steps in prop::collection::vec((0..40u8, 2..20usize), 1..300)) {
            let mut slots = EndpointSlots::default();
            let mut pages = 0;
            for (chain, count) in steps {
                slots.begin_batch();
                slots.free(&name(chain));
                let slot_range = slots.allocate(&name(chain), IpFamily::V4, count);
                pages = pages.max(slot_range.map_index + 1);
                let mut seen = BTreeSet::new();
                for slot_range in slots.allocated.values().flatten() {
                    prop_assert!(slot_range.numbers.clone().all(|number| seen.insert((slot_range.map_index, number))));
                }
            }
            prop_assert!(pages < 30, "{pages} maps for forty rules");
        }
    }
}
