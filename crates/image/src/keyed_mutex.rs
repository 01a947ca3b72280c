//! A mutex per key. Pods that start together need the same blobs and layers; the lock of a blob or
//! layer ensures that only one of them fetches or unpacks it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Locks by key. An unused lock is removed when the next one is requested.
#[derive(Debug, Default)]
pub struct KeyedMutex<L>(Mutex<HashMap<String, Arc<L>>>);

impl<L: Default> KeyedMutex<L> {
    /// Returns the lock of a key. The caller keeps the `Arc` for as long as it holds or waits for
    /// the lock.
    pub fn get(&self, name: &str) -> Arc<L> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A strong count of 1 means that only the map refers to the lock.
        all.retain(|_, lock| Arc::strong_count(lock) > 1);
        all.entry(name.to_owned()).or_default().clone()
    }
}
