//! Current objects of a kind, for tasks of the binding cycle that wait for an object to reach some state.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

/// Objects by `namespace/name`, with a notification for changes.
pub struct ObjectWaiter<T> {
    objects: Mutex<HashMap<String, Arc<T>>>,
    changed: Notify,
}

impl<T> Default for ObjectWaiter<T> {
    fn default() -> ObjectWaiter<T> {
        ObjectWaiter { objects: Mutex::new(HashMap::new()), changed: Notify::new() }
    }
}

impl<T> ObjectWaiter<T> {
    /// Stores the new state of an object; `None` if it was deleted.
    pub fn set(&self, key: &str, object: Option<Arc<T>>) {
        match object {
            Some(object) => drop(self.objects.lock().insert(key.to_owned(), object)),
            None => drop(self.objects.lock().remove(key)),
        }
        self.changed.notify_waiters();
    }

    /// Waits until `answer` returns a value for the object.
    pub async fn wait<R>(&self, key: &str, answer: impl Fn(Option<&T>) -> Option<R>) -> R {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // Register before the check: a change in between would otherwise be missed.
            changed.as_mut().enable();
            if let Some(found) = answer(self.objects.lock().get(key).map(|object| &**object)) {
                return found;
            }
            changed.await;
        }
    }
}
