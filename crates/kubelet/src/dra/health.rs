//! The health of DRA devices as drivers report it, and the container status fields derived from it.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Container, Pod, ResourceHealth, ResourceStatus};
use parking_lot::Mutex;
use reconcile::Object as _;

use super::claims;
use super::messages::{Device, DeviceHealth, NodeWatchResourcesResponse};
use super::record::ClaimInfoCache;

/// How long a health report is valid if the driver sets no timeout.
const DEFAULT_HEALTH_TIMEOUT_SECONDS: i64 = 30;
const MAX_MESSAGE_BYTES: usize = 1024;

/// By driver, pool and device.
#[derive(Default)]
pub struct HealthInfoCache(Mutex<BTreeMap<(String, String, String), CachedHealth>>);

#[derive(Clone, Debug, PartialEq)]
struct CachedHealth {
    health: &'static str,
    message: String,
    timeout: SignedDuration,
    at: Timestamp,
}

impl CachedHealth {
    fn new(report: &DeviceHealth, at: Timestamp) -> CachedHealth {
        let health = match report.health {
            1 => "Healthy",
            2 => "Unhealthy",
            _ => "Unknown",
        };
        let seconds =
            if report.timeout_seconds > 0 { report.timeout_seconds } else { DEFAULT_HEALTH_TIMEOUT_SECONDS };
        let timeout = SignedDuration::from_secs(seconds);
        CachedHealth { health, message: truncate_message(&report.message), timeout, at }
    }

    fn is_fresh(&self, now: Timestamp) -> bool {
        now.duration_since(self.at) <= self.timeout
    }
}

impl HealthInfoCache {
    /// Stores a health report of a driver. Returns whether the health of any device has changed.
    pub fn update(&self, driver: &str, report: &NodeWatchResourcesResponse, now: Timestamp) -> bool {
        let mut all = self.0.lock();
        let mut has_changed = false;
        for one in &report.devices {
            let device = one.device.clone().unwrap_or_default();
            let known = CachedHealth::new(one, now);
            let before = all.insert((driver.to_owned(), device.pool, device.name), known.clone());
            has_changed |= before.is_none_or(|before| CachedHealth { at: now, ..before } != known);
        }
        has_changed
    }

    /// Removes the health of a driver's devices when its stream ends.
    pub fn remove_driver(&self, driver: &str) {
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

    /// The health of a container's devices, one entry for each claim or request that it refers to.
    pub fn resource_statuses(
        &self,
        pod: &Pod,
        container: &Container,
        claim_cache: &ClaimInfoCache,
        now: Timestamp,
    ) -> Vec<ResourceStatus> {
        let uses = claims::container_claims(pod, container).unwrap_or_default();
        let statuses = uses.into_iter().filter_map(|one| {
            let pod_claim_name = one.pod_claim_name.as_ref()?;
            let claim = claim_cache.get(pod.namespace(), &one.claim)?;
            // A request with alternatives is named `request/alternative`. Devices are recorded
            // under the request.
            let request = one.request.split('/').next().unwrap_or_default();
            let mut seen = BTreeSet::new();
            let devices = claim.devices(request).map(|(driver, device)| self.of(driver, device, now));
            let devices: Vec<_> = devices.filter(|device| seen.insert(device.resource_id.clone())).collect();
            let name = match one.request.as_str() {
                "" => format!("claim:{pod_claim_name}"),
                request => format!("claim:{pod_claim_name}/{request}"),
            };
            (!devices.is_empty()).then_some(ResourceStatus { name, resources: Some(devices) })
        });
        statuses.collect()
    }
}

fn truncate_message(message: &str) -> String {
    if message.len() <= MAX_MESSAGE_BYTES {
        return message.to_owned();
    }
    let end = (0..=MAX_MESSAGE_BYTES - 3).rev().find(|at| message.is_char_boundary(*at)).unwrap_or(0);
    format!("{}...", message.get(..end).unwrap_or_default())
}
