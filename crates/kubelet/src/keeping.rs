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
use reconcile::{Object as _, Severity};
use runtime::cri::{ContainerState, PodSandboxState};

use crate::observed::POD_UID;
use crate::{Node, stats};
use pressure::{Before, Pressures, Signals};

/// Beats between two looks for what is left of pods, and for images.
const BEATS: u64 = 6;
/// Between two pods that are put out: the first may have been enough.
const EVICTION_PAUSE: SignedDuration = SignedDuration::from_secs(20);

/// When what is done; the defaults are upstream's.
#[derive(Clone, Debug)]
pub struct Keeping {
    pub limits: pressure::Limits,
    pub soft: pressure::Soft,
    /// How much more than that there must be until a shortage is over.
    pub reclaim: pressure::Limits,
    /// How long a shortage is said to last after it was last seen.
    pub lasts: jiff::SignedDuration,
    pub images: images::Policy,
    /// Of which images it is asked who may use them.
    pub pulled: crate::pulled::Policy,
    /// Programs that have credentials for registries.
    pub credentials: crate::credentials::Config,
    /// Bytes of a log at which a new one is begun, and how many are kept.
    pub log_size: u64,
    pub log_files: usize,
    /// How many processes a pod may have; none is no limit.
    pub pids: i64,
    /// The settings of the kernel that pods may change besides the safe ones.
    pub sysctls: Vec<String>,
    /// Whether the runtime's own seccomp profile is for containers that name none.
    pub seccomp_default: bool,
    /// How many images are pulled at once; any number if none is said.
    pub pulls_at_once: Option<usize>,
    /// After which time volumes are published again whose drivers want that.
    pub republish: SignedDuration,
    /// How long containers are left alone at most that end again and again.
    pub longest_pause: SignedDuration,
    /// Whether those who have used up their time of processors wait for more.
    pub limits_cpu: bool,
}

