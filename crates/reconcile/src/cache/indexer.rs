//! Untyped part of [`super::Cache`], like client-go's `Indexer`: storage, indexes, listeners and the watch.
//! It is not generic, because sixty kinds would mean sixty copies of this code.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use client::{Error, Key, RawObject, Watch, WatchEvent, controller_of, revision_of};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use parking_lot::{Mutex, RwLock};
use tokio::sync::{Notify, watch};

use super::entry::{DecodedCache, Entry, EntryKeys};
use crate::labels::{Labels, StringPool};

/// How long a writer waits for its own write to appear in the cache before it returns an error and is
/// retried.
const CACHE_WAIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Delay between the use of a cache and the garbage collection of decoded objects.
const GC_INTERVAL: Duration = Duration::from_secs(5);

/// A decoded object of the indexer's kind.
pub(crate) type Item = Arc<dyn Any + Send + Sync>;
/// Called with an object before and after a change.
pub(crate) type Listener = Box<dyn Fn(Option<&Item>, Option<&Item>) + Send + Sync>;
/// Calls back with each index value of an object.
type ItemIndexFunc = Box<dyn Fn(&Item, &mut dyn FnMut(&str)) + Send + Sync>;
/// Keys of the objects with each index value.
type KeysByValue = HashMap<Arc<str>, BTreeSet<Key>>;

/// The type-dependent functions of a kind.
pub(crate) struct ResourceType {
    pub plural: &'static str,
    pub decode: fn(&RawObject) -> Option<Item>,
    pub metadata: fn(&Item) -> &ObjectMeta,
}

/// The objects of one kind, as of some revision.
pub(crate) struct Indexer {
    kind: ResourceType,
    state: RwLock<State>,
    decoded: DecodedCache,
    /// Notified when a garbage collection is due.
    gc_notify: Notify,
    /// The cache contains every change up to this revision; 0 until the initial list.
    revision: watch::Sender<u64>,
    /// Held while changes are applied, so that a new listener neither misses a change nor sees one twice.
    listeners: Mutex<Vec<Listener>>,
}

struct State {
    objects: BTreeMap<Key, Arc<Entry>>,
    /// By UID of the controlling owner.
    by_owner: KeysByValue,
    indexes: Vec<Index>,
    strings: StringPool,
}

struct Index {
    name: &'static str,
    values: ItemIndexFunc,
    keys: KeysByValue,
}

impl Indexer {
    pub fn new(kind: ResourceType, indexes: impl Iterator<Item = (&'static str, ItemIndexFunc)>) -> Indexer {
        let indexes = indexes.map(|(name, values)| Index { name, values, keys: HashMap::new() }).collect();
        let state = State {
            objects: BTreeMap::new(),
            by_owner: HashMap::new(),
            indexes,
            strings: StringPool::default(),
        };
        Indexer {
            decoded: DecodedCache::new(kind.decode),
            kind,
            state: RwLock::new(state),
            gc_notify: Notify::new(),
            revision: watch::Sender::new(0),
            listeners: Mutex::default(),
        }
    }

    pub fn get(&self, key: &Key) -> Option<Item> {
        let entry = self.state.read().objects.get(key).cloned();
        self.decode_entry(entry)
    }

    /// Returns the object with this key if it still has this UID.
    pub fn get_exactly(&self, key: &Key, uid: &str) -> Option<Item> {
        let entry = self.state.read().objects.get(key).filter(|entry| &*entry.keys.uid == uid).cloned();
        self.decode_entry(entry)
    }

    /// Decodes the object if necessary. Call it without the state lock held: decoding is slow.
    fn decode_entry(&self, entry: Option<Arc<Entry>>) -> Option<Item> {
        let item = self.decoded.item(&entry?);
        self.gc_notify.notify_one();
        Some(item)
    }

    pub fn len(&self) -> usize {
        self.state.read().objects.len()
    }

    /// Returns all objects, sorted by key.
    pub fn all(&self) -> impl Iterator<Item = Item> {
        let entries = self.state.read().objects.values().cloned().collect();
        self.decode_entries(entries)
    }

    /// Returns the objects in a namespace whose labels satisfy `predicate`.
    pub fn in_namespace(
        &self,
        namespace: &str,
        predicate: &dyn Fn(&Labels) -> bool,
    ) -> impl Iterator<Item = Item> {
        let state = self.state.read();
        let range = state.objects.range((Bound::Included(Key::new(namespace, "")), Bound::Unbounded));
        let here = range.take_while(|(key, _)| &*key.namespace == namespace).map(|(_, entry)| entry);
        self.decode_entries(here.filter(|entry| predicate(&entry.keys.labels)).cloned().collect())
    }

    pub fn owned_by(&self, uid: &str) -> impl Iterator<Item = Item> {
        let state = self.state.read();
        self.decode_entries(state.entries(state.by_owner.get(uid)))
    }

    /// Empty if there is no such index.
    pub fn indexed(&self, index: &str, value: &str) -> impl Iterator<Item = Item> {
        let state = self.state.read();
        let index = state.indexes.iter().find(|row| row.name == index);
        self.decode_entries(state.entries(index.and_then(|index| index.keys.get(value))))
    }

    /// Decodes lazily, while the iterator is consumed. The state lock is released by then.
    fn decode_entries(&self, entries: Vec<Arc<Entry>>) -> impl Iterator<Item = Item> + use<'_> {
        self.gc_notify.notify_one();
        entries.into_iter().map(|entry| self.decoded.item_in_use(&entry))
    }

