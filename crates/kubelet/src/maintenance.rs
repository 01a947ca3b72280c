//! Node maintenance: rotates logs, removes unused images and the leftovers of deleted pods, and
//! evicts pods when the node runs short of memory, disk or processes.
//!
//! The kernel has no suitable notification for shortages: pressure stall information comes too
//! late, and file events too often. Therefore this module polls cheap counters and does expensive
//! work only when they require it. It has no timer of its own but runs with the renewals of the
//! node lease ([`crate::housekeeping`]). Logs are checked only if there are pods. Eviction
//! decisions are in [`eviction`].

pub mod eviction;
pub mod image_gc;
pub mod log_rotation;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use parking_lot::Mutex;
use reconcile::{EventType, Object as _};
use runtime::cri::{ContainerState, PodSandboxState};

use crate::observed::POD_UID;
use crate::{Node, stats};
use eviction::{LastPressure, ReclaimState, SignalObservations};

/// Ticks between two runs of orphan removal and image garbage collection.
const CLEANUP_INTERVAL_TICKS: u64 = 6;
/// The minimum time between evictions. The previous one may have been sufficient.
const MIN_EVICTION_INTERVAL: SignedDuration = SignedDuration::from_secs(20);

/// Settings for maintenance, images and containers. Defaults are upstream's.
#[derive(Clone, Debug)]
pub struct KubeletConfig {
    pub hard_eviction: eviction::EvictionThresholds,
    pub soft_eviction: eviction::SoftEviction,
    /// `evictionMinimumReclaim`: how far a signal must exceed its threshold before the shortage is
    /// over.
    pub minimum_reclaim: eviction::EvictionThresholds,
    /// How long a pressure condition stays true after the last observation.
    pub pressure_transition_period: jiff::SignedDuration,
    pub image_gc: image_gc::ImageGcPolicy,
    /// Which images are verified against the pull secrets of a pod.
    pub pull_policy: crate::image_pull_records::VerificationPolicy,
    /// The credential provider plugins.
    pub credentials: crate::credentials::Config,
    /// The size in bytes at which a container log is rotated, and the number of files that are
    /// kept.
    pub max_log_bytes: u64,
    pub max_log_files: usize,
    /// The maximum number of processes of a pod. 0 means no limit.
    pub pod_pids_limit: i64,
    /// The unsafe sysctls that pods may set.
    pub allowed_unsafe_sysctls: Vec<String>,
    /// Whether containers without a seccomp profile get `RuntimeDefault`.
    pub seccomp_default: bool,
    /// The maximum number of parallel image pulls. `None` means no limit.
    pub max_parallel_image_pulls: Option<usize>,
    /// The interval for drivers with `requiresRepublish`.
    pub republish_interval: SignedDuration,
    /// The maximum back-off for restarting containers.
    pub max_restart_backoff: SignedDuration,
    /// Whether CPU limits are enforced with CFS quotas.
    pub cpu_cfs_quota: bool,
}

