//! What caches of all kinds have in common, without their types: there are sixty kinds, and one such machine will do.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use client::{Error, Feed, Key, News, Raw, controller_of, revision_of};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use parking_lot::{Mutex, RwLock};
use tokio::sync::{Notify, watch};

use super::entry::{Entry, Place, Warm};
use crate::labels::{Labels, Strings};

/// How long a writer waits for its own write to show up before it gives up and tries again later.
const SEEN_DEADLINE: Duration = Duration::from_secs(10);

/// How long after news or a look around the objects that are not looked at any more are let go of.
const SWEEP_EVERY: Duration = Duration::from_secs(5);

/// An object of the shelf's kind.
pub(crate) type Item = Arc<dyn Any + Send + Sync>;
/// Hears of an object before and after a change.
pub(crate) type Listener = Box<dyn Fn(Option<&Item>, Option<&Item>) + Send + Sync>;
/// Calls back with each value under which an object is found.
type Values = Box<dyn Fn(&Item, &mut dyn FnMut(&str)) + Send + Sync>;
/// The keys of the objects found under each value.
type Keys = HashMap<Arc<str>, BTreeSet<Key>>;

/// What a kind's type knows.
pub(crate) struct Kind {
    pub plural: &'static str,
    pub decode: fn(&Raw) -> Option<Item>,
    pub metadata: fn(&Item) -> &ObjectMeta,
}

/// The objects of one kind as of some revision.
pub(crate) struct Shelf {
    kind: Kind,
    state: RwLock<State>,
    warm: Warm,
    /// Told when there is something to sweep.
    dusty: Notify,
    /// Everything up to this revision is in; 0 until first filled.
    revision: watch::Sender<u64>,
    /// Held while changes are applied, so that a listener misses none and hears none twice.
    listeners: Mutex<Vec<Listener>>,
}

struct State {
    objects: BTreeMap<Key, Arc<Entry>>,
    /// By the uid of the controlling owner.
    by_owner: Keys,
    indexes: Vec<Index>,
    strings: Strings,
}

struct Index {
    name: &'static str,
    values: Values,
    found: Keys,
}

impl Shelf {
    pub fn new(kind: Kind, indexes: impl Iterator<Item = (&'static str, Values)>) -> Shelf {
        let indexes = indexes.map(|(name, values)| Index { name, values, found: HashMap::new() }).collect();
        let state = State {
            objects: BTreeMap::new(),
            by_owner: HashMap::new(),
            indexes,
            strings: Strings::default(),
        };
        Shelf {
            warm: Warm::new(kind.decode),
            kind,
            state: RwLock::new(state),
            dusty: Notify::new(),
            revision: watch::Sender::new(0),
            listeners: Mutex::default(),
        }
    }

    pub fn get(&self, key: &Key) -> Option<Item> {
        let entry = self.state.read().objects.get(key).cloned();
        self.typed(entry)
    }

    /// The object of this name and uid.
    pub fn get_exactly(&self, key: &Key, uid: &str) -> Option<Item> {
        let entry = self.state.read().objects.get(key).filter(|entry| &*entry.place.uid == uid).cloned();
        self.typed(entry)
    }

    /// Decodes it if need be, once nothing is locked any more.
    fn typed(&self, entry: Option<Arc<Entry>>) -> Option<Item> {
        let item = self.warm.item(&entry?);
        self.dusty.notify_one();
        Some(item)
    }

    pub fn len(&self) -> usize {
        self.state.read().objects.len()
    }

    /// All objects, in the order of their keys.
    pub fn all(&self) -> impl Iterator<Item = Item> {
        let entries = self.state.read().objects.values().cloned().collect();
        self.found(entries)
    }

    /// The objects of a namespace with wanted labels.
    pub fn in_namespace(
        &self,
        namespace: &str,
        wanted: &dyn Fn(&Labels) -> bool,
    ) -> impl Iterator<Item = Item> {
        let state = self.state.read();
        let range = state.objects.range((Bound::Included(Key::new(namespace, "")), Bound::Unbounded));
        let here = range.take_while(|(key, _)| &*key.namespace == namespace).map(|(_, entry)| entry);
        self.found(here.filter(|entry| wanted(&entry.place.labels)).cloned().collect())
    }

    pub fn owned_by(&self, uid: &str) -> impl Iterator<Item = Item> {
        let state = self.state.read();
        self.found(state.entries(state.by_owner.get(uid)))
    }

    /// Nothing where there is no such index.
    pub fn indexed(&self, index: &str, value: &str) -> impl Iterator<Item = Item> {
        let state = self.state.read();
        let index = state.indexes.iter().find(|row| row.name == index);
        self.found(state.entries(index.and_then(|index| index.found.get(value))))
    }

    /// What may have to be decoded is, once nothing is locked any more.
    fn found(&self, entries: Vec<Arc<Entry>>) -> impl Iterator<Item = Item> + use<'_> {
        self.dusty.notify_one();
        entries.into_iter().map(|entry| self.warm.item_found(&entry))
    }

