//! The in-memory MVCC store: the current version of every key, and older versions as far as the
//! history reaches. Counterpart upstream: etcd's `mvcc` package.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;

use bytes::Bytes;

use crate::{Entry, Error, Event, Page, Revision};

/// The revision of an empty store. Not 0, because clients interpret resourceVersion "0" as "any".
pub const INITIAL_REVISION: Revision = 1;

/// A write that has passed its precondition.
#[derive(Clone, Debug)]
pub struct Change {
    pub key: Arc<str>,
    pub value: Option<Bytes>,
    pub revision: Revision,
    /// Unix seconds. 0: never.
    pub expires: u64,
}

impl Change {
    /// Copies key and value into new allocations of exact size. Incoming data is allocated between
    /// short-lived data of its request; kept for hours, it would prevent the allocator from
    /// returning that memory. The commit thread does most of the copies, and an allocator groups
    /// allocations by thread.
    pub fn into_owned(self) -> Change {
        let value = self.value.map(|value| Bytes::copy_from_slice(&value));
        Change { key: Arc::from(&*self.key), value, ..self }
    }
}

pub struct MvccStore {
    keys: BTreeMap<Arc<str>, KeyVersions>,
    /// One event for each revision after the last trim, oldest first.
    history: VecDeque<Event>,
    revision: Revision,
    /// Reads before this revision fail.
    compact_revision: Revision,
    /// The revisions of running snapshots with their counts. Versions visible at a pinned revision
    /// are not trimmed.
    pinned: BTreeMap<Revision, usize>,
    live_bytes: u64,
    /// Bytes of values that are only in the history.
    old_bytes: u64,
}

#[derive(Debug)]
pub struct Version {
    pub revision: Revision,
    pub expires: u64,
    pub value: Option<Bytes>,
}

struct KeyVersions {
    last: Version,
    /// Oldest first. Empty for most keys, without an allocation.
    older: Vec<Version>,
}

impl Default for MvccStore {
    fn default() -> MvccStore {
        MvccStore {
            keys: BTreeMap::new(),
            history: VecDeque::new(),
            revision: INITIAL_REVISION,
            compact_revision: INITIAL_REVISION,
            pinned: BTreeMap::new(),
            live_bytes: 0,
            old_bytes: 0,
        }
    }
}

impl MvccStore {
    pub fn revision(&self) -> Revision {
        self.revision
    }

    pub fn compact_revision(&self) -> Revision {
        self.compact_revision
    }

    /// The approximate size of a snapshot.
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

    pub fn get(&self, key: &str) -> Option<Entry> {
        let (key, versions) = self.keys.get_key_value(key)?;
        to_entry(key, &versions.last)
    }

    pub fn expiry(&self, key: &str) -> Option<u64> {
        let last = &self.keys.get(key)?.last;
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
        self.check_revision(revision)?;
        let mut found = self.range(prefix, from).filter_map(|(key, versions)| {
            versions.at_revision(revision).and_then(|version| to_entry(key, version))
        });
        let mut entries = Vec::new();
        while limit == 0 || entries.len() < limit {
            match found.next() {
                Some(entry) => entries.push(entry),
                None => break,
            }
        }
        Ok(Page { entries, revision, remaining: found.count() })
    }

    pub fn check_revision(&self, revision: Revision) -> Result<(), Error> {
        if revision > self.revision {
            return Err(Error::Future { requested: revision, current: self.revision });
        }
        if revision < self.compact_revision {
            return Err(Error::Compacted { requested: revision, oldest: self.compact_revision });
        }
        Ok(())
    }

