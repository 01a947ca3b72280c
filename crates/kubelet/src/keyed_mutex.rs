//! Turns at things of which only one may be done to at a time, such as a volume or a claim, each by its name.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::OwnedMutexGuard;

/// Who is at what.
#[derive(Default)]
pub struct KeyedMutex(Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>);

impl KeyedMutex {
    /// Waits until nobody else does anything to it.
    pub async fn lock(&self, name: &str) -> OwnedMutexGuard<()> {
        let lock = {
            let mut all = self.0.lock();
            all.retain(|_, lock| Arc::strong_count(lock) > 1);
            all.entry(name.to_owned()).or_default().clone()
        };
        lock.lock_owned().await
    }

    /// The same for several. All ask in the same order, so that nobody waits for somebody who waits for them.
    pub async fn lock_all(&self, names: &BTreeSet<String>) -> Vec<OwnedMutexGuard<()>> {
        let mut locks = Vec::with_capacity(names.len());
        for name in names {
            locks.push(self.lock(name).await);
        }
        locks
    }
}
