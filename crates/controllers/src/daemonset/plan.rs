//! Decides which nodes get daemon pods, which pods are deleted and in which order pods are replaced. Does
//! no I/O.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{ControllerRevision, DaemonSet, DaemonSetSpec, DaemonSetStatus};
use k8s_openapi::api::core::v1::{Node, Pod};
use reconcile::{EventType, Object as _};

use super::pods::{NodeDecision, is_updated, node_should_run_daemon_pod, target_node};
use super::rollout;
use crate::history::{History, MissingRevision, POD_REVISION, revisions_over_limit};
use crate::pod::{is_available, is_ready, is_terminal, next_available, node, phase};

/// The maximum number of pods created, and of pods deleted, per sync (upstream's `BurstReplicas`).
const BURST_REPLICAS: usize = 250;
const INITIAL_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(15 * 60);

/// Everything the plan depends on.
pub struct DaemonSetSnapshot<'a> {
    pub set: &'a DaemonSet,
    pub spec: &'a DaemonSetSpec,
    pub nodes: &'a [Arc<Node>],
    /// The pods owned by the set.
    pub pods: &'a [Arc<Pod>],
    pub history: &'a History,
    /// Backoff by node for failed pods.
    pub retries: &'a Retries,
    pub now: Timestamp,
}

/// The backoff before a failed pod is replaced, by node.
pub type Retries = HashMap<String, FailedPodRetry>;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FailedPodRetry {
    pub pause: Duration,
    pub since: Timestamp,
}

/// The next step, and when to sync again.
#[derive(Debug, Default, PartialEq)]
pub struct Plan {
    pub step: Step,
    pub requeue_at: Option<Timestamp>,
}

#[derive(Debug, Default, PartialEq)]
pub enum Step {
    #[default]
    Done,
    /// The current template has several revisions. Keep one and relabel the pods of the others.
    MergeRevisions {
        keep: Arc<ControllerRevision>,
        drop: Vec<Arc<ControllerRevision>>,
        pods_to_label: Vec<Arc<Pod>>,
    },
    Revise(MissingRevision),
    Pods(PodChanges),
    TruncateHistory(Vec<Arc<ControllerRevision>>),
    Status(DaemonSetStatus),
}

/// Pods to create and delete.
#[derive(Debug, Default, PartialEq)]
pub struct PodChanges {
    pub delete: Vec<Arc<Pod>>,
    /// The nodes to create pods for.
    pub create: Vec<String>,
    pub retries: Vec<(String, FailedPodRetry)>,
    pub events: Vec<(EventType, &'static str, String)>,
}

/// Plans the next step. `may_change_pods` is whether pods may be created and deleted; it is true once per
/// sync.
pub fn plan(snapshot: &DaemonSetSnapshot<'_>, may_change_pods: bool) -> Plan {
    // With foreground deletion, revisions may be deleted before pods. The state is no longer consistent.
    if snapshot.set.is_deleting() {
        return Plan::default();
    }
    if let Some(step) = merge_revisions(snapshot) {
        return Plan { step, requeue_at: None };
    }
    let current = match snapshot.history.current_revision() {
        Ok(current) => current,
        Err(missing_revision) => return Plan { step: Step::Revise(missing_revision), requeue_at: None },
    };
    let hash = current.label(POD_REVISION).unwrap_or_default();
    let daemon_pods = NodesToDaemonPods::of(snapshot, hash);
    let mut plan = Plan { requeue_at: None, step: Step::Done };
    let pause = snapshot.spec.min_ready_seconds.unwrap_or(0);
    plan.requeue_at = next_available(snapshot.pods, pause, snapshot.now);
    if may_change_pods {
        let (mut pods, wait) = daemon_pods.plan_pods();
        plan.requeue_at = [plan.requeue_at, wait].into_iter().flatten().min();
        if pods.delete.is_empty() && pods.create.is_empty() && is_rolling_update(snapshot.spec) {
            (pods.delete, pods.create) = rollout::plan(&daemon_pods);
        }
        pods.delete.truncate(BURST_REPLICAS);
        pods.create.truncate(BURST_REPLICAS);
        if !pods.delete.is_empty() || !pods.create.is_empty() {
            plan.step = Step::Pods(pods);
            return plan;
        }
    }
    let used = |revision: &ControllerRevision| {
        let hash = revision.label(POD_REVISION);
        snapshot.pods.iter().any(|pod| hash.is_some() && pod.label(POD_REVISION) == hash)
    };
    let old = revisions_over_limit(&snapshot.history.old, snapshot.spec.revision_history_limit, used);
    let status = daemon_pods.status();
    if !old.is_empty() {
        plan.step = Step::TruncateHistory(old.into_iter().cloned().collect());
    } else if snapshot.set.status.as_ref() != Some(&status) {
        plan.step = Step::Status(status);
    }
    plan
}

fn is_rolling_update(spec: &DaemonSetSpec) -> bool {
    let strategy = spec.update_strategy.as_ref().and_then(|strategy| strategy.type_.as_deref());
    strategy == Some("RollingUpdate")
}

fn merge_revisions(snapshot: &DaemonSetSnapshot<'_>) -> Option<Step> {
    let (keep, drop) = snapshot.history.current.split_last().filter(|(_, drop)| !drop.is_empty())?;
    let hash = keep.label(POD_REVISION);
    let dropped = |pod: &&Arc<Pod>| {
        let label = pod.label(POD_REVISION);
        label != hash && drop.iter().any(|revision| revision.label(POD_REVISION) == label)
    };
    let pods_to_label = snapshot.pods.iter().filter(dropped).cloned().collect();
    Some(Step::MergeRevisions { keep: keep.clone(), drop: drop.to_vec(), pods_to_label })
}

/// The pods of a DaemonSet by the node they run on or are meant for.
pub(super) struct NodesToDaemonPods<'a> {
    pub(super) snapshot: &'a DaemonSetSnapshot<'a>,
    pub(super) hash: &'a str,
    pub(super) decision_by_node: BTreeMap<&'a str, NodeDecision>,
    /// Excludes terminal pods that are being deleted. Pods on a node come before unscheduled ones, older pods
    /// before newer ones.
    pub(super) pods: BTreeMap<&'a str, Vec<&'a Arc<Pod>>>,
}

