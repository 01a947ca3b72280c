//! All data: every key's current version, and older ones as far back as history reaches.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;

use bytes::Bytes;

use crate::{Entry, Error, Event, Page, Revision};

/// A fresh store is at this revision with nothing in it: clients read resourceVersion "0" as "any".
pub const FIRST: Revision = 1;

/// One decided write.
#[derive(Clone, Debug)]
pub struct Change {
    pub key: Arc<str>,
    pub value: Option<Bytes>,
    pub revision: Revision,
    /// Unix seconds, 0: never.
    pub expires: u64,
}

impl Change {
    /// The same in memory of its own, and in no more than it needs. What comes in was made among much that is freed when
    /// its request is over; living for hours, it would keep all the memory around it from being given back. Whoever commits
    /// is mostly one thread, and an allocator puts together what a thread asks for.
    pub fn settled(self) -> Change {
        let value = self.value.map(|value| Bytes::copy_from_slice(&value));
        Change { key: Arc::from(&*self.key), value, ..self }
    }
}

pub struct Memory {
    map: BTreeMap<Arc<str>, Chain>,
    /// One event for each revision after `trimmed`, oldest first.
    history: VecDeque<Event>,
    revision: Revision,
    /// Reads before this revision are refused.
    floor: Revision,
    /// Reads still under way at these revisions keep their versions from being trimmed.
    pins: BTreeMap<Revision, usize>,
    live_bytes: u64,
    /// Bytes of values that only history still holds.
    old_bytes: u64,
}

#[derive(Debug)]
pub struct Version {
    pub revision: Revision,
    pub expires: u64,
    pub value: Option<Bytes>,
}

struct Chain {
    last: Version,
    /// Oldest first; empty for most keys, and then without an allocation.
    older: Vec<Version>,
}

impl Default for Memory {
    fn default() -> Memory {
        Memory {
            map: BTreeMap::new(),
            history: VecDeque::new(),
            revision: FIRST,
            floor: FIRST,
            pins: BTreeMap::new(),
            live_bytes: 0,
            old_bytes: 0,
        }
    }
}

impl Memory {
    pub fn revision(&self) -> Revision {
        self.revision
    }

    pub fn floor(&self) -> Revision {
        self.floor
    }

    /// Roughly what a snapshot would take on disk.
    pub fn live_bytes(&self) -> u64 {
        self.live_bytes
    }

    pub fn old_bytes(&self) -> u64 {
        self.old_bytes
    }

    pub fn history_len(&self) -> usize {
        self.history.len()
    }

    /// The revision of the `n`th oldest event.
    pub fn history_at(&self, n: usize) -> Option<Revision> {
        self.history.get(n).map(Event::revision)
    }

    pub fn current(&self, key: &str) -> Option<Entry> {
        let (key, chain) = self.map.get_key_value(key)?;
        entry(key, &chain.last)
    }

    pub fn expiry(&self, key: &str) -> Option<u64> {
        let last = &self.map.get(key)?.last;
        last.value.is_some().then_some(last.expires)
    }

    pub fn list(
        &self,
        prefix: &str,
        from: Option<&str>,
        limit: usize,
        at: Option<Revision>,
    ) -> Result<Page, Error> {
        let revision = at.unwrap_or(self.revision);
        self.check_readable(revision)?;
        let mut found = self
            .range(prefix, from)
            .filter_map(|(key, chain)| chain.at(revision).and_then(|version| entry(key, version)));
        let mut entries = Vec::new();
        while limit == 0 || entries.len() < limit {
            match found.next() {
                Some(entry) => entries.push(entry),
                None => break,
            }
        }
        Ok(Page { entries, revision, remaining: found.count() })
    }

    pub fn check_readable(&self, revision: Revision) -> Result<(), Error> {
        if revision > self.revision {
            return Err(Error::Future { asked: revision, current: self.revision });
        }
        if revision < self.floor {
            return Err(Error::Compacted { asked: revision, oldest: self.floor });
        }
        Ok(())
    }

    /// Live versions as of a pinned revision, in order of key, for a snapshot: at most `max` keys after
    /// `after`, and the last key looked at (`None`: that was all).
    pub fn pinned_part(
        &self,
        revision: Revision,
        after: Option<&Arc<str>>,
        max: usize,
    ) -> (Vec<Change>, Option<Arc<str>>) {
        let start = after.map_or(Bound::Unbounded, |key| Bound::Excluded(key.as_ref()));
        let mut part = Vec::new();
        let mut last = None;
        for (seen, (key, chain)) in self.map.range::<str, _>((start, Bound::Unbounded)).enumerate() {
            if seen == max {
                return (part, last);
            }
            last = Some(key.clone());
            let Some(version) = chain.at(revision) else { continue };
            if let Some(value) = &version.value {
                part.push(Change {
                    key: key.clone(),
                    value: Some(value.clone()),
                    revision: version.revision,
                    expires: version.expires,
                });
            }
        }
        (part, None)
    }

