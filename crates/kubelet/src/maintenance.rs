//! Housekeeping: logs are rotated, images nobody uses go when the disk fills, what is left of pods that are gone is
//! removed, and pods are put out when the node runs short of memory, disk or processes.
//!
//! The kernel tells nobody that a disk fills or that memory runs out: it tells of stalls, which is too late, and of every
//! write, which is too often. So this looks, at counters only, and does what takes work when they say so. It has no timer
//! of its own but looks when the node's lease is renewed ([`crate::pulse`]), and at logs only where there are pods.
//! Decisions are in [`pressure`], pure.

pub mod images;
pub mod logs;
pub mod pressure;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use parking_lot::Mutex;
use reconcile::{EventType, Object as _};
use runtime::cri::{ContainerState, PodSandboxState};

use crate::observed::POD_UID;
use crate::{Node, stats};
use pressure::{LastPressure, ReclaimState, SignalObservations};

/// Beats between two looks for what is left of pods, and for images.
const CLEANUP_INTERVAL_TICKS: u64 = 6;
/// Between two pods that are put out: the first may have been enough.
const MIN_EVICTION_INTERVAL: SignedDuration = SignedDuration::from_secs(20);

/// When what is done; the defaults are upstream's.
#[derive(Clone, Debug)]
pub struct KubeletConfig {
    pub hard_eviction: pressure::EvictionThresholds,
    pub soft_eviction: pressure::SoftEviction,
    /// How much more than that there must be until a shortage is over.
    pub minimum_reclaim: pressure::EvictionThresholds,
    /// How long a shortage is said to last after it was last seen.
    pub pressure_transition_period: jiff::SignedDuration,
    pub image_gc: images::ImageGcPolicy,
    /// Of which images it is asked who may use them.
    pub pull_policy: crate::image_pull_records::VerificationPolicy,
    /// Programs that have credentials for registries.
    pub credentials: crate::credentials::Config,
    /// Bytes of a log at which a new one is begun, and how many are kept.
    pub max_log_bytes: u64,
    pub max_log_files: usize,
    /// How many processes a pod may have; none is no limit.
    pub pod_pids_limit: i64,
    /// The settings of the kernel that pods may change besides the safe ones.
    pub allowed_unsafe_sysctls: Vec<String>,
    /// Whether the runtime's own seccomp profile is for containers that name none.
    pub seccomp_default: bool,
    /// How many images are pulled at once; any number if none is said.
    pub max_parallel_image_pulls: Option<usize>,
    /// After which time volumes are published again whose drivers want that.
    pub republish_interval: SignedDuration,
    /// How long containers are left alone at most that end again and again.
    pub max_restart_backoff: SignedDuration,
    /// Whether those who have used up their time of processors wait for more.
    pub cpu_cfs_quota: bool,
}

impl Default for KubeletConfig {
    fn default() -> KubeletConfig {
        KubeletConfig {
            hard_eviction: pressure::EvictionThresholds::default(),
            soft_eviction: pressure::SoftEviction::default(),
            minimum_reclaim: pressure::EvictionThresholds::NONE,
            pressure_transition_period: pressure::PRESSURE_TRANSITION_PERIOD,
            image_gc: images::ImageGcPolicy::default(),
            pull_policy: crate::image_pull_records::VerificationPolicy::default(),
            credentials: Default::default(),
            max_log_bytes: 10 << 20,
            max_log_files: 5,
            pod_pids_limit: 0,
            allowed_unsafe_sysctls: Vec::new(),
            seccomp_default: false,
            max_parallel_image_pulls: None,
            republish_interval: SignedDuration::from_secs(60),
            max_restart_backoff: crate::pod::back_off::MAX_BACK_OFF,
            cpu_cfs_quota: true,
        }
    }
}

/// What is known from earlier looks.
#[derive(Default)]
pub struct MaintenanceState {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    last_pressure: LastPressure,
    image_records: images::ImageRecords,
    last_eviction: Option<Timestamp>,
    /// What there is less of than there must be.
    met_signals: BTreeSet<&'static str>,
    /// Since when there is less than there should be.
    soft_since: BTreeMap<&'static str, Timestamp>,
}

impl MaintenanceState {
    /// What the node is short of.
    pub fn last_pressure(&self) -> LastPressure {
        self.state.lock().last_pressure.clone()
    }
}