    pub fn revision(&self) -> u64 {
        *self.revision.borrow()
    }

    /// Calls `listener` with every object there is and then with every change, in order.
    pub fn listen(&self, listener: Listener) {
        let mut listeners = self.listeners.lock();
        let entries: Vec<Arc<Entry>> = self.state.read().objects.values().cloned().collect();
        for entry in entries {
            listener(None, Some(&self.warm.item(&entry)));
        }
        self.dusty.notify_one();
        listeners.push(listener);
    }

    /// Waits until the shelf has been filled.
    pub async fn filled(&self) {
        let _ = self.revision.subscribe().wait_for(|revision| *revision > 0).await;
    }

    /// Waits until everything up to `revision` is in, however long that takes.
    pub async fn wait_for_revision(&self, revision: u64) {
        let _ = self.revision.subscribe().wait_for(|reached| *reached >= revision).await;
    }

    /// Waits until `condition` holds, looking again after every change.
    pub async fn until(&self, what: &str, condition: &(dyn Fn() -> bool + Sync)) -> Result<(), Error> {
        let mut changes = self.revision.subscribe();
        let wait = async {
            while !condition() {
                if changes.changed().await.is_err() {
                    return;
                }
            }
        };
        let waited = tokio::time::timeout(SEEN_DEADLINE, wait).await;
        waited.map_err(|_| Error::NotSeen(format!("{what} of {}", self.kind.plural)))
    }

    /// Follows `feed` for as long as it goes.
    pub async fn follow(&self, feed: &mut dyn Feed) -> Result<(), Error> {
        loop {
            match feed.next().await? {
                News::Everything { objects, revision } => self.replace(objects, revision),
                News::Changes { changes, revision } => self.apply(changes, revision),
            }
        }
    }

    fn replace(&self, objects: Vec<Raw>, revision: u64) {
        let listeners = self.listeners.lock();
        // What is gone goes before anything comes. Only where something is known are all looked at twice, since that
        // many cannot stay typed.
        let mut gone: BTreeSet<Key> = self.state.read().objects.keys().cloned().collect();
        if !gone.is_empty() {
            for object in objects.iter().filter_map(self.kind.decode) {
                gone.remove(&self.key(&object));
            }
        }
        for key in gone {
            let before = self.remove(&key);
            tell(&listeners, before.as_ref(), None);
        }
        let revision_of = |object: &Item| revision_of((self.kind.metadata)(object));
        for raw in objects {
            let Some(object) = (self.kind.decode)(&raw) else { continue };
            let before = self.put(self.key(&object), raw, object.clone());
            if before.as_ref().is_none_or(|before| revision_of(before) != revision_of(&object)) {
                self.tell_put(&listeners, before, &object);
            }
        }
        self.reach(revision);
    }

