//! All objects of one kind, with indexes; decoded once for all loops of the process that look at them at the time
//! ([`entry`]). What needs no types is in [`shelf`].

mod entry;
pub(crate) mod shelf;
#[cfg(test)]
mod tests;

use std::marker::PhantomData;
use std::sync::Arc;

use api::selector::LabelSelector;
use client::{Error, Key, Object, Raw};

use crate::labels::Labels;

use shelf::{Item, Kind, Shelf};

/// The name of the index of objects without a controller.
pub(crate) const ORPHANS: &str = "orphans";

/// The objects of one kind as of some revision.
pub struct Cache<T> {
    pub(crate) shelf: Arc<Shelf>,
    kind: PhantomData<fn() -> T>,
}

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

impl<T: Object> Cache<T> {
    pub fn new(indexes: &[Index<T>]) -> Arc<Cache<T>> {
        let kind = Kind {
            plural: T::URL_PATH_SEGMENT,
            decode: decode::<T>,
            metadata: |item| whole::<T>(item).metadata(),
        };
        let untyped = |index: &Index<T>| {
            let values = index.values;
            let values = move |item: &Item, found: &mut dyn FnMut(&str)| values(whole::<T>(item), found);
            (index.name, Box::new(values) as _)
        };
        let shelf = Arc::new(Shelf::new(kind, indexes.iter().map(untyped)));
        Arc::new(Cache { shelf, kind: PhantomData })
    }

    pub fn get(&self, key: &Key) -> Option<Arc<T>> {
        self.shelf.get(key).map(typed)
    }

    /// The object of this name and uid.
    pub fn get_exactly(&self, key: &Key, uid: &str) -> Option<Arc<T>> {
        self.shelf.get_exactly(key, uid).map(typed)
    }

    pub fn all(&self) -> Vec<Arc<T>> {
        self.shelf.all().map(typed).collect()
    }

    pub fn len(&self) -> usize {
        self.shelf.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn in_namespace(&self, namespace: &str) -> Vec<Arc<T>> {
        self.shelf.in_namespace(namespace, &|_| true).map(typed).collect()
    }

    /// The objects of a namespace whose labels match.
    pub fn matching(&self, namespace: &str, selector: &LabelSelector) -> Vec<Arc<T>> {
        self.labelled(namespace, |labels| labels.matched_by(selector))
    }

    /// The objects of a namespace whose labels are wanted; of the others nothing is decoded.
    pub fn labelled(&self, namespace: &str, wanted: impl Fn(&Labels) -> bool) -> Vec<Arc<T>> {
        self.shelf.in_namespace(namespace, &wanted).map(typed).collect()
    }

    /// The objects whose controlling owner has this uid.
    pub fn owned_by(&self, uid: &str) -> Vec<Arc<T>> {
        self.shelf.owned_by(uid).map(typed).collect()
    }

    /// The objects an index finds under `value`; none where there is no such index.
    pub fn indexed(&self, index: &str, value: &str) -> Vec<Arc<T>> {
        self.shelf.indexed(index, value).map(typed).collect()
    }

    /// The objects of a namespace that nobody controls, for kinds that have owners of several kinds.
    pub fn orphans(&self, namespace: &str) -> Vec<Arc<T>> {
        self.indexed(ORPHANS, namespace)
    }

    pub fn revision(&self) -> u64 {
        self.shelf.revision()
    }

    /// Calls `listener` with every object there is and then with every change, in order. It must be quick.
    pub fn listen(&self, listener: impl Fn(Changed<'_, T>) + Send + Sync + 'static) {
        self.shelf.listen(Box::new(move |before, after| {
            let (before, after) = (before.cloned().map(typed), after.cloned().map(typed));
            listener(Changed { before: before.as_ref(), after: after.as_ref() });
        }));
    }

    /// Waits until the cache has been filled.
    pub async fn filled(&self) {
        self.shelf.filled().await;
    }

    /// Waits until everything up to `revision` is in.
    pub async fn seen(&self, revision: u64) -> Result<(), Error> {
        self.shelf.until(&format!("revision {revision}"), &|| self.revision() >= revision).await
    }

    /// Waits until the object of this uid is gone or on its way.
    pub async fn seen_deleted(&self, key: &Key, uid: &str) -> Result<(), Error> {
        let gone = || self.get_exactly(key, uid).is_none_or(|object| object.is_deleting());
        self.shelf.until(&format!("the deletion of {key}"), &gone).await
    }

    /// Waits until `condition` holds, looking again after every change.
    pub async fn until(&self, what: &str, condition: impl Fn() -> bool + Sync) -> Result<(), Error> {
        self.shelf.until(what, &condition).await
    }
}

/// A shelf holds what its kind's `decode` has made.
const ONE_KIND: &str = "a shelf holds objects of one kind";

fn typed<T: Object>(item: Item) -> Arc<T> {
    item.downcast().expect(ONE_KIND)
}

fn whole<T: Object>(item: &Item) -> &T {
    item.downcast_ref().expect(ONE_KIND)
}

/// The typed form, without `managedFields`: no loop reads them, and they are half of an object.
fn decode<T: Object>(raw: &Raw) -> Option<Item> {
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
