//! Dynamic resource allocation (DRA): DRA drivers prepare the ResourceClaims of a pod before it
//! starts and unprepare them after it has ended ([`Dra::prepare`], [`Dra::unprepare`]).
//!
//! Claims are written to a checkpoint ([`record`]) before the driver is called. A restarted kubelet
//! can therefore unprepare claims that an earlier process prepared. Containers get their devices as
//! CDI names, which the runtime resolves.
//!
//! Upstream: `pkg/kubelet/cm/dra`.

mod claims;
mod drivers;
mod health;
mod messages;
mod plugin;
mod record;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, ContainerStatus, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use parking_lot::Mutex;
use reconcile::{Ctx, Key, Object as _};
use runtime::cri;
use tokio::sync::Notify;

use crate::keyed_mutex::KeyedMutex;
pub use drivers::{Drivers, run};
pub use plugin::Plugin;
use record::{ClaimInfo, ClaimInfoCache};

/// The event reason of pods whose claims are not prepared.
pub const FAILED_PREPARE_REASON: &str = "FailedPrepareDynamicResources";
/// How often unpreparing the claims of deleted pods is retried.
const UNPREPARE_RETRY: Duration = Duration::from_secs(60);

/// The prepared claims of this node and the DRA drivers.
#[derive(Default)]
pub struct Dra {
    pub drivers: Drivers,
    claim_cache: Mutex<ClaimInfoCache>,
    /// Locked by claim while drivers are called for it.
    claim_locks: KeyedMutex,
    /// Notified when a driver has registered.
    pub driver_registered: Notify,
}

/// The claims to pass to each driver.
type ClaimsByDriver = BTreeMap<String, Vec<messages::Claim>>;

impl Dra {
    /// Restores the state after a restart.
    pub fn open(root: &Path) -> Dra {
        Dra { claim_cache: Mutex::new(ClaimInfoCache::open(root)), ..Dra::default() }
    }

    /// Prepares the claims of a pod.
    pub async fn prepare(&self, ctx: &Ctx, pod: &Pod) -> Result<(), String> {
        let prepared = self.prepare_all(ctx, pod).await;
        prepared.map_err(|why| format!("prepare dynamic resources: {why}"))
    }

    async fn prepare_all(&self, ctx: &Ctx, pod: &Pod) -> Result<(), String> {
        let named = claims::pod_claims(pod)?;
        if named.is_empty() {
            return Ok(());
        }
        let lock_key = |named: &claims::PodClaim| claim_key(pod.namespace(), &named.name);
        let _guard = self.claim_locks.lock_all(&named.iter().map(lock_key).collect()).await;
        // Check everything before the checkpoint is written. Otherwise a pod whose driver was never
        // installed on this node could not be deleted, because its claims could not be unprepared.
        let mut pod_claims = Vec::new();
        for one in &named {
            let key = Key::new(pod.namespace(), &one.name);
            let claim: ResourceClaim = ctx
                .client
                .get(&key)
                .await
                .map_err(|error| format!("fetch ResourceClaim {}: {error}", one.name))?;
            claims::validate_claim(pod, &claim, one)?;
            let claim =
                ClaimInfo::new(&claim).ok_or_else(|| format!("ResourceClaim {}: not allocated", one.name))?;
            for driver in claim.drivers.keys() {
                self.drivers.find(driver)?;
            }
            pod_claims.push(claim);
        }
        for (driver, claims) in self.record_claims(pod.uid(), &pod_claims)? {
            let plugin = self.drivers.find(&driver)?;
            let answer = plugin.prepare(&claims).await;
            let answer = answer.map_err(|refusal| format!("NodePrepareResources: {refusal}"))?;
            let mut claim_cache = self.claim_cache.lock();
            for (uid, result) in &answer.claims {
                let claim = check_claim_result("NodePrepareResources", &claims, uid, &result.error)?;
                if let Some(known) = claim_cache.get_mut(&claim.namespace, &claim.name) {
                    known.drivers.insert(driver.clone(), result.devices.clone());
                }
            }
            check_all_returned("NodePrepareResources", claims.len(), answer.claims.len())?;
        }
        let mut claim_cache = self.claim_cache.lock();
        for claim in &pod_claims {
            if let Some(known) = claim_cache.get_mut(&claim.namespace, &claim.name) {
                known.is_ready = true;
            }
        }
        claim_cache.sync_to_checkpoint().map_err(|error| format!("checkpoint ResourceClaim state: {error}"))
    }

