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

use crate::busy::Busy;
pub use drivers::{Drivers, run};
pub use plugin::Plugin;
use record::{Book, Claim};

/// The reason of pods' events that tell of devices that are not ready.
pub const UNPREPARED: &str = "FailedPrepareDynamicResources";
/// How often claims of pods that nobody knows any more are tried to be given back.
const LOOK_AGAIN: Duration = Duration::from_secs(60);

/// The claims on this node and the drivers behind them.
#[derive(Default)]
pub struct Dra {
    pub drivers: Drivers,
    book: Mutex<Book>,
    /// Held while drivers are asked for a claim.
    busy: Busy,
    /// Told when a driver has come.
    pub news: Notify,
}

/// What each driver is to be asked for.
type Batches = BTreeMap<String, Vec<messages::Claim>>;

impl Dra {
    /// As it is after a restart.
    pub fn open(root: &Path) -> Dra {
        Dra { book: Mutex::new(Book::open(root)), ..Dra::default() }
    }

    /// Has the pod's claims made ready.
    pub async fn prepare(&self, ctx: &Ctx, pod: &Pod) -> Result<(), String> {
        let prepared = self.prepare_all(ctx, pod).await;
        prepared.map_err(|why| format!("prepare dynamic resources: {why}"))
    }

    async fn prepare_all(&self, ctx: &Ctx, pod: &Pod) -> Result<(), String> {
        let named = claims::of(pod)?;
        if named.is_empty() {
            return Ok(());
        }
        let turn = |named: &claims::Named| turn(pod.namespace(), &named.name);
        let _alone = self.busy.alone_with(&named.iter().map(turn).collect()).await;
        // Nothing is written down before all is known to be well, or else the pod could not be deleted where drivers are
        // missing that have never been here.
        let mut wanted = Vec::new();
        for one in &named {
            let key = Key::new(pod.namespace(), &one.name);
            let claim: ResourceClaim = ctx
                .client
                .get(&key)
                .await
                .map_err(|error| format!("fetch ResourceClaim {}: {error}", one.name))?;
            claims::judge(pod, &claim, one)?;
            let claim =
                Claim::new(&claim).ok_or_else(|| format!("ResourceClaim {}: not allocated", one.name))?;
            for driver in claim.drivers.keys() {
                self.drivers.find(driver)?;
            }
            wanted.push(claim);
        }
        for (driver, claims) in self.take_note(pod.uid(), &wanted)? {
            let plugin = self.drivers.find(&driver)?;
            let answer = plugin.prepare(&claims).await;
            let answer = answer.map_err(|refusal| format!("NodePrepareResources: {refusal}"))?;
            let mut book = self.book.lock();
            for (uid, result) in &answer.claims {
                let claim = answered("NodePrepareResources", &claims, uid, &result.error)?;
                if let Some(known) = book.get_mut(&claim.namespace, &claim.name) {
                    known.drivers.insert(driver.clone(), result.devices.clone());
                }
            }
            all_answered("NodePrepareResources", claims.len(), answer.claims.len())?;
        }
        let mut book = self.book.lock();
        for claim in &wanted {
            if let Some(known) = book.get_mut(&claim.namespace, &claim.name) {
                known.is_ready = true;
            }
        }
        book.keep().map_err(|error| format!("checkpoint ResourceClaim state: {error}"))
    }

    /// Writes down that a pod uses claims, and says which of them have to be made ready.
    fn take_note(&self, pod: &str, wanted: &[Claim]) -> Result<Batches, String> {
        let mut batches = Batches::new();
        let mut book = self.book.lock();
        for claim in wanted {
            let known = book.take(claim);
            if known.uid != claim.uid {
                return Err(format!(
                    "old ResourceClaim with same name {} and different UID {} still exists (previous pod force-deleted?!)",
                    claim.name, known.uid
                ));
            }
            known.pods.insert(pod.to_owned());
            for driver in known.drivers.keys().filter(|_| !known.is_ready) {
                let batch = batches.entry(driver.clone()).or_default();
                // A pod may name a claim twice.
                if !batch.iter().any(|asked| asked.uid == known.uid) {
                    batch.push(known.message());
                }
            }
        }
        book.keep().map_err(|error| format!("checkpoint ResourceClaim cache: {error}"))?;
        Ok(batches)
    }

    /// Whether a pod uses claims that have not been given back.
    pub fn holds(&self, pod: &str) -> bool {
        self.book.lock().of(pod).next().is_some()
    }

    /// Gives back a pod's claims that nobody else uses.
    pub async fn unprepare(&self, pod: &str) -> Result<(), String> {
        let given_back = self.unprepare_all(pod).await;
        given_back.map_err(|why| format!("unprepare dynamic resources: {why}"))
    }

