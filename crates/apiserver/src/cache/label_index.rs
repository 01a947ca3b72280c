//! The objects that have the labels asked for lately, so that a list by label need not look at the others.
//!
//! Whoever lists by the same labels twice within a few other questions, and finds little among much, gets a
//! posting list for them; it follows every change, and makes room for another when it is not asked for.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::{Slot, range_with_prefix};
use crate::object::{Object, label_bits};

/// How many posting lists a kind has, and how many questions it remembers.
const MAX_LABEL_LISTS: usize = 8;
const MAX_RECENT_LABELS: usize = 16;
/// Looking at this many objects is not worth avoiding.
const MIN_OBJECTS_TO_INDEX: usize = 1_000;
/// A list must leave out all but one in this many objects.
const MIN_OBJECTS_PER_MATCH: usize = 8;

/// Labels with their values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Labels {
    pairs: Vec<(String, String)>,
    /// What the labels of whoever has all of these have (`Object::label_bits`).
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

/// The posting lists of a shard, kept in step with its objects.
#[derive(Default)]
pub(super) struct LabelIndex {
    lists: Vec<LabelList>,
    clock: AtomicU64,
}

struct LabelList {
    labels: Labels,
    objects: BTreeMap<Arc<str>, Arc<Object>>,
    /// When it was last asked for.
    last_used: AtomicU64,
}

impl LabelIndex {
    /// The objects under `prefix` with these labels, where there is a list of them.
    pub fn find(&self, prefix: &str, labels: &Labels) -> Option<Vec<Arc<Object>>> {
        let list = self.lists.iter().find(|list| list.labels == *labels)?;
        list.last_used.store(self.clock.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
        Some(range_with_prefix(&list.objects, prefix).map(|(_, object)| object.clone()).collect())
    }

    /// Makes a list, in place of the one not asked for the longest where there are many.
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

    /// Takes in an object's newest state; `all` is how many objects there are.
    pub fn put(&mut self, slot: &Slot, all: usize) {
        for list in &mut self.lists {
            if list.labels.matches(slot) {
                list.objects.insert(slot.object.key.clone(), slot.object.clone());
            } else if !list.objects.is_empty() {
                list.objects.remove(&slot.object.key);
            }
        }
        // What most objects have by now is no longer worth its memory.
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

/// The labels asked for lately that there was no list for.
#[derive(Default)]
pub(super) struct RecentLabels(Mutex<VecDeque<Labels>>);

impl RecentLabels {
    /// Whether a list for these labels, by which `found` of `seen` objects were found, is worth making.
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
