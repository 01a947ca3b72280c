//! Decides which pods a Job creates and deletes, its status, and when it is finished. Does no I/O.
//!
//! A finished pod is counted in three steps, and the controller may stop after each of them. First its UID
//! is added to `status.uncountedTerminatedPods`, then the pod's tracking finalizer is removed, then the UID
//! is removed from the status and the counter is incremented. The state is unambiguous at any time: a pod
//! without the finalizer is in the list or in the counter, and a pod with the finalizer is in the list or
//! in neither. (Succeeded indexes need no UIDs, because adding an index to a set twice has no effect.)

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::batch::v1::{Job, JobCondition, JobSpec, JobStatus};
use k8s_openapi::api::core::v1::Pod;
use reconcile::{EventType, Object as _};

use super::backoff::{Backoff, finished_at};
use super::indexes::Indexes;
use super::pods::{NewPod, failure_count, ignored_failure_count, index_of, is_tracked};
use super::policy::{FailureAction, match_failure_policy};
use crate::pod::{is_active, is_terminating, phase};

/// Everything the plan depends on.
pub struct JobSnapshot<'a> {
    pub job: &'a Job,
    /// The pods owned by the Job.
    pub pods: &'a [Arc<Pod>],
    /// The failures before those that the pods show.
    pub backoff: Backoff,
    pub now: Timestamp,
}

/// The next step.
#[derive(Debug, Default, PartialEq)]
pub struct Plan {
    pub step: Step,
    /// The failures so far, to be stored once the step is applied.
    pub backoff: Backoff,
    /// When to sync again without a change.
    pub requeue_at: Option<Timestamp>,
}

#[derive(Debug, Default, PartialEq)]
pub enum Step {
    #[default]
    Done,
    /// Create or remove pods. Removed pods are not counted, so their finalizer is removed first.
    Pods {
        remove: Vec<Arc<Pod>>,
        create: Vec<NewPod>,
    },
    Track(Box<Tracking>),
}

/// Accounting changes, applied in this order.
#[derive(Debug, Default, PartialEq)]
pub struct Tracking {
    pub status: Option<JobStatus>,
    /// Events to emit after the status is written: severity, reason, message.
    pub events: Vec<(EventType, String, String)>,
    /// Active pods to delete because the Job is finished. They are counted already.
    pub delete: Vec<Arc<Pod>>,
    /// Pods to remove the finalizer from.
    pub untrack: Vec<Arc<Pod>>,
}

/// Plans the next step. If `may_change_pods` is false, pods are not created or removed, and only the
/// accounting is updated.
pub fn plan(snapshot: &JobSnapshot<'_>, may_change_pods: bool) -> Plan {
    if is_finished(snapshot.job) {
        return Plan::default();
    }
    let Some(count) = CountedJob::of(snapshot) else { return Plan::default() };
    let mut plan = Plan { backoff: count.backoff, ..Plan::default() };
    let verdict = count.verdict();
    if verdict.is_none() {
        plan.requeue_at = count.active_deadline();
        if may_change_pods && !snapshot.job.is_deleting() {
            let (remove, create, wait) = count.plan_pods();
            plan.requeue_at = [plan.requeue_at, wait].into_iter().flatten().min();
            if !remove.is_empty() || !create.is_empty() {
                plan.step = Step::Pods { remove, create };
                return plan;
            }
        }
    }
    let verdict = verdict.or_else(|| count.completion_verdict());
    let tracking = count.track(verdict);
    if tracking != Tracking::default() {
        plan.step = Step::Track(Box::new(tracking));
    }
    plan
}

pub fn is_finished(job: &Job) -> bool {
    let conditions = job.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions
        .filter(|condition| condition.status == "True")
        .any(|condition| matches!(condition.type_.as_str(), "Complete" | "Failed"))
}

/// A Job with its pods counted.
pub(super) struct CountedJob<'a> {
    pub(super) snapshot: &'a JobSnapshot<'a>,
    pub(super) spec: &'a JobSpec,
    pub(super) status: JobStatus,
    pub(super) active: Vec<Arc<Pod>>,
    pub(super) terminating: usize,
    /// UIDs that are in the status and not yet in the counters.
    pub(super) uncounted: Uncounted,
    pub(super) succeeded: u32,
    pub(super) failed: u32,
    pub(super) indexed: Option<Indexed>,
    pub(super) backoff: Backoff,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Uncounted {
    pub(super) succeeded: BTreeSet<String>,
    pub(super) failed: BTreeSet<String>,
}

/// The state of an Indexed Job.
pub(super) struct Indexed {
    pub(super) completions: u32,
    pub(super) succeeded: Indexes,
    /// Set only with a backoff limit per index.
    pub(super) failed: Option<Indexes>,
    /// The last failed pod of each index that has no active pod. Its replacement inherits the failure
    /// count, so it must not be deleted before.
    pub(super) last_failed: BTreeMap<u32, Arc<Pod>>,
}

