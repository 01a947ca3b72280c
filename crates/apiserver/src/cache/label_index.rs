//! Index for list requests by label: the objects that have recently requested labels.
//!
//! If the same labels are requested twice within a few other requests, and few of many objects
//! match, a list of the matching objects is kept for them. It is updated on every change. The least
//! recently used list is replaced.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::{Slot, range_with_prefix};
use crate::object::{Object, label_bits};

/// Limits per kind: indexed lists, and recent requests that are remembered.
const MAX_LABEL_LISTS: usize = 8;
const MAX_RECENT_LABELS: usize = 16;
/// With fewer objects a full scan is cheap enough.
const MIN_OBJECTS_TO_INDEX: usize = 1_000;
/// At most one in this many objects may match for a list to be worthwhile.
const MIN_OBJECTS_PER_MATCH: usize = 8;

/// Equality requirements: label names with values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Labels {
    pairs: Vec<(String, String)>,
    /// Bits that the label bits of every match have (`Object::label_bits`).
    bits: u64,
}

impl Labels {
    pub fn new(pairs: Vec<(String, String)>) -> Labels {
        let bits =
            pairs.iter().fold(0, |bits, (name, value)| bits | label_bits(name.as_bytes(), value.as_bytes()));
        Labels { pairs, bits }
    }

    pub(super) fn matches(&self, slot: &Slot) -> bool {
        slot.label_bits & self.bits == self.bits
            && self.pairs.iter().all(|(name, value)| slot.object.label(name) == Some(value))
    }
}

/// The indexed lists of a shard, consistent with its objects.
#[derive(Default)]
pub(super) struct LabelIndex {
    lists: Vec<LabelList>,
    clock: AtomicU64,
}

struct LabelList {
    labels: Labels,
    objects: BTreeMap<Arc<str>, Arc<Object>>,
    /// Value of `clock` at the last use.
    last_used: AtomicU64,
}

impl LabelIndex {
    /// The objects under `prefix` with these labels; `None` if they are not indexed.
    pub fn find(&self, prefix: &str, labels: &Labels) -> Option<Vec<Arc<Object>>> {
        let list = self.lists.iter().find(|list| list.labels == *labels)?;
        list.last_used.store(self.clock.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
        Some(range_with_prefix(&list.objects, prefix).map(|(_, object)| object.clone()).collect())
    }

    /// Adds a list, replacing the least recently used one if there are too many.
    pub fn add<'a>(&mut self, labels: &Labels, slots: impl Iterator<Item = &'a Slot>) {
        if self.lists.iter().any(|list| list.labels == *labels) {
            return;
        }
        let objects = slots.filter(|slot| labels.matches(slot));
        let objects = objects.map(|slot| (slot.object.key.clone(), slot.object.clone())).collect();
        let last_used = AtomicU64::new(self.clock.fetch_add(1, Ordering::Relaxed));
        if self.lists.len() >= MAX_LABEL_LISTS
            && let Some(oldest) =
                self.lists.iter_mut().min_by_key(|list| list.last_used.load(Ordering::Relaxed))
        {
            *oldest = LabelList { labels: labels.clone(), objects, last_used };
        } else {
            self.lists.push(LabelList { labels: labels.clone(), objects, last_used });
        }
    }

    /// Applies the newest state of an object; `all` is the number of objects in the shard.
    pub fn put(&mut self, slot: &Slot, all: usize) {
        for list in &mut self.lists {
            if list.labels.matches(slot) {
                list.objects.insert(slot.object.key.clone(), slot.object.clone());
            } else if !list.objects.is_empty() {
                list.objects.remove(&slot.object.key);
            }
        }
        // A list that most objects match is not worth its memory any more.
        self.lists.retain(|list| list.objects.len() <= MIN_OBJECTS_TO_INDEX.max(all / 2));
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.lists.len()
    }

    pub fn remove(&mut self, key: &str) {
        self.lists.iter_mut().for_each(|list| drop(list.objects.remove(key)));
    }
}

/// Recently requested labels that are not indexed.
#[derive(Default)]
pub(super) struct RecentLabels(Mutex<VecDeque<Labels>>);

impl RecentLabels {
    /// Whether to index these labels, after a scan that found `found` of `seen` objects.
    pub fn should_index(&self, labels: &Labels, found: usize, seen: usize) -> bool {
        if labels.pairs.is_empty() || seen <= MIN_OBJECTS_TO_INDEX || found > seen / MIN_OBJECTS_PER_MATCH {
            return false;
        }
        let mut recent_labels = self.0.lock();
        if let Some(at) = recent_labels.iter().position(|recent| recent == labels) {
            recent_labels.remove(at);
            return true;
        }
        recent_labels.truncate(MAX_RECENT_LABELS - 1);
        recent_labels.push_front(labels.clone());
        false
    }
}