    /// Events under `prefix` after `cursor`, at most `max`, and the revision they reach to.
    pub fn events_after(&self, cursor: Revision, prefix: &str, max: usize) -> (Vec<Event>, Revision) {
        let start = self.history.partition_point(|event| event.revision() <= cursor);
        let mut events = Vec::new();
        for event in self.history.range(start..) {
            if event_key(event).starts_with(prefix) {
                if events.len() == max {
                    return (events, event.revision() - 1);
                }
                events.push(event.clone());
            }
        }
        (events, self.revision)
    }

    /// Makes the change visible and returns the event that tells of it.
    pub fn apply(&mut self, change: Change) -> Event {
        let Change { key, value, revision, expires } = change;
        self.revision = revision;
        let size = |value: &Bytes| (key.len() + value.len() + 48) as u64;
        self.live_bytes += value.as_ref().map_or(0, size);
        let version = Version { revision, expires, value: value.clone() };
        let mut created = true;
        // The map's own key is shared by every event and entry of it.
        let shared = match self.map.get_key_value(&*key).map(|(key, _)| key.clone()) {
            Some(shared) => {
                let chain = self.map.get_mut(&*shared).expect("it was just found");
                let before = std::mem::replace(&mut chain.last, version);
                if let Some(value) = &before.value {
                    created = false;
                    self.live_bytes -= size(value);
                    self.old_bytes += value.len() as u64;
                }
                chain.older.push(before);
                shared
            }
            None => {
                self.map.insert(key.clone(), Chain { last: version, older: Vec::new() });
                key
            }
        };
        let event = match value {
            Some(value) => Event::Put { entry: Entry { key: shared, value, revision }, created },
            None => Event::Delete { key: shared, revision },
        };
        self.history.push_back(event.clone());
        event
    }

    /// Takes in one entry of a snapshot, which has no history.
    pub fn load(&mut self, change: Change) {
        let Change { key, value, revision, expires } = change;
        self.live_bytes += (key.len() + value.as_ref().map_or(0, Bytes::len) + 48) as u64;
        let last = Version { revision, expires, value };
        self.map.insert(key, Chain { last, older: Vec::new() });
    }

    /// Skips revisions that may have been handed out and lost.
    pub fn advance(&mut self, revision: Revision) {
        self.revision = self.revision.max(revision);
    }

    /// Ends history before `revision`. [`Memory::trim`] then frees it.
    pub fn set_floor(&mut self, revision: Revision) {
        self.floor = self.floor.max(revision.min(self.revision));
    }

    /// Frees up to `max` events no reader may ask for any more; false when none are left.
    pub fn trim(&mut self, max: usize) -> bool {
        let until = self.pins.keys().next().map_or(self.floor, |pin| self.floor.min(*pin));
        for _ in 0..max {
            match self.history.front() {
                Some(event) if event.revision() <= until => {}
                _ => {
                    // What a busy time took is not kept for a quiet one.
                    if self.history.capacity() / 4 > self.history.len() {
                        self.history.shrink_to(self.history.len() * 2);
                    }
                    return false;
                }
            }
            let event = self.history.pop_front().expect("it was just looked at");
            let key = event_key(&event);
            let Some(chain) = self.map.get_mut(key) else { continue };
            let readable = chain.older.partition_point(|version| version.revision <= until);
            let keep_from = if chain.last.revision <= until { readable } else { readable.saturating_sub(1) };
            for version in chain.older.drain(..keep_from) {
                self.old_bytes -= version.value.map_or(0, |value| value.len() as u64);
            }
            if chain.older.is_empty() {
                chain.older.shrink_to_fit();
                if chain.last.value.is_none() && chain.last.revision <= until {
                    self.map.remove(key);
                }
            }
        }
        true
    }

    pub fn pin(&mut self) -> Revision {
        *self.pins.entry(self.revision).or_default() += 1;
        self.revision
    }

    pub fn unpin(&mut self, revision: Revision) {
        if let Some(count) = self.pins.get_mut(&revision) {
            *count -= 1;
            if *count == 0 {
                self.pins.remove(&revision);
            }
        }
    }

