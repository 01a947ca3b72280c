//! Devices that were given to pods by claims (dynamic resource allocation): their drivers are asked to make them ready
//! before a pod begins and to take them back when it has ended ([`Dra::prepare`], [`Dra::unprepare`]).
//!
//! Which claims are ready is written down before drivers are asked ([`record`]), so that they are taken back whoever was
//! restarted in between. What a container gets are names that the runtime knows what to do with (CDI).

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

/// The reason of pods' events that tell of devices that are not ready.
pub const FAILED_PREPARE_REASON: &str = "FailedPrepareDynamicResources";
/// How often claims of pods that nobody knows any more are tried to be given back.
const UNPREPARE_RETRY: Duration = Duration::from_secs(60);

/// The claims on this node and the drivers behind them.
#[derive(Default)]
pub struct Dra {
    pub drivers: Drivers,
    claim_cache: Mutex<ClaimInfoCache>,
    /// Held while drivers are asked for a claim.
    claim_locks: KeyedMutex,
    /// Told when a driver has come.
    pub driver_registered: Notify,
}

/// What each driver is to be asked for.
type ClaimsByDriver = BTreeMap<String, Vec<messages::Claim>>;

impl Dra {
    /// As it is after a restart.
    pub fn open(root: &Path) -> Dra {
        Dra { claim_cache: Mutex::new(ClaimInfoCache::open(root)), ..Dra::default() }
    }

    /// Has the pod's claims made ready.
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
        // Nothing is written down before all is known to be well, or else the pod could not be deleted where drivers are
        // missing that have never been here.
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

    /// Writes down that a pod uses claims, and says which of them have to be made ready.
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
                // A pod may name a claim twice.
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

    /// Whether a pod uses claims that have not been given back.
    pub fn has_claims(&self, pod: &str) -> bool {
        self.claim_cache.lock().for_pod(pod).next().is_some()
    }

    /// Gives back a pod's claims that nobody else uses.
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

    /// What a container gets of its pod's claims, each once.
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

    /// Says of containers how their devices are.
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

    /// How many claims are ready, of each driver, and of all drivers under `<any>`.
    pub fn in_use(&self) -> BTreeMap<String, usize> {
        let claim_cache = self.claim_cache.lock();
        let mut counts = BTreeMap::from([("<any>".to_owned(), 0)]);
        for claim in claim_cache.all().filter(|claim| claim.is_ready) {
            let names = claim.drivers.keys().cloned().chain(["<any>".to_owned()]);
            names.for_each(|name| *counts.entry(name).or_insert(0) += 1);
        }
        counts
    }

    /// Gives back claims of pods that went while nobody was here to see it.
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
                    tracing::info!(error, uid, "the claims of a pod that is gone are not given back yet");
                }
            }
            let _ = tokio::time::timeout(UNPREPARE_RETRY, self.driver_registered.notified()).await;
        }
    }
}

fn claim_key(namespace: &str, name: &str) -> String {
    format!("{namespace}/{name}")
}

/// The claim an answer is about, where that is a good one.
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