pub async fn run(node: &Arc<Node>) {
    let mut tick = 0;
    loop {
        // Who is to stay is known only then.
        let is_filled = *node.is_filled.borrow();
        if is_filled {
            sync_eviction(node).await;
        }
        if !node.pods().is_empty() {
            logs::rotate_all(node).await;
        }
        match node.runtime.remove_orphans().await {
            Ok(0) => {}
            Ok(count) => tracing::info!(count, "removed what the runtime had forgotten"),
            Err(error) => tracing::warn!(%error, "cannot remove what the runtime has forgotten"),
        }
        if is_filled {
            if u64::is_multiple_of(tick, CLEANUP_INTERVAL_TICKS) {
                remove_orphans(node).await;
                images::garbage_collect(node).await;
            }
            tick += 1;
        }
        let mut filled = node.is_filled.subscribe();
        tokio::select! {
            () = node.housekeeping_ticker.tick() => {}
            Ok(_) = filled.wait_for(|filled| *filled), if !is_filled => {}
        }
    }
}

/// Looks how much there is left of everything, and acts where it is too little.
async fn sync_eviction(node: &Arc<Node>) {
    let now = node.ctx.clock.now();
    let signals = SignalObservations::read(node).await;
    let crate::KubeletConfig { hard_eviction: limits, soft_eviction: soft, minimum_reclaim: reclaim, .. } =
        &node.settings.kubelet_config;
    let (met, soft_met) = {
        let mut state = node.maintenance.state.lock();
        let met = limits.thresholds_met(&signals, &ReclaimState { met_signals: &state.met_signals, reclaim });
        state.met_signals = met.iter().map(|met| met.signal).collect();
        state.last_pressure.observe(&met, now);
        let soft_met = soft.thresholds_past_grace_period(&signals, &mut state.soft_since, reclaim, now);
        let State { last_pressure, soft_since: since, .. } = &mut *state;
        last_pressure.observe_signals(since.keys().copied(), now);
        (met, soft_met)
    };
    local_storage_eviction(node).await;
    // Whoever goes for what only should be left has time for it.
    let (first, grace) = match (met.first(), soft_met.first()) {
        (Some(first), _) => (first, None),
        (None, Some(first)) => (first, Some(soft.max_pod_grace_seconds)),
        (None, None) => return,
    };
    let [layers, files] = first.usage_sources(signals.has_dedicated_image_fs);
    if first.is_disk() && layers && images::remove_all(node).await {
        let (signals, before) = (SignalObservations::read(node).await, BTreeSet::from([first.signal]));
        let before = ReclaimState { met_signals: &before, reclaim };
        let still = match grace {
            Some(_) => soft.thresholds_met(&signals, &before),
            None => limits.thresholds_met(&signals, &before),
        };
        if !still.iter().any(|met| met.signal == first.signal) {
            return;
        }
    }
    {
        let mut state = node.maintenance.state.lock();
        if state.last_eviction.is_some_and(|at| now.duration_since(at) < MIN_EVICTION_INTERVAL) {
            return;
        }
        state.last_eviction = Some(now);
    }
    let pods = node.pods();
    let used = stats::pod_stats(node).await.unwrap_or_default();
    let counts_inodes = first.resource() == "inodes";
    let disk = |pod: &Pod| {
        let containers = used.iter().filter(|used| used.uid == pod.uid()).flat_map(|used| &used.containers);
        let written = containers.filter_map(|one| if counts_inodes { one.layer_inodes } else { one.layer });
        let dir_usage = [node.settings.pod_dir(pod), node.settings.log_dir(&pod.key(), pod.uid())];
        let dir_usage = dir_usage.iter().filter(|_| files).map(|dir| sys::trees::usage(dir));
        let dir_usage = dir_usage.map(|(bytes, inodes)| if counts_inodes { inodes } else { bytes });
        written.filter(|_| layers).chain(dir_usage).sum::<u64>()
    };
    let memory =
        |pod: &Pod| used.iter().find(|used| used.uid == pod.uid()).map_or(0, |used| used.usage().working_set);
    // By what they were promised: whoever wants more does not stay longer for it.
    let candidates = pods.iter().filter(|pod| pressure::can_be_evicted(pod)).map(|pod| {
        let usage = if first.is_disk() { disk(pod) } else { memory(pod) };
        (Arc::new(node.allocated(pod).into_owned()), usage)
    });
    if let Some((pod, usage)) = pressure::select_pod(first, candidates.collect()) {
        if let Some(grace) = grace {
            let own = pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds);
            node.with_pod_state(&pod, |memory| {
                memory.grace_period_override = Some(grace.min(own.unwrap_or(grace)))
            });
        }
        evict(node, &pod, pressure::eviction_message(first, &pod, usage));
    } else {
        tracing::warn!(
            resource = first.resource(),
            "the node is short of it, and there is no pod to put out"
        );
    }
}

