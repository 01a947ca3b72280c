//! One object on a shelf: its bytes always, its typed form only as long as somebody looks at it.
//!
//! A typed pod is ten times its bytes, which in the API server's process are shared with it. Most objects of a big
//! cluster are looked at when they come or change and not again for hours.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use client::Raw;
use parking_lot::Mutex;

use super::shelf::Item;
use crate::labels::Labels;

/// How many of the last that came stay typed, for those who are about to look at them.
const ARRIVALS: usize = 1024;
/// How many sweeps an object stays typed after it was last found.
const IDLE_SWEEPS: u32 = 2;
/// [`Entry::found`] of one that nobody has found since it came.
const NEVER: u32 = 0;

pub(crate) struct Entry {
    raw: Raw,
    pub place: Place,
    typed: Mutex<Option<Item>>,
    /// The sweep before which it was last found among others.
    found: AtomicU32,
}

/// Where an object is found besides its name.
pub(crate) struct Place {
    pub uid: Box<str>,
    pub labels: Labels,
    /// The uid of the controlling owner.
    pub owner: Option<Arc<str>>,
    /// Each index that finds it, by number, and the value it is found under.
    pub values: Box<[(u8, Arc<str>)]>,
}

impl Entry {
    pub fn new(raw: Raw, item: Item, place: Place) -> Entry {
        Entry { raw, place, typed: Mutex::new(Some(item)), found: AtomicU32::new(NEVER) }
    }
}

/// Which of a shelf's objects are typed.
pub(crate) struct Warm {
    decode: fn(&Raw) -> Option<Item>,
    /// Counts from 1.
    sweep: AtomicU32,
    arrived: Mutex<VecDeque<Weak<Entry>>>,
    found: Mutex<Vec<Weak<Entry>>>,
}

impl Warm {
    pub fn new(decode: fn(&Raw) -> Option<Item>) -> Warm {
        Warm { decode, sweep: AtomicU32::new(1), arrived: Mutex::default(), found: Mutex::default() }
    }

    /// One more has come, or was looked at by its name, and is typed.
    pub fn arrived(&self, entry: &Arc<Entry>) {
        let mut arrived = self.arrived.lock();
        arrived.push_back(Arc::downgrade(entry));
        if arrived.len() > ARRIVALS
            && let Some(oldest) = arrived.pop_front().and_then(|oldest| oldest.upgrade())
            && oldest.found.load(Ordering::Relaxed) == NEVER
        {
            drop(arrived);
            oldest.cool();
        }
    }

    /// The typed form of one that was asked for by name.
    pub fn item(&self, entry: &Arc<Entry>) -> Item {
        let mut typed = entry.typed.lock();
        if let Some(item) = &*typed {
            return item.clone();
        }
        let item = entry.decode(self.decode);
        *typed = Some(item.clone());
        drop(typed);
        self.arrived(entry);
        item
    }

    /// The typed form of one that was found among others. Who looks through many looks again, so it stays typed
    /// until nobody has for a while.
    pub fn item_found(&self, entry: &Arc<Entry>) -> Item {
        let sweep = self.sweep.load(Ordering::Relaxed);
        if entry.found.swap(sweep, Ordering::Relaxed) == NEVER {
            self.found.lock().push(Arc::downgrade(entry));
        }
        entry.typed.lock().get_or_insert_with(|| entry.decode(self.decode)).clone()
    }

    /// The form it had before it was replaced; not kept.
    pub fn last_item(&self, entry: &Entry) -> Item {
        let typed = entry.typed.lock().take();
        typed.unwrap_or_else(|| entry.decode(self.decode))
    }

    /// Lets go of what nobody has looked at lately. Answers whether anything is left for a later sweep.
    pub fn sweep(&self) -> bool {
        let now = self.sweep.fetch_add(1, Ordering::Relaxed) + 1;
        let arrived = std::mem::take(&mut *self.arrived.lock());
        for entry in arrived.iter().filter_map(Weak::upgrade) {
            if entry.found.load(Ordering::Relaxed) == NEVER {
                entry.cool();
            }
        }
        let mut found = self.found.lock();
        found.retain(|entry| {
            let Some(entry) = entry.upgrade() else { return false };
            let stays = now - entry.found.load(Ordering::Relaxed) < IDLE_SWEEPS;
            if !stays {
                entry.found.store(NEVER, Ordering::Relaxed);
                entry.cool();
            }
            stays
        });
        found.shrink_to_fit();
        !found.is_empty()
    }
}

impl Entry {
    fn cool(&self) {
        // Freed outside the lock.
        let _item = self.typed.lock().take();
    }

    fn decode(&self, decode: fn(&Raw) -> Option<Item>) -> Item {
        decode(&self.raw).expect("the same bytes were decoded when they came")
    }
}
