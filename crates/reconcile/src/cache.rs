//! All objects of one kind, typed, with indexes; decoded once for every loop in the process.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use api::selector::LabelSelector;
use client::{Error, Feed, Key, News, Object, Raw, controller_of};
use parking_lot::{Mutex, RwLock};
use tokio::sync::watch;

/// How long a writer waits for its own write to show up before it gives up and tries again later.
const SEEN_DEADLINE: Duration = Duration::from_secs(10);

/// The name of the index of objects without a controller.
pub(crate) const ORPHANS: &str = "orphans";

/// The objects of one kind as of some revision.
pub struct Cache<T> {
    state: RwLock<State<T>>,
    /// Everything up to this revision is in; 0 until first filled.
    revision: watch::Sender<u64>,
    /// Held while changes are applied, so that a listener misses none and hears none twice.
    listeners: Mutex<Vec<Listener<T>>>,
}

struct State<T> {
    objects: BTreeMap<Key, Arc<T>>,
    /// By the uid of the controlling owner.
    by_owner: Keys,
    indexes: Vec<(Index<T>, Keys)>,
}

/// The keys of the objects found under each value.
type Keys = HashMap<Box<str>, BTreeSet<Key>>;
type Listener<T> = Box<dyn Fn(Changed<'_, T>) + Send + Sync>;

/// One object before and after a change; one of the two may be missing.
pub struct Changed<'a, T> {
    pub before: Option<&'a Arc<T>>,
    pub after: Option<&'a Arc<T>>,
}

impl<'a, T> Changed<'a, T> {
    /// The newest state there is.
    pub fn newest(&self) -> &'a Arc<T> {
        self.after.or(self.before).expect("a change is about an object")
    }
}

/// A way to find objects: tells the values under which an object is found.
#[derive(Debug)]
pub struct Index<T> {
    pub name: &'static str,
    pub values: Values<T>,
}

/// Calls back with each value of an object.
pub type Values<T> = fn(&T, &mut dyn FnMut(&str));

// Derived ones would ask the same of `T`.
impl<T> Clone for Index<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Index<T> {}

impl<T: Object> Cache<T> {
    pub fn new(indexes: &[Index<T>]) -> Arc<Cache<T>> {
        let indexes = indexes.iter().map(|index| (*index, HashMap::new())).collect();
        let state = State { objects: BTreeMap::new(), by_owner: HashMap::new(), indexes };
        Arc::new(Cache {
            state: RwLock::new(state),
            revision: watch::Sender::new(0),
            listeners: Mutex::default(),
        })
    }

    pub fn get(&self, key: &Key) -> Option<Arc<T>> {
        self.state.read().objects.get(key).cloned()
    }

    /// The object of this name and uid.
    pub fn get_exactly(&self, key: &Key, uid: &str) -> Option<Arc<T>> {
        self.get(key).filter(|object| object.uid() == uid)
    }

    pub fn all(&self) -> Vec<Arc<T>> {
        self.state.read().objects.values().cloned().collect()
    }