    /// Records in the checkpoint that a pod uses claims. Returns the claims that are not prepared
    /// yet, by driver.
    fn record_claims(&self, pod: &str, pod_claims: &[ClaimInfo]) -> Result<ClaimsByDriver, String> {
        let mut claims_by_driver = ClaimsByDriver::new();
        let mut claim_cache = self.claim_cache.lock();
        for claim in pod_claims {
            let known = claim_cache.get_or_insert(claim);
            if known.uid != claim.uid {
                return Err(format!(
                    "old ResourceClaim with same name {} and different UID {} still exists (previous pod force-deleted?!)",
                    claim.name, known.uid
                ));
            }
            known.pods.insert(pod.to_owned());
            for driver in known.drivers.keys().filter(|_| !known.is_ready) {
                let batch = claims_by_driver.entry(driver.clone()).or_default();
                // A pod may refer to a claim twice.
                if !batch.iter().any(|requested| requested.uid == known.uid) {
                    batch.push(known.message());
                }
            }
        }
        claim_cache
            .sync_to_checkpoint()
            .map_err(|error| format!("checkpoint ResourceClaim cache: {error}"))?;
        Ok(claims_by_driver)
    }

    /// Whether a pod uses claims that are not unprepared yet.
    pub fn has_claims(&self, pod: &str) -> bool {
        self.claim_cache.lock().for_pod(pod).next().is_some()
    }

    /// Unprepares the claims that only this pod uses.
    pub async fn unprepare(&self, pod: &str) -> Result<(), String> {
        let unprepared = self.unprepare_all(pod).await;
        unprepared.map_err(|why| format!("unprepare dynamic resources: {why}"))
    }

    async fn unprepare_all(&self, pod: &str) -> Result<(), String> {
        let lock_keys: BTreeSet<String> = self
            .claim_cache
            .lock()
            .for_pod(pod)
            .map(|claim| claim_key(&claim.namespace, &claim.name))
            .collect();
        if lock_keys.is_empty() {
            return Ok(());
        }
        let _guard = self.claim_locks.lock_all(&lock_keys).await;
        let pod_claims: Vec<ClaimInfo> = self.claim_cache.lock().for_pod(pod).cloned().collect();
        let (last, shared): (Vec<_>, Vec<_>) =
            pod_claims.into_iter().partition(|claim| claim.pods.len() == 1);
        let mut claims_by_driver = ClaimsByDriver::new();
        for claim in &last {
            for driver in claim.drivers.keys() {
                claims_by_driver.entry(driver.clone()).or_default().push(claim.message());
            }
        }
        for (driver, claims) in claims_by_driver {
            let answer = self.drivers.find(&driver)?.unprepare(&claims).await;
            let answer = answer.map_err(|refusal| format!("NodeUnprepareResources: {refusal}"))?;
            for (uid, result) in &answer.claims {
                check_claim_result("NodeUnprepareResources", &claims, uid, &result.error)?;
            }
            check_all_returned("NodeUnprepareResources", claims.len(), answer.claims.len())?;
        }
        let mut claim_cache = self.claim_cache.lock();
        last.iter().for_each(|claim| claim_cache.remove(&claim.message()));
        for claim in shared {
            if let Some(known) = claim_cache.get_mut(&claim.namespace, &claim.name) {
                known.pods.remove(pod);
            }
        }
        claim_cache.sync_to_checkpoint().map_err(|error| format!("checkpoint ResourceClaim state: {error}"))
    }