    pub fn revision(&self) -> u64 {
        *self.revision.borrow()
    }

    /// Calls `listener` for every object and then for every change, in order.
    pub fn listen(&self, listener: Listener) {
        let mut listeners = self.listeners.lock();
        let entries: Vec<Arc<Entry>> = self.state.read().objects.values().cloned().collect();
        for entry in entries {
            listener(None, Some(&self.decoded.item(&entry)));
        }
        self.gc_notify.notify_one();
        listeners.push(listener);
    }

    /// Waits for the initial list.
    pub async fn wait_for_sync(&self) {
        let _ = self.revision.subscribe().wait_for(|revision| *revision > 0).await;
    }

    /// Waits without a timeout until the cache contains every change up to `revision`.
    pub async fn wait_for_revision(&self, revision: u64) {
        let _ = self.revision.subscribe().wait_for(|reached| *reached >= revision).await;
    }

    /// Waits until `condition` is true. It is evaluated again after every change.
    pub async fn wait_until(&self, what: &str, condition: &(dyn Fn() -> bool + Sync)) -> Result<(), Error> {
        let mut changes = self.revision.subscribe();
        let wait = async {
            while !condition() {
                if changes.changed().await.is_err() {
                    return;
                }
            }
        };
        let result = tokio::time::timeout(CACHE_WAIT_TIMEOUT, wait).await;
        result.map_err(|_| Error::NotCached(format!("{what} of {}", self.kind.plural)))
    }

    /// Applies list and watch events until the watch fails.
    pub async fn run_watch(&self, watcher: &mut dyn Watch) -> Result<(), Error> {
        loop {
            match watcher.next().await? {
                WatchEvent::Replace { objects, revision } => self.replace(objects, revision),
                WatchEvent::Changes { changes, revision } => self.apply(changes, revision),
            }
        }
    }

    fn replace(&self, objects: Vec<RawObject>, revision: u64) {
        let listeners = self.listeners.lock();
        // Deletions come before additions. To find them, the whole list is decoded a first time, and again
        // below: this many objects cannot stay decoded at once. The first pass is skipped if the cache is
        // empty.
        let mut removed: BTreeSet<Key> = self.state.read().objects.keys().cloned().collect();
        if !removed.is_empty() {
            for object in objects.iter().filter_map(self.kind.decode) {
                removed.remove(&self.key(&object));
            }
        }
        for key in removed {
            let before = self.remove(&key);
            notify_listeners(&listeners, before.as_ref(), None);
        }
        let revision_of = |object: &Item| revision_of((self.kind.metadata)(object));
        for raw in objects {
            let Some(object) = (self.kind.decode)(&raw) else { continue };
            let before = self.put(self.key(&object), raw, object.clone());
            if before.as_ref().is_none_or(|before| revision_of(before) != revision_of(&object)) {
                self.notify_put(&listeners, before, &object);
            }
        }
        self.set_revision(revision);
    }

