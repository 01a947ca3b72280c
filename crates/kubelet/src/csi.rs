//! CSI volumes: the drivers of this node ([`registry`]) and the volumes they mount on it
//! ([`volume`]).
//!
//! The metadata of each volume is in a `vol_data.json` beside it, as upstream writes it. A
//! restarted kubelet can therefore tear down volumes that an earlier process set up.
//!
//! Upstream: `pkg/volume/csi`.

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

/// The registered drivers and the state of their volumes on this node.
#[derive(Default)]
pub struct Drivers {
    drivers: Mutex<BTreeMap<String, Driver>>,
    /// Locked by unique volume name during an operation. Drivers expect one call per volume at a
    /// time.
    pub volume_locks: KeyedMutex,
    /// The published volumes by pod UID and volume name, with the time of the next republish if the
    /// driver requires one.
    republish_times: Mutex<HashMap<(String, String), Option<jiff::Timestamp>>>,
    /// `volumesInUse` of the node status: the volumes that must not be detached.
    in_use: Mutex<BTreeSet<String>>,
    /// Notified when `in_use` has changed.
    pub in_use_changed: Notify,
}

impl Drivers {
    /// Restores the volumes in use after a restart.
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

    /// The earliest republish time of a pod's volumes.
    pub fn republish_at(&self, pod: &str) -> Option<jiff::Timestamp> {
        let republish_times = self.republish_times.lock();
        republish_times.iter().filter(|((uid, _), _)| uid == pod).filter_map(|(_, again)| *again).min()
    }

    /// The unique names of the volumes that must not be detached.
    pub fn in_use(&self) -> Vec<String> {
        self.in_use.lock().iter().cloned().collect()
    }

    /// Adds or removes a volume that must not be detached.
    pub fn set_in_use(&self, name: &str, is_used: bool) {
        let mut in_use = self.in_use.lock();
        let changed = if is_used { in_use.insert(name.to_owned()) } else { in_use.remove(name) };
        if changed {
            self.in_use_changed.notify_one();
        }
    }
}
