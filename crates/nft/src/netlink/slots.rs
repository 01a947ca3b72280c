//! Where the endpoints of a chain stand: which numbers of which map are its own.
//!
//! A rule picks one of its chain's numbers at random and goes where a map leads from there. A map for each rule would
//! be simplest, but the kernel walks over all sets of a table whenever one is made; one map for all rules would do,
//! but the kernel walks over all elements of a map, and all rules at it, whenever a rule is put to it. So many rules
//! share a map, and there are many maps.

use std::collections::HashMap;
use std::ops::Range;

use crate::{Ip, Name};

/// How many numbers a map has, unless one rule alone needs more.
const PAGE: u32 = 256;

/// What has been taken since the table was made.
#[derive(Debug, Default)]
pub struct Slots {
    /// Counts batches.
    batch: u64,
    pages: HashMap<Ip, Vec<Page>>,
    taken: HashMap<Name, Vec<Taken>>,
}

/// The numbers of one map. They are handed out once, and all again when none is in use any more.
#[derive(Debug)]
struct Page {
    size: u32,
    next: u32,
    used: u32,
    /// The batch in which the last number came back.
    free_since: u64,
}

/// Numbers of one map.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Taken {
    pub ip: Ip,
    pub page: usize,
    pub numbers: Range<u32>,
    /// The map has to be made first.
    pub is_new: bool,
}

impl Taken {
    pub fn map(&self) -> String {
        format!("endpoints{}/{}", if self.ip == Ip::V4 { 4 } else { 6 }, self.page)
    }
}

impl Slots {
    /// Another batch begins. What came free in an earlier one can be used again: until then a packet may be on its
    /// way that has picked a number by a rule of before.
    pub(super) fn begin(&mut self) {
        self.batch += 1;
    }

    /// Takes so many numbers in a row for a chain.
    pub(super) fn take(&mut self, chain: &Name, ip: Ip, count: usize) -> Taken {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        let (batch, pages) = (self.batch, self.pages.entry(ip).or_default());
        for page in pages.iter_mut().filter(|page| page.used == 0 && page.free_since < batch) {
            page.next = 0;
        }
        let fits = |page: &Page| page.size - page.next >= count;
        let found = pages.iter().rposition(fits);
        let is_new = found.is_none();
        let page = found.unwrap_or_else(|| {
            pages.push(Page { size: PAGE.max(count), next: 0, used: 0, free_since: 0 });
            pages.len() - 1
        });
        let start = pages[page].next;
        pages[page].next += count;
        pages[page].used += count;
        let taken = Taken { ip, page, numbers: start..start + count, is_new };
        self.taken.entry(chain.clone()).or_default().push(taken.clone());
        taken
    }

    /// Gives up the numbers of a chain.
    pub(super) fn free(&mut self, chain: &Name) -> Vec<Taken> {
        let freed = self.taken.remove(chain).unwrap_or_default();
        for taken in &freed {
            if let Some(page) = self.pages.get_mut(&taken.ip).and_then(|pages| pages.get_mut(taken.page)) {
                page.used -= taken.numbers.end - taken.numbers.start;
                page.free_since = self.batch;
            }
        }
        freed
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
    fn numbers_rest_until_the_next_batch() {
        let mut slots = Slots::default();
        slots.begin();
        let first = slots.take(&name(1), Ip::V4, 200);
        assert_eq!((first.page, first.numbers, first.is_new), (0, 0..200, true));
        let second = slots.take(&name(2), Ip::V4, 50);
        assert_eq!((second.page, second.numbers, second.is_new), (0, 200..250, false));
        assert_eq!(slots.take(&name(3), Ip::V4, 1000).numbers, 0..1000, "a map of its own");
        slots.free(&name(1));
        slots.free(&name(2));
        assert_eq!(slots.take(&name(4), Ip::V4, 200).page, 2, "not yet");
        slots.begin();
        slots.free(&name(4));
        let again = slots.take(&name(5), Ip::V4, 100);
        assert_eq!((again.page, again.numbers, again.is_new), (0, 0..100, false));
    }

    proptest! {
        /// No number is anybody else's, and there are not many more maps than needed.
        #[test]
        fn numbers_are_owned(steps in prop::collection::vec((0..40u8, 2..20usize), 1..300)) {
            let mut slots = Slots::default();
            let mut pages = 0;
            for (chain, count) in steps {
                slots.begin();
                slots.free(&name(chain));
                let taken = slots.take(&name(chain), Ip::V4, count);
                pages = pages.max(taken.page + 1);
                let mut seen = BTreeSet::new();
                for taken in slots.taken.values().flatten() {
                    prop_assert!(taken.numbers.clone().all(|number| seen.insert((taken.page, number))));
                }
            }
            prop_assert!(pages < 30, "{pages} maps for forty rules");
        }
    }
}
