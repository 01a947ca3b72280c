//! Serializes operations on named objects such as volumes and claims.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::OwnedMutexGuard;

/// One mutex per name. Unused ones are removed.
#[derive(Default)]
pub struct KeyedMutex(Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>);

impl KeyedMutex {
    /// Locks a name. Waits while it is locked.
    pub async fn lock(&self, name: &str) -> OwnedMutexGuard<()> {
        let lock = {
            let mut all = self.0.lock();
            // A count of one means that only the map holds the mutex. No task can clone it while
            // the map is locked.
            all.retain(|_, lock| Arc::strong_count(lock) > 1);
            all.entry(name.to_owned()).or_default().clone()
        };
        lock.lock_owned().await
    }

    /// Locks several names. The sorted order prevents deadlocks between callers.
    pub async fn lock_all(&self, names: &BTreeSet<String>) -> Vec<OwnedMutexGuard<()>> {
        let mut locks = Vec::with_capacity(names.len());
        for name in names {
            locks.push(self.lock(name).await);
        }
        locks
    }
}