    /// The CDI devices of a container, without duplicates.
    pub fn devices(&self, pod: &Pod, container: &Container) -> Result<Vec<cri::CdiDevice>, String> {
        let claim_cache = self.claim_cache.lock();
        let mut devices: Vec<cri::CdiDevice> = Vec::new();
        for one in claims::container_claims(pod, container)? {
            let claim = claim_cache.get(pod.namespace(), &one.claim).ok_or_else(|| {
                let (name, namespace) = (&one.claim, pod.namespace());
                format!(
                    "internal error: unable to get claim info for ResourceClaim {name} in namespace {namespace}"
                )
            })?;
            for name in claim.devices(&one.request).flat_map(|(_, device)| &device.cdi_device_ids) {
                if !devices.iter().any(|known| known.name == *name) {
                    devices.push(cri::CdiDevice { name: name.clone() });
                }
            }
        }
        Ok(devices)
    }

    /// Adds the health of devices to the container statuses.
    pub fn update_device_health(&self, pod: &Pod, containers: &mut [ContainerStatus], now: Timestamp) {
        let specs = pod.spec.iter().flat_map(|spec| &spec.containers);
        let with_claims = |spec: &&Container| {
            spec.resources
                .as_ref()
                .is_some_and(|resources| resources.claims.as_ref().is_some_and(|all| !all.is_empty()))
        };
        for spec in specs.filter(with_claims) {
            let statuses = self.drivers.health.resource_statuses(pod, spec, &self.claim_cache.lock(), now);
            for status in containers.iter_mut().filter(|status| status.name == spec.name) {
                status.allocated_resources_status = (!statuses.is_empty()).then(|| statuses.clone());
            }
        }
    }

    /// The number of prepared claims by driver, and in total under `<any>`.
    pub fn in_use(&self) -> BTreeMap<String, usize> {
        let claim_cache = self.claim_cache.lock();
        let mut counts = BTreeMap::from([("<any>".to_owned(), 0)]);
        for claim in claim_cache.all().filter(|claim| claim.is_ready) {
            let names = claim.drivers.keys().cloned().chain(["<any>".to_owned()]);
            names.for_each(|name| *counts.entry(name).or_insert(0) += 1);
        }
        counts
    }

    /// Unprepares claims of pods that were deleted while the kubelet was not running.
    pub async fn unprepare_orphaned_claims(&self, ctx: &Ctx, node: &str) {
        ctx.caches.pods().wait_for_sync().await;
        loop {
            let mut orphaned: BTreeSet<String> =
                self.claim_cache.lock().all().flat_map(|claim| claim.pods.clone()).collect();
            for pod in ctx.caches.pods().indexed("node", node) {
                orphaned.remove(pod.uid());
            }
            for uid in &orphaned {
                if let Err(error) = self.unprepare(uid).await {
                    tracing::info!(error, uid, "failed to unprepare the claims of a deleted pod, will retry");
                }
            }
            let _ = tokio::time::timeout(UNPREPARE_RETRY, self.driver_registered.notified()).await;
        }
    }
}

fn claim_key(namespace: &str, name: &str) -> String {
    format!("{namespace}/{name}")
}

/// The claim that a result is for. Fails if the result is an error.
fn check_claim_result<'a>(
    call: &str,
    requested: &'a [messages::Claim],
    uid: &str,
    error: &str,
) -> Result<&'a messages::Claim, String> {
    match requested.iter().find(|claim| claim.uid == uid) {
        None => Err(format!("{call} returned result for unknown claim UID {uid}")),
        Some(claim) if !error.is_empty() => {
            Err(format!("{call} failed for ResourceClaim {}: {error}", claim.name))
        }
        Some(claim) => Ok(claim),
    }
}

fn check_all_returned(call: &str, requested: usize, returned: usize) -> Result<(), String> {
    match requested.saturating_sub(returned) {
        0 => Ok(()),
        left => Err(format!("{call} skipped {left} ResourceClaims")),
    }
}
