//! Housekeeping: logs are rotated, images nobody uses go when the disk fills, what is left of pods that are gone is
//! removed, and pods are put out when the node runs short of memory, disk or processes.
//!
//! Nobody tells of a disk that fills, so this looks every ten seconds, at counters only; what takes work is done
//! when they say so. Decisions are in [`pressure`], pure.

pub mod logs;
pub mod pressure;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use parking_lot::Mutex;
use reconcile::{Object as _, Severity};
use runtime::cri::{ContainerState, ImageSpec, PodSandboxState};

use crate::observed::POD_UID;
use crate::{Node, stats, volumes};
use pressure::{Pressures, Signals};

const EVERY: Duration = Duration::from_secs(10);
/// Rounds between two looks for what is left of pods, and for images.
const ROUNDS: u64 = 6;
/// An image is left alone for this long after it was first seen.
const YOUNG: SignedDuration = SignedDuration::from_secs(120);
/// Between two pods that are put out: the first may have been enough.
const EVICTION_PAUSE: SignedDuration = SignedDuration::from_secs(20);

/// When what is done; the defaults are upstream's.
#[derive(Clone, Debug)]
pub struct Keeping {
    pub limits: pressure::Limits,
    /// Percent of the disk of images at which unused ones are removed, and down to which.
    pub images_high: u64,
    pub images_low: u64,
    /// Bytes of a log at which a new one is begun, and how many are kept.
    pub log_size: u64,
    pub log_files: usize,
}

impl Default for Keeping {
    fn default() -> Keeping {
        Keeping {
            limits: pressure::Limits::default(),
            images_high: 85,
            images_low: 80,
            log_size: 10 << 20,
            log_files: 5,
        }
    }
}

/// What is known from earlier looks.
#[derive(Default)]
pub struct Known {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    pressures: Pressures,
    /// When each image was first seen, and last seen in use.
    images: BTreeMap<String, (Timestamp, Timestamp)>,
    evicted: Option<Timestamp>,
}

impl Known {
    /// What the node is short of.
    pub fn pressures(&self) -> Pressures {
        self.state.lock().pressures.clone()
    }
}

pub async fn run(node: &Arc<Node>) {
    node.ctx.caches.pods().filled().await;
    let mut round = 0;
    loop {
        look(node).await;
        logs::rotate_all(node).await;
        if u64::is_multiple_of(round, ROUNDS) {
            remove_leftovers(node).await;
            remove_images(node, false).await;
        }
        round += 1;
        tokio::time::sleep(EVERY).await;
    }
}

/// Looks how much there is left of everything, and acts where it is too little.
async fn look(node: &Arc<Node>) {
    let now = node.ctx.clock.now();
    let signals = Signals::read(node).await;
    let limits = &node.settings.keeping.limits;
    let short = limits.reached(&signals);
    node.keeping.state.lock().pressures.note(&short, now);
    over_their_limits(node).await;
    let Some(first) = short.first() else { return };
    if first.is_disk()
        && remove_images(node, true).await
        && limits.reached(&Signals::read(node).await).is_empty()
    {
        return;
    }
    {
        let mut state = node.keeping.state.lock();
        if state.evicted.is_some_and(|at| now.duration_since(at) < EVICTION_PAUSE) {
            return;
        }
        state.evicted = Some(now);
    }
    let pods = node.ctx.caches.pods().indexed("node", &node.settings.node_name);
    let used = stats::pods(node).await.unwrap_or_default();
    let disk = |pod: &Pod| {
        let layers = used.iter().filter(|used| used.uid == pod.uid()).flat_map(|used| &used.containers);
        layers.filter_map(|container| container.layer).sum::<u64>()
            + stats::size_of(&node.settings.pod_dir(pod)).0
    };
    let memory =
        |pod: &Pod| used.iter().find(|used| used.uid == pod.uid()).map_or(0, |used| used.usage().working_set);
    let candidates = pods.iter().filter(|pod| pressure::may_be_evicted(pod)).map(|pod| {
        let usage = if first.is_disk() { disk(pod) } else { memory(pod) };
        (pod.clone(), usage)
    });
    if let Some((pod, usage)) = pressure::choose(first, candidates.collect()) {
        evict(node, &pod, pressure::message(first, &pod, usage));
    } else {
        tracing::warn!(
            resource = first.resource(),
            "the node is short of it, and there is no pod to put out"
        );
    }
}

/// Puts a pod out.
fn evict(node: &Arc<Node>, pod: &Pod, message: String) {
    let first = node.remember(pod, |memory| {
        let first = memory.ended.is_none();
        memory.ended.get_or_insert_with(|| (crate::EVICTED.to_owned(), message.clone()));
        first
    });
    if first {
        tracing::warn!(pod = %pod.key(), message, "putting a pod out");
        node.ctx.events.record(reconcile::reference(pod), Severity::Warning, crate::EVICTED, message);
        node.look_at(pod.key());
    }
}

/// Pods that use more of the disk than they said they would.
async fn over_their_limits(node: &Arc<Node>) {
    let pods = node.ctx.caches.pods().indexed("node", &node.settings.node_name);
    let limited: Vec<_> = pods.into_iter().filter(|pod| pressure::has_disk_limits(pod)).collect();
    if limited.is_empty() {
        return;
    }
    let used = stats::pods(node).await.unwrap_or_default();
    for pod in limited.iter().filter(|pod| !pod.is_deleting()) {
        let layers: BTreeMap<&str, u64> = used
            .iter()
            .filter(|used| used.uid == pod.uid())
            .flat_map(|used| &used.containers)
            .map(|container| (container.name.as_str(), container.layer.unwrap_or(0)))
            .collect();
        let logs = |name: &str| stats::size_of(&node.settings.log_dir(&pod.key(), pod.uid()).join(name)).0;
        let volume = |name: &str| {
            let dir = node.settings.pod_dir(pod).join("volumes/kubernetes.io~empty-dir").join(name);
            stats::size_of(&dir).0
        };
        let container = |name: &str| layers.get(name).copied().unwrap_or(0) + logs(name);
        if let Some(message) = pressure::over_limits(pod, &container, &volume) {
            evict(node, pod, message);
        }
    }
}

