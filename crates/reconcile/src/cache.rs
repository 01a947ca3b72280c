//! Typed cache of all objects of one kind, with indexes: a shared informer and its lister upstream. Objects
//! are decoded once for all controllers of the process and stay decoded while they are in use ([`entry`]).
//! The parts that do not depend on the type are in [`indexer`].

mod entry;
pub(crate) mod indexer;
#[cfg(test)]
mod tests;

use std::marker::PhantomData;
use std::sync::Arc;

use api::selector::LabelSelector;
use client::{Error, Key, Object, RawObject};

use crate::labels::Labels;

use indexer::{Indexer, Item, ResourceType};

/// Name of the index, by namespace, of the objects without a controlling owner.
pub(crate) const ORPHANS: &str = "orphans";

/// The objects of one kind, as of some revision.
pub struct Cache<T> {
    pub(crate) indexer: Arc<Indexer>,
    kind: PhantomData<fn() -> T>,
}

/// An object before and after a change. `before` is `None` for an addition, `after` for a deletion.
pub struct ObjectUpdate<'a, T> {
    pub before: Option<&'a Arc<T>>,
    pub after: Option<&'a Arc<T>>,
}

impl<'a, T> ObjectUpdate<'a, T> {
    /// The state after the change, or the last known state of a deleted object.
    pub fn latest(&self) -> &'a Arc<T> {
        self.after.or(self.before).expect("an update has an object before or after the change")
    }
}

/// An index: its name and the function that computes an object's values in it.
#[derive(Debug)]
pub struct Index<T> {
    pub name: &'static str,
    pub values: IndexFunc<T>,
}

/// Calls back with each index value of an object.
pub type IndexFunc<T> = fn(&T, &mut dyn FnMut(&str));

impl<T: Object> Cache<T> {
    pub fn new(indexes: &[Index<T>]) -> Arc<Cache<T>> {
        let kind = ResourceType {
            plural: T::URL_PATH_SEGMENT,
            decode: decode::<T>,
            metadata: |item| downcast_ref::<T>(item).metadata(),
        };
        let to_item_index = |index: &Index<T>| {
            let values = index.values;
            let values =
                move |item: &Item, found: &mut dyn FnMut(&str)| values(downcast_ref::<T>(item), found);
            (index.name, Box::new(values) as _)
        };
        let indexer = Arc::new(Indexer::new(kind, indexes.iter().map(to_item_index)));
        Arc::new(Cache { indexer, kind: PhantomData })
    }

    pub fn get(&self, key: &Key) -> Option<Arc<T>> {
        self.indexer.get(key).map(downcast)
    }

    /// Returns the object with this key if it still has this UID.
    pub fn get_exactly(&self, key: &Key, uid: &str) -> Option<Arc<T>> {
        self.indexer.get_exactly(key, uid).map(downcast)
    }

    pub fn all(&self) -> Vec<Arc<T>> {
        self.indexer.all().map(downcast).collect()
    }

    pub fn len(&self) -> usize {
        self.indexer.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn in_namespace(&self, namespace: &str) -> Vec<Arc<T>> {
        self.indexer.in_namespace(namespace, &|_| true).map(downcast).collect()
    }

    /// Returns the objects in a namespace whose labels match the selector.
    pub fn matching(&self, namespace: &str, selector: &LabelSelector) -> Vec<Arc<T>> {
        self.list_by_labels(namespace, |labels| labels.matched_by(selector))
    }

    /// Returns the objects in a namespace whose labels satisfy `predicate`. The others are not decoded.
    pub fn list_by_labels(&self, namespace: &str, predicate: impl Fn(&Labels) -> bool) -> Vec<Arc<T>> {
        self.indexer.in_namespace(namespace, &predicate).map(downcast).collect()
    }

    /// Returns the objects whose controlling owner has this UID.
    pub fn owned_by(&self, uid: &str) -> Vec<Arc<T>> {
        self.indexer.owned_by(uid).map(downcast).collect()
    }

    /// Returns the objects with `value` in the named index; empty if there is no such index.
    pub fn indexed(&self, index: &str, value: &str) -> Vec<Arc<T>> {
        self.indexer.indexed(index, value).map(downcast).collect()
    }

    /// Returns the objects in a namespace that have no controlling owner. Only for kinds with an orphan
    /// index.
    pub fn orphans(&self, namespace: &str) -> Vec<Arc<T>> {
        self.indexed(ORPHANS, namespace)
    }

    pub fn revision(&self) -> u64 {
        self.indexer.revision()
    }

    /// Calls `listener` for every object in the cache and then for every change, in order. The listener runs
    /// while the listener lock is held, so it must not block.
    pub fn listen(&self, listener: impl Fn(ObjectUpdate<'_, T>) + Send + Sync + 'static) {
        self.indexer.listen(Box::new(move |before, after| {
            let (before, after) = (before.cloned().map(downcast), after.cloned().map(downcast));
            listener(ObjectUpdate { before: before.as_ref(), after: after.as_ref() });
        }));
    }

    /// Waits for the initial list.
    pub async fn wait_for_sync(&self) {
        self.indexer.wait_for_sync().await;
    }

    /// Waits until the cache contains every change up to `revision`. Fails after a timeout.
    pub async fn wait_until_revision(&self, revision: u64) -> Result<(), Error> {
        self.indexer.wait_until(&format!("revision {revision}"), &|| self.revision() >= revision).await
    }

    /// Waits until the object with this UID is deleted or has a deletionTimestamp.
    pub async fn wait_until_deleted(&self, key: &Key, uid: &str) -> Result<(), Error> {
        let is_deleted = || self.get_exactly(key, uid).is_none_or(|object| object.is_deleting());
        self.indexer.wait_until(&format!("the deletion of {key}"), &is_deleted).await
    }

    /// Waits until `condition` is true. It is evaluated again after every change of the cache.
    pub async fn wait_until(&self, what: &str, condition: impl Fn() -> bool + Sync) -> Result<(), Error> {
        self.indexer.wait_until(what, &condition).await
    }
}

/// Invariant of the downcasts below: an indexer holds only what its `decode` function returned.
const SINGLE_KIND: &str = "an indexer holds objects of one kind";

fn downcast<T: Object>(item: Item) -> Arc<T> {
    item.downcast().expect(SINGLE_KIND)
}

fn downcast_ref<T: Object>(item: &Item) -> &T {
    item.downcast_ref().expect(SINGLE_KIND)
}

/// Decodes an object without `managedFields`: no controller reads them, and they are half of an object's
/// size.
fn decode<T: Object>(raw: &RawObject) -> Option<Item> {
    match serde_json::from_slice::<T>(&raw.json()) {
        Ok(mut object) => {
            let metadata = object.metadata_mut();
            metadata.managed_fields = None;
            if let Some(revision) = raw.revision {
                metadata.resource_version = Some(revision.to_string());
            }
            Some(Arc::new(object))
        }
        Err(error) => {
            tracing::error!(%error, kind = T::KIND, "failed to decode object, skipping it");
            None
        }
    }
}