    /// Every live key that has a lifetime.
    pub fn expiries(&self) -> impl Iterator<Item = (u64, Arc<str>)> {
        self.map
            .iter()
            .filter(|(_, chain)| chain.last.value.is_some() && chain.last.expires > 0)
            .map(|(key, chain)| (chain.last.expires, key.clone()))
    }

    fn range<'a>(
        &'a self,
        prefix: &'a str,
        from: Option<&str>,
    ) -> impl Iterator<Item = (&'a Arc<str>, &'a Chain)> {
        let start = from.map_or(prefix, |from| from.max(prefix));
        self.map
            .range::<str, _>((Bound::Included(start), Bound::Unbounded))
            .take_while(move |(key, _)| key.starts_with(prefix))
    }
}

impl Chain {
    fn at(&self, revision: Revision) -> Option<&Version> {
        if self.last.revision <= revision {
            return Some(&self.last);
        }
        self.older.iter().rev().find(|version| version.revision <= revision)
    }
}

fn entry(key: &Arc<str>, version: &Version) -> Option<Entry> {
    let value = version.value.clone()?;
    Some(Entry { key: key.clone(), value, revision: version.revision })
}

pub fn event_key(event: &Event) -> &str {
    match event {
        Event::Put { entry, .. } => &entry.key,
        Event::Delete { key, .. } => key,
        Event::Progress(_) => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_quiet_time_keeps_no_room_for_a_busy_one() {
        let mut memory = Memory::default();
        for revision in FIRST + 1..10_000 {
            let value = Some(Bytes::from_static(b"x"));
            memory.apply(Change { key: format!("/k/{revision}").into(), value, revision, expires: 0 });
        }
        memory.set_floor(9_900);
        while memory.trim(1000) {}
        assert_eq!(memory.history_len(), 99);
        assert!(memory.history.capacity() < 400, "{}", memory.history.capacity());
    }

    #[test]
    fn what_is_kept_is_alone_in_its_memory() {
        let body = Bytes::from("of which a part is the value".to_owned());
        let key: Arc<str> = "/k/x".into();
        let change = Change { key: key.clone(), value: Some(body.slice(3..8)), revision: 7, expires: 9 };
        let settled = change.clone().settled();
        assert_eq!((&settled.key, &settled.value), (&change.key, &change.value));
        assert_eq!((settled.revision, settled.expires), (7, 9));
        assert!(!Arc::ptr_eq(&settled.key, &key));
        let room = settled.value.and_then(|value| value.try_into_mut().ok()).map(|room| room.capacity());
        assert_eq!(room, Some(5));
    }

    proptest! {
        /// Against a model that keeps every state whole: any readable revision lists what was there then,
        /// and once trimmed to the present nothing old is left.
        #[test]
        fn reads_at_a_revision_see_that_state(
            writes in prop::collection::vec((0..6u8, prop::option::of(0..9u8)), 1..60),
            floors in prop::collection::vec((0..60usize, 0..60u64), 0..4),
        ) {
            let mut memory = Memory::default();
            let mut states = vec![BTreeMap::<String, u8>::new()];
            for (n, (key, value)) in writes.iter().enumerate() {
                let key = format!("/k/{key}");
                let mut state = states[n].clone();
                match value {
                    Some(value) => state.insert(key.clone(), *value),
                    None => state.remove(&key),
                };
                states.push(state);
                let value = value.map(|value| Bytes::copy_from_slice(&[value]));
                let revision = FIRST + 1 + n as u64;
                memory.apply(Change { key: key.into(), value, revision, expires: 0 });
                for (when, floor) in &floors {
                    if *when == n {
                        memory.set_floor(*floor);
                        while memory.trim(3) {}
                    }
                }
                for (n, state) in states.iter().enumerate() {
                    let page = memory.list("/k/", None, 0, Some(FIRST + n as u64));
                    if FIRST + (n as u64) < memory.floor() {
                        prop_assert!(page.is_err());
                        continue;
                    }
                    let found: BTreeMap<_, _> = page
                        .unwrap()
                        .entries
                        .iter()
                        .map(|entry| (entry.key.to_string(), entry.value[0]))
                        .collect();
                    prop_assert_eq!(&found, state);
                }
            }
            memory.set_floor(u64::MAX);
            while memory.trim(7) {}
            prop_assert_eq!(memory.old_bytes(), 0);
            prop_assert_eq!(memory.history_len(), 0);
            prop_assert_eq!(memory.map.len(), states[states.len() - 1].len());
        }
    }
}