    fn apply(&self, changes: Vec<client::Change>, revision: u64) {
        let listeners = self.listeners.lock();
        for change in changes {
            let Some(object) = (self.kind.decode)(&change.object) else { continue };
            let key = self.key(&object);
            if change.deleted {
                let before = self.remove(&key);
                tell(&listeners, Some(before.as_ref().unwrap_or(&object)), None);
            } else {
                let before = self.put(key, change.object, object.clone());
                self.tell_put(&listeners, before, &object);
            }
        }
        self.reach(revision);
    }

    fn reach(&self, revision: u64) {
        // Also when the number is the same: whoever waits for a condition looks again.
        self.dusty.notify_one();
        self.revision.send_modify(|reached| *reached = revision.max(*reached).max(1));
    }

    fn key(&self, object: &Item) -> Key {
        let metadata = (self.kind.metadata)(object);
        let part = |part: &'_ Option<String>| part.clone().unwrap_or_default();
        Key::new(&part(&metadata.namespace), &part(&metadata.name))
    }

    fn tell_put(&self, listeners: &[Listener], before: Option<Item>, after: &Item) {
        let uid = |object: &Item| (self.kind.metadata)(object).uid.clone();
        match before {
            // Another object of the same name: the end of the first was missed.
            Some(before) if uid(&before) != uid(after) => {
                tell(listeners, Some(&before), None);
                tell(listeners, None, Some(after));
            }
            before => tell(listeners, before.as_ref(), Some(after)),
        }
    }

    fn put(&self, key: Key, raw: Raw, object: Item) -> Option<Item> {
        let metadata = (self.kind.metadata)(&object);
        let mut guard = self.state.write();
        let state = &mut *guard;
        let before = state.remove(&key);
        let owner = controller_of(metadata).map(|owner| state.strings.share(&owner.uid));
        if let Some(owner) = &owner {
            state.by_owner.entry(owner.clone()).or_default().insert(key.clone());
        }
        let mut values = Vec::new();
        for (number, index) in (0..).zip(&mut state.indexes) {
            (index.values)(&object, &mut |value| {
                let value = state.strings.share(value);
                index.found.entry(value.clone()).or_default().insert(key.clone());
                values.push((number, value));
            });
        }
        let uid = metadata.uid.as_deref().unwrap_or_default().into();
        let labels = state.strings.labels(metadata.labels.as_ref());
        let place = Place { uid, labels, owner, values: values.into() };
        let entry = Arc::new(Entry::new(raw, object, place));
        state.objects.insert(key, entry.clone());
        drop(guard);
        self.warm.arrived(&entry);
        before.map(|before| self.warm.last_item(&before))
    }

    fn remove(&self, key: &Key) -> Option<Item> {
        let entry = self.state.write().remove(key)?;
        Some(self.warm.last_item(&entry))
    }

    /// Answers whether something is left for later.
    pub fn sweep_once(&self) -> bool {
        self.warm.sweep()
    }

    /// Lets go of what nobody looks at any more, whenever there may be something.
    pub async fn sweep(&self) {
        loop {
            self.dusty.notified().await;
            tokio::time::sleep(SWEEP_EVERY).await;
            while self.sweep_once() {
                tokio::time::sleep(SWEEP_EVERY).await;
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
        if let Some(owner) = &entry.place.owner {
            forget(&mut self.by_owner, owner, key);
        }
        for (number, value) in &entry.place.values {
            forget(&mut self.indexes[usize::from(*number)].found, value, key);
        }
        Some(entry)
    }
}

fn tell(listeners: &[Listener], before: Option<&Item>, after: Option<&Item>) {
    for listener in listeners {
        listener(before, after);
    }
}

fn forget(index: &mut Keys, value: &str, key: &Key) {
    if let Some(keys) = index.get_mut(value) {
        keys.remove(key);
        if keys.is_empty() {
            index.remove(value);
        }
    }
}
