//! All objects of one kind, with indexes; decoded once for all loops of the process that look at them at the time
//! ([`entry`]). What needs no types is in [`shelf`].

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

/// The name of the index of objects without a controller.
pub(crate) const ORPHANS: &str = "orphans";

/// The objects of one kind as of some revision.
pub struct Cache<T> {
    pub(crate) indexer: Arc<Indexer>,
    kind: PhantomData<fn() -> T>,
}

/// One object before and after a change; one of the two may be missing.
pub struct ObjectUpdate<'a, T> {
    pub before: Option<&'a Arc<T>>,
    pub after: Option<&'a Arc<T>>,
}

impl<'a, T> ObjectUpdate<'a, T> {
    /// The newest state there is.
    pub fn latest(&self) -> &'a Arc<T> {
        self.after.or(self.before).expect("a change is about an object")
    }
}

/// A way to find objects: tells the values under which an object is found.
#[derive(Debug)]
pub struct Index<T> {
    pub name: &'static str,
    pub values: IndexFunc<T>,
}

/// Calls back with each value of an object.
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

    /// The object of this name and uid.
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

    /// The objects of a namespace whose labels match.
    pub fn matching(&self, namespace: &str, selector: &LabelSelector) -> Vec<Arc<T>> {
        self.list_by_labels(namespace, |labels| labels.matched_by(selector))
    }

    /// The objects of a namespace whose labels are wanted; of the others nothing is decoded.
    pub fn list_by_labels(&self, namespace: &str, predicate: impl Fn(&Labels) -> bool) -> Vec<Arc<T>> {
        self.indexer.in_namespace(namespace, &predicate).map(downcast).collect()
    }

    /// The objects whose controlling owner has this uid.
    pub fn owned_by(&self, uid: &str) -> Vec<Arc<T>> {
        self.indexer.owned_by(uid).map(downcast).collect()
    }

    /// The objects an index finds under `value`; none where there is no such index.
    pub fn indexed(&self, index: &str, value: &str) -> Vec<Arc<T>> {
        self.indexer.indexed(index, value).map(downcast).collect()
    }

    /// The objects of a namespace that nobody controls, for kinds that have owners of several kinds.
    pub fn orphans(&self, namespace: &str) -> Vec<Arc<T>> {
        self.indexed(ORPHANS, namespace)
    }

    pub fn revision(&self) -> u64 {
        self.indexer.revision()
    }

    /// Calls `listener` with every object there is and then with every change, in order. It must be quick.
    pub fn listen(&self, listener: impl Fn(ObjectUpdate<'_, T>) + Send + Sync + 'static) {
        self.indexer.listen(Box::new(move |before, after| {
            let (before, after) = (before.cloned().map(downcast), after.cloned().map(downcast));
            listener(ObjectUpdate { before: before.as_ref(), after: after.as_ref() });
        }));
    }

    /// Waits until the cache has been filled.
    pub async fn wait_for_sync(&self) {
        self.indexer.wait_for_sync().await;
    }

    /// Waits until everything up to `revision` is in.
    pub async fn wait_until_revision(&self, revision: u64) -> Result<(), Error> {
        self.indexer.wait_until(&format!("revision {revision}"), &|| self.revision() >= revision).await
    }

    /// Waits until the object of this uid is gone or on its way.
    pub async fn wait_until_deleted(&self, key: &Key, uid: &str) -> Result<(), Error> {
        let is_deleted = || self.get_exactly(key, uid).is_none_or(|object| object.is_deleting());
        self.indexer.wait_until(&format!("the deletion of {key}"), &is_deleted).await
    }

    /// Waits until `condition` holds, looking again after every change.
    pub async fn wait_until(&self, what: &str, condition: impl Fn() -> bool + Sync) -> Result<(), Error> {
        self.indexer.wait_until(what, &condition).await
    }
}

/// A shelf holds what its kind's `decode` has made.
const SINGLE_KIND: &str = "a shelf holds objects of one kind";

fn downcast<T: Object>(item: Item) -> Arc<T> {
    item.downcast().expect(SINGLE_KIND)
}

fn downcast_ref<T: Object>(item: &Item) -> &T {
    item.downcast_ref().expect(SINGLE_KIND)
}

/// The typed form, without `managedFields`: no loop reads them, and they are half of an object.
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
            tracing::error!(%error, kind = T::KIND, "an object cannot be decoded and is left out");
            None
        }
    }
}