    /// The live versions at a pinned revision, in key order, for a snapshot. Visits up to `max`
    /// keys after `after`. Also returns the last visited key, or `None` at the end.
    pub fn pinned_page(
        &self,
        revision: Revision,
        after: Option<&Arc<str>>,
        max: usize,
    ) -> (Vec<Change>, Option<Arc<str>>) {
        let start = after.map_or(Bound::Unbounded, |key| Bound::Excluded(key.as_ref()));
        let mut page = Vec::new();
        let mut last = None;
        for (visited, (key, versions)) in self.keys.range::<str, _>((start, Bound::Unbounded)).enumerate() {
            if visited == max {
                return (page, last);
            }
            last = Some(key.clone());
            let Some(version) = versions.at_revision(revision) else { continue };
            if let Some(value) = &version.value {
                page.push(Change {
                    key: key.clone(),
                    value: Some(value.clone()),
                    revision: version.revision,
                    expires: version.expires,
                });
            }
        }
        (page, None)
    }

    /// Up to `max` events under `prefix` after `cursor`, and the revision up to which they are
    /// complete.
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

    /// Makes a change visible and returns its event.
    pub fn apply(&mut self, change: Change) -> Event {
        let Change { key, value, revision, expires } = change;
        self.revision = revision;
        let size = |value: &Bytes| (key.len() + value.len() + 48) as u64;
        self.live_bytes += value.as_ref().map_or(0, size);
        let version = Version { revision, expires, value: value.clone() };
        let mut created = true;
        // All events and entries of a key share the allocation of the map's key.
        let shared_key = match self.keys.get_key_value(&*key).map(|(key, _)| key.clone()) {
            Some(shared_key) => {
                let versions = self.keys.get_mut(&*shared_key).expect("key was found above");
                let before = std::mem::replace(&mut versions.last, version);
                if let Some(value) = &before.value {
                    created = false;
                    self.live_bytes -= size(value);
                    self.old_bytes += value.len() as u64;
                }
                versions.older.push(before);
                shared_key
            }
            None => {
                self.keys.insert(key.clone(), KeyVersions { last: version, older: Vec::new() });
                key
            }
        };
        let event = match value {
            Some(value) => Event::Put { entry: Entry { key: shared_key, value, revision }, created },
            None => Event::Delete { key: shared_key, revision },
        };
        self.history.push_back(event.clone());
        event
    }

    /// Loads an entry of a snapshot, which has no history.
    pub fn load(&mut self, change: Change) {
        let Change { key, value, revision, expires } = change;
        self.live_bytes += (key.len() + value.as_ref().map_or(0, Bytes::len) + 48) as u64;
        let last = Version { revision, expires, value };
        self.keys.insert(key, KeyVersions { last, older: Vec::new() });
    }

    /// Skips revisions that may have been assigned to writes that were lost.
    pub fn advance(&mut self, revision: Revision) {
        self.revision = self.revision.max(revision);
    }

    /// Ends the history before `revision`. [`MvccStore::trim`] frees it.
    pub fn set_compact_revision(&mut self, revision: Revision) {
        self.compact_revision = self.compact_revision.max(revision.min(self.revision));
    }

    /// Frees up to `max` events that are no longer readable. Returns false when none is left.
    pub fn trim(&mut self, max: usize) -> bool {
        let until =
            self.pinned.keys().next().map_or(self.compact_revision, |pin| self.compact_revision.min(*pin));
        for _ in 0..max {
            match self.history.front() {
                Some(event) if event.revision() <= until => {}
                _ => {
                    // Returns capacity that was only needed under load.
                    if self.history.capacity() / 4 > self.history.len() {
                        self.history.shrink_to(self.history.len() * 2);
                    }
                    return false;
                }
            }
            let event = self.history.pop_front().expect("history is not empty");
            let key = event_key(&event);
            let Some(versions) = self.keys.get_mut(key) else { continue };
            // The newest version at or before `until` stays, because it is the visible one at that
            // revision.
            let readable = versions.older.partition_point(|version| version.revision <= until);
            let trim_until =
                if versions.last.revision <= until { readable } else { readable.saturating_sub(1) };
            for version in versions.older.drain(..trim_until) {
                self.old_bytes -= version.value.map_or(0, |value| value.len() as u64);
            }
            if versions.older.is_empty() {
                versions.older.shrink_to_fit();
                if versions.last.value.is_none() && versions.last.revision <= until {
                    self.keys.remove(key);
                }
            }
        }
        true
    }