impl Default for KubeletConfig {
    fn default() -> KubeletConfig {
        KubeletConfig {
            hard_eviction: eviction::EvictionThresholds::default(),
            soft_eviction: eviction::SoftEviction::default(),
            minimum_reclaim: eviction::EvictionThresholds::NONE,
            pressure_transition_period: eviction::PRESSURE_TRANSITION_PERIOD,
            image_gc: image_gc::ImageGcPolicy::default(),
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

/// The maintenance state that is kept between ticks.
#[derive(Default)]
pub struct MaintenanceState {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    last_pressure: LastPressure,
    image_records: image_gc::ImageRecords,
    last_eviction: Option<Timestamp>,
    /// The signals that are below their hard thresholds.
    met_signals: BTreeSet<&'static str>,
    /// Since when each signal is below its soft threshold.
    soft_since: BTreeMap<&'static str, Timestamp>,
}

impl MaintenanceState {
    /// When each kind of pressure was last observed.
    pub fn last_pressure(&self) -> LastPressure {
        self.state.lock().last_pressure.clone()
    }
}

pub async fn run(node: &Arc<Node>) {
    let mut tick = 0;
    loop {
        // Evictions and cleanup need the complete pod list. Before the caches are synced, pods
        // would count as orphans.
        let is_filled = *node.is_filled.borrow();
        if is_filled {
            sync_eviction(node).await;
        }
        if !node.pods().is_empty() {
            log_rotation::rotate_all(node).await;
        }
        match node.runtime.remove_orphans().await {
            Ok(0) => {}
            Ok(count) => tracing::info!(count, "removed orphaned runtime state"),
            Err(error) => tracing::warn!(%error, "failed to remove orphaned runtime state, will retry"),
        }
        if is_filled {
            if u64::is_multiple_of(tick, CLEANUP_INTERVAL_TICKS) {
                remove_orphans(node).await;
                image_gc::garbage_collect(node).await;
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

/// The eviction manager's synchronize step: reads the signals, and reclaims images or evicts a pod
/// if a threshold is met.
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
    // For a soft threshold the pod has a grace period.
    let (first, grace) = match (met.first(), soft_met.first()) {
        (Some(first), _) => (first, None),
        (None, Some(first)) => (first, Some(soft.max_pod_grace_seconds)),
        (None, None) => return,
    };
    // Unused images go first. If that is sufficient, no pod is evicted.
    let [layers, files] = first.usage_sources(signals.has_dedicated_image_fs);
    if first.is_disk() && layers && image_gc::remove_all(node).await {
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
    // Rank by the allocated resources: a pending resize must not raise a pod's request.
    let candidates = pods.iter().filter(|pod| eviction::can_be_evicted(pod)).map(|pod| {
        let usage = if first.is_disk() { disk(pod) } else { memory(pod) };
        (Arc::new(node.allocated(pod).into_owned()), usage)
    });
    if let Some((pod, usage)) = eviction::select_pod(first, candidates.collect()) {
        if let Some(grace) = grace {
            let own = pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds);
            node.with_pod_state(&pod, |memory| {
                memory.grace_period_override = Some(grace.min(own.unwrap_or(grace)))
            });
        }
        evict(node, &pod, eviction::eviction_message(first, &pod, usage));
    } else {
        tracing::warn!(resource = first.resource(), "eviction threshold is met, but no pod can be evicted");
    }
}

/// Evicts a pod: its worker terminates it and sets the status.
fn evict(node: &Arc<Node>, pod: &Pod, message: String) {
    let first = node.with_pod_state(pod, |state| {
        let first = state.termination_reason.is_none();
        state.termination_reason.get_or_insert_with(|| (crate::EVICTED_REASON.to_owned(), message.clone()));
        first
    });
    if first {
        tracing::warn!(pod = %pod.key(), message, "evicting a pod");
        node.ctx.events.record(reconcile::reference(pod), EventType::Warning, crate::EVICTED_REASON, message);
        node.notify_termination(pod);
    }
}

/// Evicts pods that exceed the limits on their local storage.
async fn local_storage_eviction(node: &Arc<Node>) {
    let pods = node.pods();
    let limited: Vec<_> = pods.into_iter().filter(|pod| eviction::has_disk_limits(pod)).collect();
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
        if let Some(message) = eviction::limit_exceeded_message(pod, &container, &volume) {
            evict(node, pod, message);
        }
    }
}

/// Removes sandboxes, directories and logs of pods that do not exist any more, and old sandboxes of
/// those that do.
async fn remove_orphans(node: &Arc<Node>) {
    // List logs before the sandboxes: a pod that starts meanwhile is then among the known ones
    // below.
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
            tracing::warn!(error, uid, "failed to clean up after a deleted pod, will retry");
        }
    }
    node.settings.logs.collect_garbage(&logs, |uid| !known.contains(uid), &running(node).await);
}

/// Running containers, whose logs are still written.
pub(crate) async fn running(node: &Node) -> Vec<runtime::cri::Container> {
    let mut containers = node.runtime.containers(&[]).await.unwrap_or_default();
    containers.retain(|container| container.state() == ContainerState::Running);
    containers
}