impl<'a> CountedJob<'a> {
    fn of(snapshot: &'a JobSnapshot<'a>) -> Option<CountedJob<'a>> {
        let spec = snapshot.job.spec.as_ref()?;
        let status = snapshot.job.status.clone().unwrap_or_default();
        let list = |uids: &Option<Vec<String>>| uids.iter().flatten().cloned().collect();
        let uncounted = match &status.uncounted_terminated_pods {
            Some(pods) => Uncounted { succeeded: list(&pods.succeeded), failed: list(&pods.failed) },
            None => Uncounted::default(),
        };
        let mut count = CountedJob {
            active: snapshot.pods.iter().filter(|pod| is_active(pod)).cloned().collect(),
            terminating: snapshot.pods.iter().filter(|pod| is_terminating(pod)).count(),
            uncounted,
            succeeded: 0,
            failed: 0,
            indexed: None,
            backoff: snapshot.backoff,
            snapshot,
            spec,
            status,
        };
        let uncounted_pod = |pod: &&Arc<Pod>| is_tracked(pod) && count.has_valid_index(pod);
        let succeeded: Vec<&Arc<Pod>> = snapshot
            .pods
            .iter()
            .filter(uncounted_pod)
            .filter(|pod| phase(pod) == "Succeeded")
            .filter(|pod| !count.uncounted.succeeded.contains(pod.uid()))
            .collect();
        let failed: Vec<&Arc<Pod>> = snapshot
            .pods
            .iter()
            .filter(uncounted_pod)
            .filter(|pod| count.is_failed(pod))
            .filter(|pod| !count.uncounted.failed.contains(pod.uid()))
            .collect();
        let counted = failed.iter().filter(|pod| count.failure_action(pod) != FailureAction::Ignore).count();
        count.backoff = snapshot
            .backoff
            .with_finished(succeeded.iter().map(|pod| pod.as_ref()), failed.iter().map(|pod| pod.as_ref()));
        count.succeeded = sum(count.status.succeeded, succeeded.len() + count.uncounted.succeeded.len());
        count.failed = sum(count.status.failed, counted + count.uncounted.failed.len());
        count.indexed = count.indexes();
        if let Some(indexed) = &count.indexed {
            count.succeeded = indexed.succeeded.total();
        }
        Some(count)
    }

    fn indexes(&self) -> Option<Indexed> {
        let completions = self.indexed_completions()?;
        let ended = |counts: &dyn Fn(&Pod) -> bool| -> Indexes {
            let pods = self.snapshot.pods.iter().filter(|pod| is_tracked(pod) && counts(pod));
            pods.filter_map(|pod| index_of(pod)).filter(|index| *index < completions).collect()
        };
        let before =
            Indexes::parse(self.status.completed_indexes.as_deref().unwrap_or_default(), completions);
        let succeeded = before.with(&ended(&|pod| phase(pod) == "Succeeded"));
        let mut indexed = Indexed { completions, succeeded, failed: None, last_failed: BTreeMap::new() };
        if let Some(limit) = self.spec.backoff_limit_per_index {
            let before =
                Indexes::parse(self.status.failed_indexes.as_deref().unwrap_or_default(), completions);
            let failed = before.with(&ended(&|pod| {
                self.is_failed(pod)
                    && match self.failure_action(pod) {
                        FailureAction::FailIndex => true,
                        FailureAction::Ignore => false,
                        _ => failure_count(pod) >= limit,
                    }
            }));
            indexed.last_failed = self.last_failed_pods(&indexed.succeeded.with(&failed), completions);
            indexed.failed = Some(failed);
        }
        Some(indexed)
    }

    fn last_failed_pods(&self, finished_indexes: &Indexes, completions: u32) -> BTreeMap<u32, Arc<Pod>> {
        let done = finished_indexes.with(&self.active.iter().filter_map(|pod| index_of(pod)).collect());
        let mut last_failed: BTreeMap<u32, Arc<Pod>> = BTreeMap::new();
        let rank =
            |pod: &Pod| (failure_count(pod).saturating_add(ignored_failure_count(pod)), finished_at(pod));
        for pod in self.snapshot.pods.iter().filter(|pod| is_tracked(pod) && self.is_failed(pod)) {
            let Some(index) = index_of(pod).filter(|index| *index < completions) else { continue };
            if done.contains(index) {
                continue;
            }
            let later = last_failed.get(&index).is_none_or(|last_failed| rank(last_failed) <= rank(pod));
            if later {
                last_failed.insert(index, pod.clone());
            }
        }
        last_failed
    }

    /// The number of completions of an Indexed Job.
    pub(super) fn indexed_completions(&self) -> Option<u32> {
        let indexed = self.spec.completion_mode.as_deref() == Some("Indexed");
        indexed.then(|| u32::try_from(self.spec.completions.unwrap_or(0)).unwrap_or(0))
    }

    /// Whether the pod has a valid index, if the Job is indexed.
    pub(super) fn has_valid_index(&self, pod: &Pod) -> bool {
        self.indexed_completions()
            .is_none_or(|completions| index_of(pod).is_some_and(|index| index < completions))
    }

    pub(super) fn is_suspended(&self) -> bool {
        self.spec.suspend == Some(true)
    }

    /// Whether a pod is replaced only once it is terminal, instead of when its deletion starts.
    pub(super) fn only_replace_failed_pods(&self) -> bool {
        self.spec.pod_replacement_policy.as_deref() == Some("Failed")
            || self.spec.pod_failure_policy.is_some()
    }

    pub(super) fn is_failed(&self, pod: &Pod) -> bool {
        // A pod on a deleted node disappears without ever reaching the phase Failed.
        phase(pod) == "Failed"
            || !self.only_replace_failed_pods() && pod.is_deleting() && phase(pod) != "Succeeded"
    }

    pub(super) fn failure_action(&self, pod: &Pod) -> FailureAction {
        match_failure_policy(self.spec.pod_failure_policy.as_ref(), pod)
    }

    pub(super) fn condition(&self, kind: &str) -> Option<&JobCondition> {
        self.status.conditions.iter().flatten().find(|condition| condition.type_ == kind)
    }
}

pub(super) fn sum(counter: Option<i32>, more: usize) -> u32 {
    let counter = u32::try_from(counter.unwrap_or(0)).unwrap_or(0);
    counter.saturating_add(u32::try_from(more).unwrap_or(u32::MAX))
}
