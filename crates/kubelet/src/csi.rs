//! Volumes of storage drivers (CSI): which drivers this node has ([`registry`]), and their volumes on it ([`volume`]).
//!
//! What is here of a volume is written beside it (`vol_data.json`, as upstream does), so that it is taken away again
//! whoever was restarted in between.

mod driver;
mod messages;
mod node_object;
mod record;
pub mod registry;
#[cfg(test)]
pub mod tests;
pub mod volume;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::keyed_mutex::KeyedMutex;
use driver::Driver;
pub use messages::{BYTES, INODES, VolumeUsage};

/// The drivers of this node, and what is known of their volumes here.
#[derive(Default)]
pub struct Drivers {
    drivers: Mutex<BTreeMap<String, Driver>>,
    /// Held while something is done to a volume, by its driver and handle: drivers expect one call at a time.
    pub volume_locks: KeyedMutex,
    /// The volumes that are published, by pod and name, and when that is to be done again, if it is.
    republish_times: Mutex<HashMap<(String, String), Option<jiff::Timestamp>>>,
    /// Those that must not be detached, as statuses of nodes name them.
    in_use: Mutex<BTreeSet<String>>,
    /// Told when that has changed.
    pub in_use_changed: Notify,
}

impl Drivers {
    /// As they are after a restart: what was in use still is.
    pub fn open(root: &std::path::Path) -> Drivers {
        let drivers = Drivers::default();
        let staged = record::staged_volumes(root).into_iter().map(|record| record.unique_name());
        drivers.in_use.lock().extend(staged.chain(crate::volumes::iscsi::in_use(root)));
        drivers
    }

    pub fn names(&self) -> Vec<(String, String)> {
        self.drivers.lock().values().map(|driver| (driver.name.clone(), driver.node_id.clone())).collect()
    }

    fn all(&self) -> Vec<Driver> {
        self.drivers.lock().values().cloned().collect()
    }

    pub fn register(&self, driver: Driver) {
        self.drivers.lock().insert(driver.name.clone(), driver);
    }

    pub fn unregister(&self, name: &str) {
        self.drivers.lock().remove(name);
    }

    fn find(&self, name: &str) -> Result<Driver, String> {
        let found = self.drivers.lock().get(name).cloned();
        found.ok_or_else(|| format!("driver name {name} not found in the list of registered CSI drivers"))
    }

    /// When the first of a pod's volumes is to be published again.
    pub fn republish_at(&self, pod: &str) -> Option<jiff::Timestamp> {
        let republish_times = self.republish_times.lock();
        republish_times.iter().filter(|((uid, _), _)| uid == pod).filter_map(|(_, again)| *again).min()
    }

    /// The volumes that must not be detached.
    pub fn in_use(&self) -> Vec<String> {
        self.in_use.lock().iter().cloned().collect()
    }

    /// Says that a volume must not be detached, or may be.
    pub fn set_in_use(&self, name: &str, is_used: bool) {
        let mut in_use = self.in_use.lock();
        let changed = if is_used { in_use.insert(name.to_owned()) } else { in_use.remove(name) };
        if changed {
            self.in_use_changed.notify_one();
        }
    }
}
