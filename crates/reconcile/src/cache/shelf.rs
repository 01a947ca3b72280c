//! What caches of all kinds have in common, without their types: there are sixty kinds, and one such machine will do.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use client::{Error, Feed, Key, News, Raw, controller_of, revision_of};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use parking_lot::{Mutex, RwLock};
use tokio::sync::watch;

/// How long a writer waits for its own write to show up before it gives up and tries again later.
const SEEN_DEADLINE: Duration = Duration::from_secs(10);

/// An object of the shelf's kind.
pub(crate) type Item = Arc<dyn Any + Send + Sync>;
/// Hears of an object before and after a change.
pub(crate) type Listener = Box<dyn Fn(Option<&Item>, Option<&Item>) + Send + Sync>;
/// Calls back with each value under which an object is found.
type Values = Box<dyn Fn(&Item, &mut dyn FnMut(&str)) + Send + Sync>;
/// The keys of the objects found under each value.
type Keys = HashMap<Box<str>, BTreeSet<Key>>;

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
    /// Everything up to this revision is in; 0 until first filled.
    revision: watch::Sender<u64>,
    /// Held while changes are applied, so that a listener misses none and hears none twice.
    listeners: Mutex<Vec<Listener>>,
}

struct State {
    objects: BTreeMap<Key, Item>,
    /// By the uid of the controlling owner.
    by_owner: Keys,
    indexes: Vec<Index>,
}

struct Index {
    name: &'static str,
    values: Values,
    found: Keys,
}

impl Shelf {
    pub fn new(kind: Kind, indexes: impl Iterator<Item = (&'static str, Values)>) -> Shelf {
        let indexes = indexes.map(|(name, values)| Index { name, values, found: HashMap::new() }).collect();
        Shelf {
            kind,
            state: RwLock::new(State { objects: BTreeMap::new(), by_owner: HashMap::new(), indexes }),
            revision: watch::Sender::new(0),
            listeners: Mutex::default(),
        }
    }

    pub fn get(&self, key: &Key) -> Option<Item> {
        self.state.read().objects.get(key).cloned()
    }

    pub fn len(&self) -> usize {
        self.state.read().objects.len()
    }

    /// Calls back with all objects, in the order of their keys.
    pub fn all(&self, found: &mut dyn FnMut(&Item)) {
        self.state.read().objects.values().for_each(found);
    }

    pub fn in_namespace(&self, namespace: &str, found: &mut dyn FnMut(&Item)) {
        let state = self.state.read();
        let range = state.objects.range((Bound::Included(Key::new(namespace, "")), Bound::Unbounded));
        range.take_while(|(key, _)| &*key.namespace == namespace).for_each(|(_, object)| found(object));
    }

    pub fn owned_by(&self, uid: &str, found: &mut dyn FnMut(&Item)) {
        let state = self.state.read();
        state.find(state.by_owner.get(uid), found);
    }

    /// Nothing where there is no such index.
    pub fn indexed(&self, index: &str, value: &str, found: &mut dyn FnMut(&Item)) {
        let state = self.state.read();
        let index = state.indexes.iter().find(|row| row.name == index);
        state.find(index.and_then(|index| index.found.get(value)), found);
    }

    pub fn revision(&self) -> u64 {
        *self.revision.borrow()
    }

    /// Calls `listener` with every object there is and then with every change, in order.
    pub fn listen(&self, listener: Listener) {
        let mut listeners = self.listeners.lock();
        let objects: Vec<Item> = self.state.read().objects.values().cloned().collect();
        for object in objects {
            listener(None, Some(&object));
        }
        listeners.push(listener);
    }

    /// Waits until the shelf has been filled.
    pub async fn filled(&self) {
        let _ = self.revision.subscribe().wait_for(|revision| *revision > 0).await;
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
                News::Everything { objects, revision } => self.replace(&objects, revision),
                News::Changes { changes, revision } => self.apply(&changes, revision),
            }
        }
    }

    fn replace(&self, objects: &[Raw], revision: u64) {
        let listeners = self.listeners.lock();
        let objects: Vec<Item> = objects.iter().filter_map(self.kind.decode).collect();
        let kept: BTreeSet<Key> = objects.iter().map(|object| self.key(object)).collect();
        let gone: Vec<Key> =
            self.state.read().objects.keys().filter(|key| !kept.contains(key)).cloned().collect();
        for key in gone {
            let before = self.remove(&key);
            tell(&listeners, before.as_ref(), None);
        }
        let revision_of = |object: &Item| revision_of((self.kind.metadata)(object));
        for object in objects {
            let before = self.put(object.clone());
            if before.as_ref().is_none_or(|before| revision_of(before) != revision_of(&object)) {
                self.tell_put(&listeners, before, &object);
            }
        }
        self.reach(revision);
    }

    fn apply(&self, changes: &[client::Change], revision: u64) {
        let listeners = self.listeners.lock();
        for change in changes {
            let Some(object) = (self.kind.decode)(&change.object) else { continue };
            if change.deleted {
                let before = self.remove(&self.key(&object));
                tell(&listeners, Some(before.as_ref().unwrap_or(&object)), None);
            } else {
                let before = self.put(object.clone());
                self.tell_put(&listeners, before, &object);
            }
        }
        self.reach(revision);
    }

    fn reach(&self, revision: u64) {
        // Also when the number is the same: whoever waits for a condition looks again.
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

    fn put(&self, object: Item) -> Option<Item> {
        let key = self.key(&object);
        let mut state = self.state.write();
        let before = state.remove(&self.kind, &key);
        if let Some(owner) = controller_of((self.kind.metadata)(&object)) {
            state.by_owner.entry(owner.uid.as_str().into()).or_default().insert(key.clone());
        }
        for Index { values, found, .. } in &mut state.indexes {
            values(&object, &mut |value| {
                found.entry(value.into()).or_default().insert(key.clone());
            });
        }
        state.objects.insert(key, object);
        before
    }

    fn remove(&self, key: &Key) -> Option<Item> {
        self.state.write().remove(&self.kind, key)
    }
}

impl State {
    fn find(&self, keys: Option<&BTreeSet<Key>>, found: &mut dyn FnMut(&Item)) {
        keys.into_iter().flatten().filter_map(|key| self.objects.get(key)).for_each(found);
    }

    fn remove(&mut self, kind: &Kind, key: &Key) -> Option<Item> {
        let object = self.objects.remove(key)?;
        if let Some(owner) = controller_of((kind.metadata)(&object)) {
            forget(&mut self.by_owner, &owner.uid, key);
        }
        for Index { values, found, .. } in &mut self.indexes {
            values(&object, &mut |value| forget(found, value, key));
        }
        Some(object)
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