    async fn unprepare_all(&self, pod: &str) -> Result<(), String> {
        let turns: BTreeSet<String> =
            self.book.lock().of(pod).map(|claim| turn(&claim.namespace, &claim.name)).collect();
        if turns.is_empty() {
            return Ok(());
        }
        let _alone = self.busy.alone_with(&turns).await;
        let mine: Vec<Claim> = self.book.lock().of(pod).cloned().collect();
        let (last, shared): (Vec<_>, Vec<_>) = mine.into_iter().partition(|claim| claim.pods.len() == 1);
        let mut batches = Batches::new();
        for claim in &last {
            for driver in claim.drivers.keys() {
                batches.entry(driver.clone()).or_default().push(claim.message());
            }
        }
        for (driver, claims) in batches {
            let answer = self.drivers.find(&driver)?.unprepare(&claims).await;
            let answer = answer.map_err(|refusal| format!("NodeUnprepareResources: {refusal}"))?;
            for (uid, result) in &answer.claims {
                answered("NodeUnprepareResources", &claims, uid, &result.error)?;
            }
            all_answered("NodeUnprepareResources", claims.len(), answer.claims.len())?;
        }
        let mut book = self.book.lock();
        last.iter().for_each(|claim| book.remove(&claim.message()));
        for claim in shared {
            if let Some(known) = book.get_mut(&claim.namespace, &claim.name) {
                known.pods.remove(pod);
            }
        }
        book.keep().map_err(|error| format!("checkpoint ResourceClaim state: {error}"))
    }

    /// What a container gets of its pod's claims, each once.
    pub fn devices(&self, pod: &Pod, container: &Container) -> Result<Vec<cri::CdiDevice>, String> {
        let book = self.book.lock();
        let mut devices: Vec<cri::CdiDevice> = Vec::new();
        for one in claims::used_by(pod, container)? {
            let claim = book.get(pod.namespace(), &one.claim).ok_or_else(|| {
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
    pub fn tell(&self, pod: &Pod, containers: &mut [ContainerStatus], now: Timestamp) {
        let specs = pod.spec.iter().flat_map(|spec| &spec.containers);
        let with_claims = |spec: &&Container| {
            spec.resources
                .as_ref()
                .is_some_and(|resources| resources.claims.as_ref().is_some_and(|all| !all.is_empty()))
        };
        for spec in specs.filter(with_claims) {
            let told = self.drivers.health.told_of(pod, spec, &self.book.lock(), now);
            for status in containers.iter_mut().filter(|status| status.name == spec.name) {
                status.allocated_resources_status = (!told.is_empty()).then(|| told.clone());
            }
        }
    }

    /// How many claims are ready, of each driver, and of all drivers under `<any>`.
    pub fn in_use(&self) -> BTreeMap<String, usize> {
        let book = self.book.lock();
        let mut counts = BTreeMap::from([("<any>".to_owned(), 0)]);
        for claim in book.all().filter(|claim| claim.is_ready) {
            let names = claim.drivers.keys().cloned().chain(["<any>".to_owned()]);
            names.for_each(|name| *counts.entry(name).or_insert(0) += 1);
        }
        counts
    }

    /// Gives back claims of pods that went while nobody was here to see it.
    pub async fn give_back_lost(&self, ctx: &Ctx, node: &str) {
        ctx.caches.pods().filled().await;
        loop {
            let mut lost: BTreeSet<String> =
                self.book.lock().all().flat_map(|claim| claim.pods.clone()).collect();
            for pod in ctx.caches.pods().indexed("node", node) {
                lost.remove(pod.uid());
            }
            for uid in &lost {
                if let Err(error) = self.unprepare(uid).await {
                    tracing::info!(error, uid, "the claims of a pod that is gone are not given back yet");
                }
            }
            let _ = tokio::time::timeout(LOOK_AGAIN, self.news.notified()).await;
        }
    }
}

fn turn(namespace: &str, name: &str) -> String {
    format!("{namespace}/{name}")
}

/// The claim an answer is about, where that is a good one.
fn answered<'a>(
    call: &str,
    asked: &'a [messages::Claim],
    uid: &str,
    error: &str,
) -> Result<&'a messages::Claim, String> {
    match asked.iter().find(|claim| claim.uid == uid) {
        None => Err(format!("{call} returned result for unknown claim UID {uid}")),
        Some(claim) if !error.is_empty() => {
            Err(format!("{call} failed for ResourceClaim {}: {error}", claim.name))
        }
        Some(claim) => Ok(claim),
    }
}

fn all_answered(call: &str, asked: usize, answered: usize) -> Result<(), String> {
    match asked.saturating_sub(answered) {
        0 => Ok(()),
        left => Err(format!("{call} skipped {left} ResourceClaims")),
    }
}