impl Default for Keeping {
    fn default() -> Keeping {
        Keeping {
            limits: pressure::Limits::default(),
            soft: pressure::Soft::default(),
            reclaim: pressure::Limits::NONE,
            lasts: pressure::LASTS,
            images: images::Policy::default(),
            pulled: crate::pulled::Policy::default(),
            credentials: Default::default(),
            log_size: 10 << 20,
            log_files: 5,
            pids: 0,
            sysctls: Vec::new(),
            seccomp_default: false,
            pulls_at_once: None,
            republish: SignedDuration::from_secs(60),
            longest_pause: crate::pod::back_off::LONGEST,
            limits_cpu: true,
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
    images: images::Seen,
    evicted: Option<Timestamp>,
    /// What there is less of than there must be.
    short: BTreeSet<&'static str>,
    /// Since when there is less than there should be.
    since: BTreeMap<&'static str, Timestamp>,
}

impl Known {
    /// What the node is short of.
    pub fn pressures(&self) -> Pressures {
        self.state.lock().pressures.clone()
    }
}

pub async fn run(node: &Arc<Node>) {
    let mut beat = 0;
    loop {
        // Who is to stay is known only then.
        let is_filled = *node.is_filled.borrow();
        if is_filled {
            look(node).await;
        }
        if !node.pods().is_empty() {
            logs::rotate_all(node).await;
        }
        match node.runtime.sweep().await {
            Ok(0) => {}
            Ok(count) => tracing::info!(count, "removed what the runtime had forgotten"),
            Err(error) => tracing::warn!(%error, "cannot remove what the runtime has forgotten"),
        }
        if is_filled {
            if u64::is_multiple_of(beat, BEATS) {
                remove_leftovers(node).await;
                images::tidy(node).await;
            }
            beat += 1;
        }
        let mut filled = node.is_filled.subscribe();
        tokio::select! {
            () = node.pulse.next() => {}
            Ok(_) = filled.wait_for(|filled| *filled), if !is_filled => {}
        }
    }
}

/// Looks how much there is left of everything, and acts where it is too little.
async fn look(node: &Arc<Node>) {
    let now = node.ctx.clock.now();
    let signals = Signals::read(node).await;
    let crate::Keeping { limits, soft, reclaim, .. } = &node.settings.keeping;
    let (short, due) = {
        let mut state = node.keeping.state.lock();
        let short = limits.reached(&signals, &Before { short: &state.short, reclaim });
        state.short = short.iter().map(|short| short.signal).collect();
        state.pressures.note(&short, now);
        let due = soft.due(&signals, &mut state.since, reclaim, now);
        let State { pressures, since, .. } = &mut *state;
        pressures.note_all(since.keys().copied(), now);
        (short, due)
    };
    over_their_limits(node).await;
    // Whoever goes for what only should be left has time for it.
    let (first, grace) = match (short.first(), due.first()) {
        (Some(first), _) => (first, None),
        (None, Some(first)) => (first, Some(soft.grace)),
        (None, None) => return,
    };
    let [layers, files] = first.takes_room(signals.images_apart);
    if first.is_disk() && layers && images::remove_all(node).await {
        let (signals, before) = (Signals::read(node).await, BTreeSet::from([first.signal]));
        let before = Before { short: &before, reclaim };
        let still = match grace {
            Some(_) => soft.reached(&signals, &before),
            None => limits.reached(&signals, &before),
        };
        if !still.iter().any(|short| short.signal == first.signal) {
            return;
        }
    }
    {
        let mut state = node.keeping.state.lock();
        if state.evicted.is_some_and(|at| now.duration_since(at) < EVICTION_PAUSE) {
            return;
        }
        state.evicted = Some(now);
    }
    let pods = node.pods();
    let used = stats::pods(node).await.unwrap_or_default();
    let counts_inodes = first.resource() == "inodes";
    let disk = |pod: &Pod| {
        let containers = used.iter().filter(|used| used.uid == pod.uid()).flat_map(|used| &used.containers);
        let written = containers.filter_map(|one| if counts_inodes { one.layer_inodes } else { one.layer });
        let kept = [node.settings.pod_dir(pod), node.settings.log_dir(&pod.key(), pod.uid())];
        let kept = kept.iter().filter(|_| files).map(|dir| sys::trees::usage(dir));
        let kept = kept.map(|(bytes, inodes)| if counts_inodes { inodes } else { bytes });
        written.filter(|_| layers).chain(kept).sum::<u64>()
    };
    let memory =
        |pod: &Pod| used.iter().find(|used| used.uid == pod.uid()).map_or(0, |used| used.usage().working_set);
    // By what they were promised: whoever wants more does not stay longer for it.
    let candidates = pods.iter().filter(|pod| pressure::may_be_evicted(pod)).map(|pod| {
        let usage = if first.is_disk() { disk(pod) } else { memory(pod) };
        (Arc::new(node.allocated(pod).into_owned()), usage)
    });
    if let Some((pod, usage)) = pressure::choose(first, candidates.collect()) {
        if let Some(grace) = grace {
            let own = pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds);
            node.remember(&pod, |memory| memory.end_within = Some(grace.min(own.unwrap_or(grace))));
        }
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
        node.hasten(pod);
    }
}

/// Pods that use more of the disk than they said they would.
async fn over_their_limits(node: &Arc<Node>) {
    let pods = node.pods();
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
        let logs = |name: &str| sys::trees::usage(&node.settings.log_dir(&pod.key(), pod.uid()).join(name)).0;
        let volume = |name: &str| {
            let dir = node.settings.pod_dir(pod).join("volumes/kubernetes.io~empty-dir").join(name);
            sys::trees::usage(&dir).0
        };
        let container = |name: &str| layers.get(name).copied().unwrap_or(0) + logs(name);
        if let Some(message) = pressure::over_limits(pod, &container, &volume) {
            evict(node, pod, message);
        }
    }
}

/// What is left of pods nobody knows any more, and old sandboxes of those that are known.
async fn remove_leftovers(node: &Arc<Node>) {
    // First, so that whoever has some of these is known below.
    let logs = node.settings.logs.entries();
    let (Ok(sandboxes), Ok(containers)) =
        (node.runtime.sandboxes(&[]).await, node.runtime.containers(&[]).await)
    else {
        return;
    };
    crate::network::give_back(node, &sandboxes.iter().map(|sandbox| sandbox.id.as_str()).collect());
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
        let pods = node.pods();
        let listed = sandboxes.iter().filter_map(|sandbox| sandbox.labels.get(POD_UID).cloned());
        pods.iter().map(|pod| pod.uid().to_owned()).chain(listed).collect()
    };
    let dirs = std::fs::read_dir(&node.settings.pods).into_iter().flatten().flatten();
    let mut uids = crate::volumes::iscsi::users(&node.csi, &node.settings);
    uids.extend(dirs.map(|entry| entry.file_name().to_string_lossy().into_owned()));
    for uid in uids {
        if !known.contains(&uid)
            && let Err(error) = crate::worker::clear(node, &uid).await
        {
            tracing::warn!(error, uid, "something is left of a pod");
        }
    }
    node.settings.logs.tidy(&logs, |uid| !known.contains(uid), &running(node).await);
}

/// Runs of containers whose logs are still written to.
pub(crate) async fn running(node: &Node) -> Vec<runtime::cri::Container> {
    let mut containers = node.runtime.containers(&[]).await.unwrap_or_default();
    containers.retain(|container| container.state() == ContainerState::Running);
    containers
}
