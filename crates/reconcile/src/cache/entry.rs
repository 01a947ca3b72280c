//! One cached object: always its encoded bytes, and its decoded form only while it is in use.
//!
//! A decoded pod takes ten times the memory of its bytes, and in the API server's process the bytes are
//! shared with the watch cache. In a large cluster most objects are read when they are added or updated and
//! then not for hours.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use client::RawObject;
use parking_lot::Mutex;

use super::indexer::Item;
use crate::labels::Labels;

/// How many of the most recently added objects stay decoded, because controllers are about to read them.
const MAX_RECENT_DECODED: usize = 1024;
/// How many garbage collection rounds an object stays decoded after its last use by a list or index lookup.
const IDLE_GC_ROUNDS: u32 = 2;
/// Value of `last_used` for an object that no list or index lookup has returned since it was decoded.
const NEVER_USED: u32 = 0;

pub(crate) struct Entry {
    raw: RawObject,
    pub keys: EntryKeys,
    decoded: Mutex<Option<Item>>,
    /// The garbage collection round of its last use by a list or index lookup.
    last_used: AtomicU32,
}

/// The keys by which an object is found, besides its name.
pub(crate) struct EntryKeys {
    pub uid: Box<str>,
    pub labels: Labels,
    /// UID of the controlling owner.
    pub owner: Option<Arc<str>>,
    /// Number of each index that contains the object, with the object's value in it.
    pub values: Box<[(u8, Arc<str>)]>,
}

impl Entry {
    pub fn new(raw: RawObject, item: Item, keys: EntryKeys) -> Entry {
        Entry { raw, keys, decoded: Mutex::new(Some(item)), last_used: AtomicU32::new(NEVER_USED) }
    }
}

/// Tracks which objects are decoded and drops the decoded form of those that are not in use.
pub(crate) struct DecodedCache {
    decode: fn(&RawObject) -> Option<Item>,
    /// The current round. Starts at 1: 0 is [`NEVER_USED`].
    gc_round: AtomicU32,
    recent: Mutex<VecDeque<Weak<Entry>>>,
    used: Mutex<Vec<Weak<Entry>>>,
}

impl DecodedCache {
    pub fn new(decode: fn(&RawObject) -> Option<Item>) -> DecodedCache {
        DecodedCache { decode, gc_round: AtomicU32::new(1), recent: Mutex::default(), used: Mutex::default() }
    }

    /// Registers an object that was just decoded, on arrival or by a get. Drops the decoded form of the
    /// oldest one if there are more than [`MAX_RECENT_DECODED`] and no list has used it.
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

    /// Returns the decoded form for a get by name.
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

    /// Returns the decoded form for a list or index lookup. Controllers that list do so repeatedly, so the
    /// object stays decoded for [`IDLE_GC_ROUNDS`] rounds.
    pub fn item_in_use(&self, entry: &Arc<Entry>) -> Item {
        let round = self.gc_round.load(Ordering::Relaxed);
        if entry.last_used.swap(round, Ordering::Relaxed) == NEVER_USED {
            self.used.lock().push(Arc::downgrade(entry));
        }
        entry.decoded.lock().get_or_insert_with(|| entry.decode(self.decode)).clone()
    }

    /// Takes the decoded form of an object that was replaced or removed, to pass it to listeners.
    pub fn take_item(&self, entry: &Entry) -> Item {
        let decoded = entry.decoded.lock().take();
        decoded.unwrap_or_else(|| entry.decode(self.decode))
    }

    /// Drops the decoded form of objects that were not used recently. Returns whether any are left for a
    /// later round.
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
        // The item is dropped after the lock is released.
        let _item = self.decoded.lock().take();
    }

    fn decode(&self, decode: fn(&RawObject) -> Option<Item>) -> Item {
        decode(&self.raw).expect("the same bytes were decoded when the object was added")
    }
}