    fn apply(&self, changes: Vec<client::WatchChange>, revision: u64) {
        let listeners = self.listeners.lock();
        for change in changes {
            let Some(object) = (self.kind.decode)(&change.object) else { continue };
            let key = self.key(&object);
            if change.deleted {
                let before = self.remove(&key);
                notify_listeners(&listeners, Some(before.as_ref().unwrap_or(&object)), None);
            } else {
                let before = self.put(key, change.object, object.clone());
                self.notify_put(&listeners, before, &object);
            }
        }
        self.set_revision(revision);
    }

    fn set_revision(&self, revision: u64) {
        // Notify even if the revision is the same: waiters evaluate their condition again.
        self.gc_notify.notify_one();
        self.revision.send_modify(|reached| *reached = revision.max(*reached).max(1));
    }

    fn key(&self, object: &Item) -> Key {
        let metadata = (self.kind.metadata)(object);
        let part = |part: &'_ Option<String>| part.clone().unwrap_or_default();
        Key::new(&part(&metadata.namespace), &part(&metadata.name))
    }

    fn notify_put(&self, listeners: &[Listener], before: Option<Item>, after: &Item) {
        let uid = |object: &Item| (self.kind.metadata)(object).uid.clone();
        match before {
            // Same name but another UID: the watch missed the deletion of the first object.
            Some(before) if uid(&before) != uid(after) => {
                notify_listeners(listeners, Some(&before), None);
                notify_listeners(listeners, None, Some(after));
            }
            before => notify_listeners(listeners, before.as_ref(), Some(after)),
        }
    }

    fn put(&self, key: Key, raw: RawObject, object: Item) -> Option<Item> {
        let metadata = (self.kind.metadata)(&object);
        let mut guard = self.state.write();
        let state = &mut *guard;
        let before = state.remove(&key);
        let owner = controller_of(metadata).map(|owner| state.strings.get_or_insert(&owner.uid));
        if let Some(owner) = &owner {
            state.by_owner.entry(owner.clone()).or_default().insert(key.clone());
        }
        let mut values = Vec::new();
        for (number, index) in (0..).zip(&mut state.indexes) {
            (index.values)(&object, &mut |value| {
                let value = state.strings.get_or_insert(value);
                index.keys.entry(value.clone()).or_default().insert(key.clone());
                values.push((number, value));
            });
        }
        let uid = metadata.uid.as_deref().unwrap_or_default().into();
        let labels = state.strings.labels(metadata.labels.as_ref());
        let entry_keys = EntryKeys { uid, labels, owner, values: values.into() };
        let entry = Arc::new(Entry::new(raw, object, entry_keys));
        state.objects.insert(key, entry.clone());
        drop(guard);
        self.decoded.add_recent(&entry);
        before.map(|before| self.decoded.take_item(&before))
    }

    fn remove(&self, key: &Key) -> Option<Item> {
        let entry = self.state.write().remove(key)?;
        Some(self.decoded.take_item(&entry))
    }

    /// Runs one garbage collection round. Returns whether another one is needed.
    pub fn collect_garbage(&self) -> bool {
        self.decoded.collect_garbage()
    }

    /// Drops the decoded form of unused objects for as long as the cache is in use.
    pub async fn run_garbage_collector(&self) {
        loop {
            self.gc_notify.notified().await;
            tokio::time::sleep(GC_INTERVAL).await;
            while self.collect_garbage() {
                tokio::time::sleep(GC_INTERVAL).await;
            }
        }
    }
}

impl State {
    fn entries(&self, keys: Option<&BTreeSet<Key>>) -> Vec<Arc<Entry>> {
        keys.into_iter().flatten().filter_map(|key| self.objects.get(key).cloned()).collect()
    }

    fn remove(&mut self, key: &Key) -> Option<Arc<Entry>> {
        let entry = self.objects.remove(key)?;
        if let Some(owner) = &entry.keys.owner {
            remove_key(&mut self.by_owner, owner, key);
        }
        for (number, value) in &entry.keys.values {
            remove_key(&mut self.indexes[usize::from(*number)].keys, value, key);
        }
        Some(entry)
    }
}

fn notify_listeners(listeners: &[Listener], before: Option<&Item>, after: Option<&Item>) {
    for listener in listeners {
        listener(before, after);
    }
}

fn remove_key(index: &mut KeysByValue, value: &str, key: &Key) {
    if let Some(keys) = index.get_mut(value) {
        keys.remove(key);
        if keys.is_empty() {
            index.remove(value);
        }
    }
}
