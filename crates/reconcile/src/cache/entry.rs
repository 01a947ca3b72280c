//! One object on a shelf: its bytes always, its typed form only as long as somebody looks at it.
//!
//! A typed pod is ten times its bytes, which in the API server's process are shared with it. Most objects of a big
//! cluster are looked at when they come or change and not again for hours.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use client::RawObject;
use parking_lot::Mutex;

use super::indexer::Item;
use crate::labels::Labels;

/// How many of the last that came stay typed, for those who are about to look at them.
const MAX_RECENT_DECODED: usize = 1024;
/// How many sweeps an object stays typed after it was last found.
const IDLE_GC_ROUNDS: u32 = 2;
/// [`Entry::found`] of one that nobody has found since it came.
const NEVER_USED: u32 = 0;

pub(crate) struct Entry {
    raw: RawObject,
    pub keys: EntryKeys,
    decoded: Mutex<Option<Item>>,
    /// The sweep before which it was last found among others.
    last_used: AtomicU32,
}

/// Where an object is found besides its name.
pub(crate) struct EntryKeys {
    pub uid: Box<str>,
    pub labels: Labels,
    /// The uid of the controlling owner.
    pub owner: Option<Arc<str>>,
    /// Each index that finds it, by number, and the value it is found under.
    pub values: Box<[(u8, Arc<str>)]>,
}

impl Entry {
    pub fn new(raw: RawObject, item: Item, keys: EntryKeys) -> Entry {
        Entry { raw, keys, decoded: Mutex::new(Some(item)), last_used: AtomicU32::new(NEVER_USED) }
    }
}

/// Which of a shelf's objects are typed.
pub(crate) struct DecodedCache {
    decode: fn(&RawObject) -> Option<Item>,
    /// Counts from 1.
    gc_round: AtomicU32,
    recent: Mutex<VecDeque<Weak<Entry>>>,
    used: Mutex<Vec<Weak<Entry>>>,
}

impl DecodedCache {
    pub fn new(decode: fn(&RawObject) -> Option<Item>) -> DecodedCache {
        DecodedCache { decode, gc_round: AtomicU32::new(1), recent: Mutex::default(), used: Mutex::default() }
    }

    /// One more has come, or was looked at by its name, and is typed.
    pub fn add_recent(&self, entry: &Arc<Entry>) {
        let mut recent = self.recent.lock();
        recent.push_back(Arc::downgrade(entry));
        if recent.len() > MAX_RECENT_DECODED
            && let Some(oldest) = recent.pop_front().and_then(|oldest| oldest.upgrade())
            && oldest.last_used.load(Ordering::Relaxed) == NEVER_USED
        {
            drop(recent);
            oldest.drop_decoded();
        }
    }

    /// The typed form of one that was asked for by name.
    pub fn item(&self, entry: &Arc<Entry>) -> Item {
        let mut decoded = entry.decoded.lock();
        if let Some(item) = &*decoded {
            return item.clone();
        }
        let item = entry.decode(self.decode);
        *decoded = Some(item.clone());
        drop(decoded);
        self.add_recent(entry);
        item
    }

    /// The typed form of one that was found among others. Who looks through many looks again, so it stays typed
    /// until nobody has for a while.
    pub fn item_in_use(&self, entry: &Arc<Entry>) -> Item {
        let round = self.gc_round.load(Ordering::Relaxed);
        if entry.last_used.swap(round, Ordering::Relaxed) == NEVER_USED {
            self.used.lock().push(Arc::downgrade(entry));
        }
        entry.decoded.lock().get_or_insert_with(|| entry.decode(self.decode)).clone()
    }

    /// The form it had before it was replaced; not kept.
    pub fn take_item(&self, entry: &Entry) -> Item {
        let decoded = entry.decoded.lock().take();
        decoded.unwrap_or_else(|| entry.decode(self.decode))
    }

    /// Lets go of what nobody has looked at lately. Answers whether anything is left for a later sweep.
    pub fn collect_garbage(&self) -> bool {
        let now = self.gc_round.fetch_add(1, Ordering::Relaxed) + 1;
        let recent = std::mem::take(&mut *self.recent.lock());
        for entry in recent.iter().filter_map(Weak::upgrade) {
            if entry.last_used.load(Ordering::Relaxed) == NEVER_USED {
                entry.drop_decoded();
            }
        }
        let mut used = self.used.lock();
        used.retain(|entry| {
            let Some(entry) = entry.upgrade() else { return false };
            let is_in_use = now - entry.last_used.load(Ordering::Relaxed) < IDLE_GC_ROUNDS;
            if !is_in_use {
                entry.last_used.store(NEVER_USED, Ordering::Relaxed);
                entry.drop_decoded();
            }
            is_in_use
        });
        used.shrink_to_fit();
        !used.is_empty()
    }
}

impl Entry {
    fn drop_decoded(&self) {
        // Freed outside the lock.
        let _item = self.decoded.lock().take();
    }

    fn decode(&self, decode: fn(&RawObject) -> Option<Item>) -> Item {
        decode(&self.raw).expect("the same bytes were decoded when they came")
    }
}