    pub fn pin(&mut self) -> Revision {
        *self.pinned.entry(self.revision).or_default() += 1;
        self.revision
    }

    pub fn unpin(&mut self, revision: Revision) {
        if let Some(count) = self.pinned.get_mut(&revision) {
            *count -= 1;
            if *count == 0 {
                self.pinned.remove(&revision);
            }
        }
    }

    /// All live keys with an expiry time.
    pub fn expire_times(&self) -> impl Iterator<Item = (u64, Arc<str>)> {
        self.keys
            .iter()
            .filter(|(_, versions)| versions.last.value.is_some() && versions.last.expires > 0)
            .map(|(key, versions)| (versions.last.expires, key.clone()))
    }

    fn range<'a>(
        &'a self,
        prefix: &'a str,
        from: Option<&str>,
    ) -> impl Iterator<Item = (&'a Arc<str>, &'a KeyVersions)> {
        let start = from.map_or(prefix, |from| from.max(prefix));
        self.keys
            .range::<str, _>((Bound::Included(start), Bound::Unbounded))
            .take_while(move |(key, _)| key.starts_with(prefix))
    }
}

impl KeyVersions {
    fn at_revision(&self, revision: Revision) -> Option<&Version> {
        if self.last.revision <= revision {
            return Some(&self.last);
        }
        self.older.iter().rev().find(|version| version.revision <= revision)
    }
}

fn to_entry(key: &Arc<str>, version: &Version) -> Option<Entry> {
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
    fn trim_returns_history_capacity() {
        let mut mvcc = MvccStore::default();
        for revision in INITIAL_REVISION + 1..10_000 {
            let value = Some(Bytes::from_static(b"x"));
            mvcc.apply(Change { key: format!("/k/{revision}").into(), value, revision, expires: 0 });
        }
        mvcc.set_compact_revision(9_900);
        while mvcc.trim(1000) {}
        assert_eq!(mvcc.history_len(), 99);
        assert!(mvcc.history.capacity() < 400, "{}", mvcc.history.capacity());
    }

    #[test]
    fn into_owned_copies_key_and_value() {
        let body = Bytes::from("of which a part is the value".to_owned());
        let key: Arc<str> = "/k/x".into();
        let change = Change { key: key.clone(), value: Some(body.slice(3..8)), revision: 7, expires: 9 };
        let owned = change.clone().into_owned();
        assert_eq!((&owned.key, &owned.value), (&change.key, &change.value));
        assert_eq!((owned.revision, owned.expires), (7, 9));
        assert!(!Arc::ptr_eq(&owned.key, &key));
        let buffer = owned.value.and_then(|value| value.try_into_mut().ok()).map(|buffer| buffer.capacity());
        assert_eq!(buffer, Some(5));
    }

    proptest! {
        /// Compares with a model that stores every state completely: a list at any readable
        /// revision returns that state, and after a full trim no old versions are left.
        #[test]
        fn list_returns_state_at_revision(
            writes in prop::collection::vec((0..6u8, prop::option::of(0..9u8)), 1..60),
            compact_revisions in prop::collection::vec((0..60usize, 0..60u64), 0..4),
        ) {
            let mut mvcc = MvccStore::default();
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
                let revision = INITIAL_REVISION + 1 + n as u64;
                mvcc.apply(Change { key: key.into(), value, revision, expires: 0 });
                for (when, compact_revision) in &compact_revisions {
                    if *when == n {
                        mvcc.set_compact_revision(*compact_revision);
                        while mvcc.trim(3) {}
                    }
                }
                for (n, state) in states.iter().enumerate() {
                    let page = mvcc.list("/k/", None, 0, Some(INITIAL_REVISION + n as u64));
                    if INITIAL_REVISION + (n as u64) < mvcc.compact_revision() {
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
            mvcc.set_compact_revision(u64::MAX);
            while mvcc.trim(7) {}
            prop_assert_eq!(mvcc.old_bytes(), 0);
            prop_assert_eq!(mvcc.history_len(), 0);
            prop_assert_eq!(mvcc.keys.len(), states[states.len() - 1].len());
        }
    }
}
