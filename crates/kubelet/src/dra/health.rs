//! How devices are, as their drivers tell, and what is said of that about a pod's containers.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Container, Pod, ResourceHealth, ResourceStatus};
use parking_lot::Mutex;
use reconcile::Object as _;

use super::claims;
use super::messages::{Device, DeviceHealth, Healths};
use super::record::Book;

/// How long what a driver says holds where it does not say how long.
const FRESH: i64 = 30;
const LONGEST_MESSAGE: usize = 1024;

/// By driver, pool and device.
#[derive(Default)]
pub struct Health(Mutex<BTreeMap<(String, String, String), Known>>);

#[derive(Clone, Debug, PartialEq)]
struct Known {
    health: &'static str,
    message: String,
    fresh_for: SignedDuration,
    at: Timestamp,
}

impl Known {
    fn new(told: &DeviceHealth, at: Timestamp) -> Known {
        let health = match told.health {
            1 => "Healthy",
            2 => "Unhealthy",
            _ => "Unknown",
        };
        let seconds = if told.timeout_seconds > 0 { told.timeout_seconds } else { FRESH };
        let fresh_for = SignedDuration::from_secs(seconds);
        Known { health, message: shortened(&told.message), fresh_for, at }
    }

    fn is_fresh(&self, now: Timestamp) -> bool {
        now.duration_since(self.at) <= self.fresh_for
    }
}

impl Health {
    /// Takes in what a driver says of its devices; whether any of them is not as it was.
    pub fn hear(&self, driver: &str, told: &Healths, now: Timestamp) -> bool {
        let mut all = self.0.lock();
        let mut has_changed = false;
        for one in &told.devices {
            let device = one.device.clone().unwrap_or_default();
            let known = Known::new(one, now);
            let before = all.insert((driver.to_owned(), device.pool, device.name), known.clone());
            has_changed |= before.is_none_or(|before| Known { at: now, ..before } != known);
        }
        has_changed
    }

    /// A driver has stopped telling.
    pub fn forget(&self, driver: &str) {
        self.0.lock().retain(|(of, ..), _| of != driver);
    }

    fn of(&self, driver: &str, device: &Device, now: Timestamp) -> ResourceHealth {
        let key = (driver.to_owned(), device.pool_name.clone(), device.device_name.clone());
        let known = self.0.lock().get(&key).filter(|known| known.is_fresh(now)).cloned();
        let resource_id = match device.cdi_device_ids.first() {
            Some(id) => id.clone(),
            None => format!("{driver}/{}/{}", device.pool_name, device.device_name),
        };
        ResourceHealth {
            health: Some(known.as_ref().map_or("Unknown", |known| known.health).to_owned()),
            message: known.map(|known| known.message).filter(|message| !message.is_empty()),
            resource_id,
        }
    }

    /// The devices of a container's claims and how they are, a line for each claim or request that it names.
    pub fn told_of(
        &self,
        pod: &Pod,
        container: &Container,
        book: &Book,
        now: Timestamp,
    ) -> Vec<ResourceStatus> {
        let uses = claims::used_by(pod, container).unwrap_or_default();
        let statuses = uses.into_iter().filter_map(|one| {
            let called = one.called.as_ref()?;
            let claim = book.get(pod.namespace(), &one.claim)?;
            // Of the alternatives that a request may name, only one was chosen.
            let request = one.request.split('/').next().unwrap_or_default();
            let mut seen = BTreeSet::new();
            let devices = claim.devices(request).map(|(driver, device)| self.of(driver, device, now));
            let devices: Vec<_> = devices.filter(|device| seen.insert(device.resource_id.clone())).collect();
            let name = match one.request.as_str() {
                "" => format!("claim:{called}"),
                request => format!("claim:{called}/{request}"),
            };
            (!devices.is_empty()).then_some(ResourceStatus { name, resources: Some(devices) })
        });
        statuses.collect()
    }
}

fn shortened(message: &str) -> String {
    if message.len() <= LONGEST_MESSAGE {
        return message.to_owned();
    }
    let end = (0..=LONGEST_MESSAGE - 3).rev().find(|at| message.is_char_boundary(*at)).unwrap_or(0);
    format!("{}...", message.get(..end).unwrap_or_default())
}
