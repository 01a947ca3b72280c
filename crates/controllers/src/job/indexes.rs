//! Sets of completion indexes in the format of `status.completedIndexes`: `1,3-5,7`.

use std::fmt;

/// Sorted ranges of indexes. Ranges never touch or overlap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Indexes(Vec<(u32, u32)>);

impl Indexes {
    /// Parses the indexes below `limit`. Invalid parts are ignored.
    pub fn parse(text: &str, limit: u32) -> Indexes {
        let mut found = Indexes::default();
        for range in text.split(',').filter(|range| !range.is_empty()) {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (Ok(first), Ok(last)) = (first.parse::<u32>(), last.parse::<u32>()) else { continue };
            let last = last.min(limit.saturating_sub(1));
            if first < limit && first <= last {
                found.0.push((first, last));
            }
        }
        found.normalized()
    }

    pub fn contains(&self, index: u32) -> bool {
        let at = self.0.partition_point(|(_, last)| *last < index);
        self.0.get(at).is_some_and(|(first, _)| *first <= index)
    }

    /// The number of indexes.
    pub fn total(&self) -> u32 {
        self.0.iter().fold(0, |sum: u32, (first, last)| sum.saturating_add(last - first).saturating_add(1))
    }

    /// The number of indexes in both sets.
    pub fn intersection_count(&self, other: &Indexes) -> u32 {
        let mut sum: u32 = 0;
        let (mut left, mut right) = (self.0.iter().peekable(), other.0.iter().peekable());
        while let (Some((a, b)), Some((c, d))) = (left.peek(), right.peek()) {
            if let Some(overlap) = b.min(d).checked_sub(*a.max(c)) {
                sum = sum.saturating_add(overlap).saturating_add(1);
            }
            if b < d {
                left.next();
            } else {
                right.next();
            }
        }
        sum
    }

    /// The lowest `count` indexes below `limit` that are not in the set.
    pub fn missing(&self, count: usize, limit: u32) -> Vec<u32> {
        let mut found = Vec::new();
        let mut from = 0;
        for (first, last) in self.0.iter().copied().chain([(limit, limit)]) {
            found.extend((from..first.min(limit)).take(count.saturating_sub(found.len())));
            from = last.saturating_add(1);
        }
        found
    }

    pub fn with(&self, other: &Indexes) -> Indexes {
        Indexes(self.0.iter().chain(&other.0).copied().collect()).normalized()
    }

    fn normalized(mut self) -> Indexes {
        self.0.sort_unstable();
        let mut ranges: Vec<(u32, u32)> = Vec::with_capacity(self.0.len());
        for (first, last) in self.0 {
            match ranges.last_mut() {
                Some((_, end)) if first <= end.saturating_add(1) => *end = last.max(*end),
                _ => ranges.push((first, last)),
            }
        }
        Indexes(ranges)
    }
}

impl FromIterator<u32> for Indexes {
    fn from_iter<I: IntoIterator<Item = u32>>(indexes: I) -> Indexes {
        Indexes(indexes.into_iter().map(|index| (index, index)).collect()).normalized()
    }
}

impl fmt::Display for Indexes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (first, last)) in self.0.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            match last - first {
                0 => write!(f, "{comma}{first}")?,
                1 => write!(f, "{comma}{first},{last}")?,
                _ => write!(f, "{comma}{first}-{last}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn check(text: &str, limit: u32, expected: &str) {
        assert_eq!(Indexes::parse(text, limit).to_string(), expected);
    }

    #[test]
    fn parse_and_format_ranges() {
        check("", 10, "");
        check("1,3-5,7", 10, "1,3-5,7");
        check("1,2", 10, "1,2");
        check("1,2,3", 10, "1-3");
        check("0-9", 5, "0-4");
        check("3,x,5-y,8", 10, "3,8");
        check("7-3,9", 10, "9");
        check("4294967295", u32::MAX, "");
        check("0-1", 0, "");
    }

    proptest! {
        #[test]
        fn index_set_operations_match_btree_set(
            left in prop::collection::btree_set(0u32..40, 0..30),
            right in prop::collection::btree_set(0u32..40, 0..30),
            count in 0usize..50,
        ) {
            let (a, b): (Indexes, Indexes) = (left.iter().copied().collect(), right.iter().copied().collect());
            prop_assert_eq!(Indexes::parse(&a.to_string(), 40), a.clone());
            prop_assert_eq!(a.total() as usize, left.len());
            prop_assert_eq!(a.intersection_count(&b) as usize, left.intersection(&right).count());
            let union: BTreeSet<u32> = left.union(&right).copied().collect();
            prop_assert_eq!(a.with(&b), union.iter().copied().collect::<Indexes>());
            for index in 0..45 {
                prop_assert_eq!(a.contains(index), left.contains(&index));
            }
            let missing: Vec<u32> = (0..40).filter(|index| !left.contains(index)).take(count).collect();
            prop_assert_eq!(a.missing(count, 40), missing);
        }
    }
}