impl<'a> NodesToDaemonPods<'a> {
    fn of(snapshot: &'a DaemonSetSnapshot<'a>, hash: &'a str) -> NodesToDaemonPods<'a> {
        let decision_by_node = snapshot
            .nodes
            .iter()
            .map(|node| (node.name(), node_should_run_daemon_pod(snapshot.set, node)))
            .collect();
        let mut pods: BTreeMap<&str, Vec<&Arc<Pod>>> = BTreeMap::new();
        for pod in snapshot.pods.iter().filter(|pod| !(is_terminal(pod) && pod.is_deleting())) {
            if let Some(node) = target_node(pod) {
                pods.entry(node).or_default().push(pod);
            }
        }
        for list in pods.values_mut() {
            list.sort_by_key(|pod| {
                let created = pod.metadata.creation_timestamp.as_ref().map(|time| time.0);
                (node(pod).is_empty(), created, pod.name().to_owned())
            });
        }
        NodesToDaemonPods { snapshot, hash, decision_by_node, pods }
    }

    pub(super) fn is_new(&self, pod: &Pod) -> bool {
        is_updated(pod, self.snapshot.set, self.hash)
    }

    pub(super) fn is_available(&self, pod: &Pod) -> bool {
        is_available(pod, self.snapshot.spec.min_ready_seconds.unwrap_or(0), self.snapshot.now)
    }

    pub(super) fn desired(&self) -> usize {
        self.decision_by_node.values().filter(|decision| **decision == NodeDecision::Run).count()
    }

    /// Plans one pod on each node that should have one. Also returns when to sync again.
    fn plan_pods(&self) -> (PodChanges, Option<Timestamp>) {
        let (mut pods, mut wait) = (PodChanges::default(), None);
        for (name, decision) in &self.decision_by_node {
            let here = self.pods.get(name).map(Vec::as_slice).unwrap_or_default();
            match decision {
                NodeDecision::Run if here.is_empty() => pods.create.push((*name).to_owned()),
                NodeDecision::NotRun => {
                    pods.delete.extend(here.iter().filter(|pod| !pod.is_deleting()).copied().cloned())
                }
                _ => {
                    let again = self.plan_pods_on_node(name, *decision, here, &mut pods);
                    wait = [wait, again].into_iter().flatten().min();
                }
            }
        }
        // Unscheduled pods for a deleted node are not covered by the pod garbage collector.
        let lost = self.pods.iter().filter(|(name, _)| !self.decision_by_node.contains_key(*name));
        let waiting =
            lost.flat_map(|(_, list)| list).filter(|pod| node(pod).is_empty() && !pod.is_deleting());
        pods.delete.extend(waiting.copied().cloned());
        (pods, wait)
    }

    /// Deletes finished and surplus pods on a node. Returns when the backoff ends, if a failed pod has to
    /// wait.
    fn plan_pods_on_node(
        &self,
        name: &str,
        decision: NodeDecision,
        here: &[&Arc<Pod>],
        pods: &mut PodChanges,
    ) -> Option<Timestamp> {
        let (mut running, mut wait) = (Vec::new(), None);
        for pod in here.iter().filter(|pod| !pod.is_deleting()) {
            match phase(pod) {
                "Failed" => match self.next_retry(name) {
                    Err(until) => wait = Some(until),
                    Ok(retry) => {
                        let message = format!(
                            "Found failed daemon pod {} on node {name}, will try to kill it",
                            pod.key()
                        );
                        pods.events.push((EventType::Warning, "FailedDaemonPod", message));
                        pods.retries.push((name.to_owned(), retry));
                        pods.delete.push(Arc::clone(pod));
                    }
                },
                "Succeeded" => {
                    let message = format!(
                        "Found succeeded daemon pod {} on node {name}, will try to delete it",
                        pod.key()
                    );
                    pods.events.push((EventType::Normal, "SucceededDaemonPod", message));
                    pods.delete.push(Arc::clone(pod));
                }
                _ => running.push(*pod),
            }
        }
        if !rollout::allows_surge(self.snapshot.spec) {
            pods.delete.extend(running.into_iter().skip(1).cloned());
            return wait;
        }
        if running.is_empty() && decision == NodeDecision::Run && wait.is_none() {
            pods.create.push(name.to_owned());
        }
        if running.len() > 1 {
            self.prune(running, pods);
        }
        wait
    }

    /// With surge, a node may have an old pod that serves and a new one that is not available yet.
    fn prune(&self, running: Vec<&Arc<Pod>>, pods: &mut PodChanges) {
        let (new, old): (Vec<_>, Vec<_>) =
            running.into_iter().partition(|pod| pod.label(POD_REVISION) == Some(self.hash));
        if let (Some(new), Some(old)) = (new.first(), old.first())
            && (!is_ready(old) || self.is_available(new))
        {
            pods.delete.push(Arc::clone(old));
        }
        pods.delete.extend(new.into_iter().skip(1).chain(old.into_iter().skip(1)).cloned());
    }

    /// The backoff entry for replacing a failed pod now, or the time until which to wait.
    fn next_retry(&self, node: &str) -> Result<FailedPodRetry, Timestamp> {
        let now = self.snapshot.now;
        let Some(last) = self.snapshot.retries.get(node) else {
            return Ok(FailedPodRetry { pause: INITIAL_BACKOFF, since: now });
        };
        let until = last.since.checked_add(last.pause).unwrap_or(Timestamp::MAX);
        let reset_at = last.since.checked_add(MAX_BACKOFF * 2).unwrap_or(Timestamp::MAX);
        match now {
            now if now < until => Err(until),
            now if now > reset_at => Ok(FailedPodRetry { pause: INITIAL_BACKOFF, since: now }),
            now => Ok(FailedPodRetry { pause: (last.pause * 2).min(MAX_BACKOFF), since: now }),
        }
    }

    fn status(&self) -> DaemonSetStatus {
        let mut status = self.snapshot.set.status.clone().unwrap_or_default();
        let (mut desired, mut current, mut misscheduled, mut ready) = (0, 0, 0, 0);
        let (mut updated, mut available) = (0, 0);
        for (name, decision) in &self.decision_by_node {
            let first = self.pods.get(name).and_then(|list| list.first());
            if *decision != NodeDecision::Run {
                misscheduled += i32::from(first.is_some());
                continue;
            }
            desired += 1;
            let Some(pod) = first else { continue };
            current += 1;
            ready += i32::from(is_ready(pod));
            available += i32::from(self.is_available(pod));
            updated += i32::from(self.is_new(pod));
        }
        let number = |count: i32| Some(count).filter(|count| *count != 0);
        status.desired_number_scheduled = desired;
        status.current_number_scheduled = current;
        status.number_misscheduled = misscheduled;
        status.number_ready = ready;
        status.updated_number_scheduled = number(updated);
        status.number_available = number(available);
        status.number_unavailable = number(desired - available);
        status.observed_generation = self.snapshot.set.metadata.generation;
        status
    }
}