    pub fn len(&self) -> usize {
        self.state.read().objects.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn in_namespace(&self, namespace: &str) -> Vec<Arc<T>> {
        let state = self.state.read();
        let from = Bound::Included(Key::new(namespace, ""));
        let range = state.objects.range((from, Bound::Unbounded));
        range.take_while(|(key, _)| &*key.namespace == namespace).map(|(_, object)| object.clone()).collect()
    }

    /// The objects of a namespace whose labels match.
    pub fn matching(&self, namespace: &str, selector: &LabelSelector) -> Vec<Arc<T>> {
        let mut objects = self.in_namespace(namespace);
        objects.retain(|object| selector.matches(|name| object.label(name)));
        objects
    }

    /// The objects whose controlling owner has this uid.
    pub fn owned_by(&self, uid: &str) -> Vec<Arc<T>> {
        let state = self.state.read();
        state.found(state.by_owner.get(uid))
    }

    /// The objects an index finds under `value`; none where there is no such index.
    pub fn indexed(&self, index: &str, value: &str) -> Vec<Arc<T>> {
        let state = self.state.read();
        let found = state.indexes.iter().find(|(row, _)| row.name == index);
        state.found(found.and_then(|(_, values)| values.get(value)))
    }

    /// The objects of a namespace that nobody controls, for kinds that have owners of several kinds.
    pub fn orphans(&self, namespace: &str) -> Vec<Arc<T>> {
        self.indexed(ORPHANS, namespace)
    }

    pub fn revision(&self) -> u64 {
        *self.revision.borrow()
    }

    /// Calls `listener` with every object there is and then with every change, in order. It must be quick.
    pub fn listen(&self, listener: impl Fn(Changed<'_, T>) + Send + Sync + 'static) {
        let mut listeners = self.listeners.lock();
        for object in self.all() {
            listener(Changed { before: None, after: Some(&object) });
        }
        listeners.push(Box::new(listener));
    }

    /// Waits until the cache has been filled.
    pub async fn filled(&self) {
        let _ = self.revision.subscribe().wait_for(|revision| *revision > 0).await;
    }

    /// Waits until everything up to `revision` is in.
    pub async fn seen(&self, revision: u64) -> Result<(), Error> {
        self.until(&format!("revision {revision} of {}", T::URL_PATH_SEGMENT), || self.revision() >= revision)
            .await
    }

    /// Waits until the object of this uid is gone or on its way.
    pub async fn seen_deleted(&self, key: &Key, uid: &str) -> Result<(), Error> {
        let gone = || self.get_exactly(key, uid).is_none_or(|object| object.is_deleting());
        self.until(&format!("the deletion of {} {key}", T::URL_PATH_SEGMENT), gone).await
    }

    /// Waits until `condition` holds, looking again after every change.
    pub async fn until(&self, what: &str, condition: impl Fn() -> bool) -> Result<(), Error> {
        let mut changes = self.revision.subscribe();
        let wait = async {
            while !condition() {
                if changes.changed().await.is_err() {
                    return;
                }
            }
        };
        let waited = tokio::time::timeout(SEEN_DEADLINE, wait).await;
        waited.map_err(|_| Error::NotSeen(what.to_owned()))
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
        let objects: Vec<Arc<T>> = objects.iter().filter_map(decode).collect();
        let kept: BTreeSet<Key> = objects.iter().map(|object| object.key()).collect();
        let gone: Vec<Arc<T>> =
            self.all().into_iter().filter(|object| !kept.contains(&object.key())).collect();
        for object in gone {
            let before = self.state.write().remove(&object.key());
            tell(&listeners, before.as_ref(), None);
        }
        for object in objects {
            let before = self.state.write().put(object.clone());
            if before.as_ref().is_none_or(|before| before.revision() != object.revision()) {
                tell_put(&listeners, before, &object);
            }
        }
        self.reach(revision);
    }

    fn apply(&self, changes: Vec<client::Change>, revision: u64) {
        let listeners = self.listeners.lock();
        for change in changes {
            let Some(object) = decode::<T>(&change.object) else { continue };
            if change.deleted {
                let before = self.state.write().remove(&object.key());
                tell(&listeners, Some(before.as_ref().unwrap_or(&object)), None);
            } else {
                let before = self.state.write().put(object.clone());
                tell_put(&listeners, before, &object);
            }
        }
        self.reach(revision);
    }

    fn reach(&self, revision: u64) {
        // Also when the number is the same: whoever waits for a condition looks again.
        self.revision.send_modify(|reached| *reached = revision.max(*reached).max(1));
    }
}

fn tell<T>(listeners: &[Listener<T>], before: Option<&Arc<T>>, after: Option<&Arc<T>>) {
    for listener in listeners {
        listener(Changed { before, after });
    }
}

fn tell_put<T: Object>(listeners: &[Listener<T>], before: Option<Arc<T>>, after: &Arc<T>) {
    match before {
        // Another object of the same name: the end of the first was missed.
        Some(before) if before.uid() != after.uid() => {
            tell(listeners, Some(&before), None);
            tell(listeners, None, Some(after));
        }
        before => tell(listeners, before.as_ref(), Some(after)),
    }
}

impl<T: Object> State<T> {
    fn found(&self, keys: Option<&BTreeSet<Key>>) -> Vec<Arc<T>> {
        keys.into_iter().flatten().filter_map(|key| self.objects.get(key).cloned()).collect()
    }

    fn put(&mut self, object: Arc<T>) -> Option<Arc<T>> {
        let before = self.remove(&object.key());
        let key = object.key();
        if let Some(owner) = controller_of(object.metadata()) {
            self.by_owner.entry(owner.uid.as_str().into()).or_default().insert(key.clone());
        }
        for (index, values) in &mut self.indexes {
            (index.values)(&object, &mut |value| {
                values.entry(value.into()).or_default().insert(key.clone());
            });
        }
        self.objects.insert(key, object);
        before
    }

    fn remove(&mut self, key: &Key) -> Option<Arc<T>> {
        let object = self.objects.remove(key)?;
        if let Some(owner) = controller_of(object.metadata()) {
            forget(&mut self.by_owner, &owner.uid, key);
        }
        for (index, values) in &mut self.indexes {
            (index.values)(&object, &mut |value| forget(values, value, key));
        }
        Some(object)
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

/// The typed form, without `managedFields`: no loop reads them, and they are half of an object.
fn decode<T: Object>(raw: &Raw) -> Option<Arc<T>> {
    match serde_json::from_slice::<T>(&raw.bytes) {
        Ok(mut object) => {
            let metadata = object.metadata_mut();
            metadata.managed_fields = None;
            if let Some(revision) = raw.revision {
                metadata.resource_version = Some(revision.to_string());
            }
            Some(Arc::new(object))
        }
        Err(error) => {
            tracing::error!(%error, kind = T::KIND, "an object cannot be decoded and is left out");
            None
        }
    }
}

#[cfg(test)]
mod tests;