/// What is left of pods nobody knows any more, and old sandboxes of those that are known.
async fn remove_leftovers(node: &Arc<Node>) {
    let (Ok(sandboxes), Ok(containers)) =
        (node.runtime.sandboxes(&[]).await, node.runtime.containers(&[]).await)
    else {
        return;
    };
    let mut newest: BTreeMap<&str, (u32, &str)> = BTreeMap::new();
    for sandbox in &sandboxes {
        let Some(uid) = sandbox.labels.get(POD_UID) else { continue };
        let attempt = sandbox.metadata.as_ref().map_or(0, |metadata| metadata.attempt);
        let entry = newest.entry(uid).or_insert((attempt, &sandbox.id));
        *entry = (*entry).max((attempt, &sandbox.id));
    }
    for sandbox in &sandboxes {
        let Some(uid) = sandbox.labels.get(POD_UID) else { continue };
        let in_use = containers.iter().any(|container| container.pod_sandbox_id == sandbox.id);
        let is_newest = newest.get(uid.as_str()).is_some_and(|(_, id)| *id == sandbox.id);
        if !is_newest && !in_use && sandbox.state() != PodSandboxState::Ready {
            let _ = node.runtime.remove_sandbox(&sandbox.id).await;
        }
    }
    let known: BTreeSet<String> = {
        let pods = node.ctx.caches.pods().indexed("node", &node.settings.node_name);
        let listed = sandboxes.iter().filter_map(|sandbox| sandbox.labels.get(POD_UID).cloned());
        pods.iter().map(|pod| pod.uid().to_owned()).chain(listed).collect()
    };
    for entry in std::fs::read_dir(&node.settings.pods).into_iter().flatten().flatten() {
        let uid = entry.file_name().to_string_lossy().into_owned();
        if !known.contains(&uid)
            && let Err(error) = volumes::clear(&uid, &node.settings).map(|()| node.users.release(&uid))
        {
            tracing::warn!(%error, uid, "something is left of a pod");
        }
    }
    for entry in std::fs::read_dir(&node.settings.logs).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.rsplit('_').next().is_some_and(|uid| !known.contains(uid)) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// Removes images nobody uses, the longest unused first, while their disk is too full, or all of them; whether any
/// went.
async fn remove_images(node: &Arc<Node>, all: bool) -> bool {
    let now = node.ctx.clock.now();
    let (Ok(images), Ok(containers)) = (node.runtime.images().await, node.runtime.containers(&[]).await)
    else {
        return false;
    };
    let used: BTreeSet<&str> = containers
        .iter()
        .flat_map(|container| {
            [Some(container.image_ref.as_str()), container.image.as_ref().map(|i| i.image.as_str())]
        })
        .flatten()
        .collect();
    let mut unused = Vec::new();
    {
        let mut state = node.keeping.state.lock();
        state.images.retain(|id, _| images.iter().any(|image| image.id == *id));
        for image in &images {
            let names = image.repo_tags.iter().chain(&image.repo_digests).chain([&image.id]);
            let is_used = names.into_iter().any(|name| used.contains(name.as_str()));
            let (first, last) = state.images.entry(image.id.clone()).or_insert((now, now));
            if is_used {
                *last = now;
            } else if !image.pinned && now.duration_since(*first) >= YOUNG {
                unused.push((*last, *first, image.id.clone()));
            }
        }
    }
    if !all && !is_too_full(node, node.settings.keeping.images_high).await || unused.is_empty() {
        return false;
    }
    let sandbox = sandbox_image(node).await;
    unused.sort();
    let mut any = false;
    for (.., id) in unused {
        let is_sandbox = images.iter().any(|image| image.id == id && image.repo_tags.contains(&sandbox));
        if is_sandbox {
            continue;
        }
        if !all && !is_too_full(node, node.settings.keeping.images_low).await {
            break;
        }
        let spec = ImageSpec { image: id.clone(), ..ImageSpec::default() };
        match node.runtime.remove_image(&spec).await {
            Ok(()) => any = true,
            Err(error) => tracing::warn!(%error, id, "cannot remove an image"),
        }
    }
    any
}

async fn is_too_full(node: &Node, percent: u64) -> bool {
    let Some((available, capacity)) = pressure::image_disk(node).await else { return false };
    capacity > 0 && (capacity - available.min(capacity)) * 100 >= percent * capacity
}

/// What holds pods together is needed although nothing seems to use it.
async fn sandbox_image(node: &Node) -> String {
    let details = node.runtime.details().await.unwrap_or_default();
    let config = details.get("config").and_then(|text| serde_json::from_str::<serde_json::Value>(text).ok());
    config.and_then(|config| config["sandboxImage"].as_str().map(str::to_owned)).unwrap_or_default()
}

/// Runs of containers whose logs are still written to.
pub(crate) async fn running(node: &Node) -> Vec<runtime::cri::Container> {
    let mut containers = node.runtime.containers(&[]).await.unwrap_or_default();
    containers.retain(|container| container.state() == ContainerState::Running);
    containers
}