/// Puts a pod out.
fn evict(node: &Arc<Node>, pod: &Pod, message: String) {
    let first = node.with_pod_state(pod, |state| {
        let first = state.termination_reason.is_none();
        state.termination_reason.get_or_insert_with(|| (crate::EVICTED_REASON.to_owned(), message.clone()));
        first
    });
    if first {
        tracing::warn!(pod = %pod.key(), message, "putting a pod out");
        node.ctx.events.record(reconcile::reference(pod), EventType::Warning, crate::EVICTED_REASON, message);
        node.notify_termination(pod);
    }
}

/// Pods that use more of the disk than they said they would.
async fn local_storage_eviction(node: &Arc<Node>) {
    let pods = node.pods();
    let limited: Vec<_> = pods.into_iter().filter(|pod| pressure::has_disk_limits(pod)).collect();
    if limited.is_empty() {
        return;
    }
    let used = stats::pod_stats(node).await.unwrap_or_default();
    for pod in limited.iter().filter(|pod| !pod.is_deleting()) {
        let layers: BTreeMap<&str, u64> = used
            .iter()
            .filter(|used| used.uid == pod.uid())
            .flat_map(|used| &used.containers)
            .map(|container| (container.name.as_str(), container.layer.unwrap_or(0)))
            .collect();
        let logs = |name: &str| sys::trees::usage(&node.settings.log_dir(&pod.key(), pod.uid()).join(name)).0;
        let volume = |name: &str| {
            let dir = node.settings.pod_dir(pod).join("volumes/kubernetes.io~empty-dir").join(name);
            sys::trees::usage(&dir).0
        };
        let container = |name: &str| layers.get(name).copied().unwrap_or(0) + logs(name);
        if let Some(message) = pressure::limit_exceeded_message(pod, &container, &volume) {
            evict(node, pod, message);
        }
    }
}

/// What is left of pods nobody knows any more, and old sandboxes of those that are known.
async fn remove_orphans(node: &Arc<Node>) {
    // First, so that whoever has some of these is known below.
    let logs = node.settings.logs.entries();
    let (Ok(sandboxes), Ok(containers)) =
        (node.runtime.sandboxes(&[]).await, node.runtime.containers(&[]).await)
    else {
        return;
    };
    crate::network::release_orphaned_addresses(
        node,
        &sandboxes.iter().map(|sandbox| sandbox.id.as_str()).collect(),
    );
    let mut latest: BTreeMap<&str, (u32, &str)> = BTreeMap::new();
    for sandbox in &sandboxes {
        let Some(uid) = sandbox.labels.get(POD_UID) else { continue };
        let attempt = sandbox.metadata.as_ref().map_or(0, |metadata| metadata.attempt);
        let entry = latest.entry(uid).or_insert((attempt, &sandbox.id));
        *entry = (*entry).max((attempt, &sandbox.id));
    }
    for sandbox in &sandboxes {
        let Some(uid) = sandbox.labels.get(POD_UID) else { continue };
        let in_use = containers.iter().any(|container| container.pod_sandbox_id == sandbox.id);
        let is_latest = latest.get(uid.as_str()).is_some_and(|(_, id)| *id == sandbox.id);
        if !is_latest && !in_use && sandbox.state() != PodSandboxState::Ready {
            let _ = node.runtime.remove_sandbox(&sandbox.id).await;
        }
    }
    let known: BTreeSet<String> = {
        let pods = node.pods();
        let listed = sandboxes.iter().filter_map(|sandbox| sandbox.labels.get(POD_UID).cloned());
        pods.iter().map(|pod| pod.uid().to_owned()).chain(listed).collect()
    };
    let dirs = std::fs::read_dir(&node.settings.pods).into_iter().flatten().flatten();
    let mut uids = crate::volumes::iscsi::pods_in_use(&node.csi, &node.settings);
    uids.extend(dirs.map(|entry| entry.file_name().to_string_lossy().into_owned()));
    for uid in uids {
        if !known.contains(&uid)
            && let Err(error) = crate::worker::clean_up_host(node, &uid).await
        {
            tracing::warn!(error, uid, "something is left of a pod");
        }
    }
    node.settings.logs.collect_garbage(&logs, |uid| !known.contains(uid), &running(node).await);
}

/// Runs of containers whose logs are still written to.
pub(crate) async fn running(node: &Node) -> Vec<runtime::cri::Container> {
    let mut containers = node.runtime.containers(&[]).await.unwrap_or_default();
    containers.retain(|container| container.state() == ContainerState::Running);
    containers
}
