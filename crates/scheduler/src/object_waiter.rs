//! Objects as they are now, for tasks that wait until one looks as it should.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

/// Objects by `namespace/name`, with a bell.
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
    /// An object came, changed or went.
    pub fn set(&self, key: &str, object: Option<Arc<T>>) {
        match object {
            Some(object) => drop(self.objects.lock().insert(key.to_owned(), object)),
            None => drop(self.objects.lock().remove(key)),
        }
        self.changed.notify_waiters();
    }

    /// Waits until the question about the object has an answer.
    pub async fn wait<R>(&self, key: &str, answer: impl Fn(Option<&T>) -> Option<R>) -> R {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // Listen before looking, so that no change falls in between.
            changed.as_mut().enable();
            if let Some(found) = answer(self.objects.lock().get(key).map(|object| &**object)) {
                return found;
            }
            changed.await;
        }
    }
}
