//! Job accounting: the status, and the pods that are counted and can lose their finalizer.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::batch::v1::{JobCondition, JobStatus, UncountedTerminatedPods};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use reconcile::{EventType, Object as _};

use super::indexes::Indexes;
use super::plan::{CountedJob, Tracking, Uncounted, sum};
use super::pods::{index_of, is_tracked};
use super::policy::FailureAction;
use super::verdict::Verdict;
use crate::pod::{is_ready, phase};

/// The maximum number of UIDs in the status, which limits them to about 20 KB.
const MAX_UNCOUNTED_PODS: usize = 500;

impl CountedJob<'_> {
    /// Computes the accounting changes.
    pub(super) fn track(&self, verdict: Option<Verdict>) -> Tracking {
        let mut status = self.status.clone();
        let mut tracking = Tracking::default();
        self.update_start_and_suspend(&mut status, verdict.is_some(), &mut tracking.events);
        let mut uncounted = self.count_untracked(&mut status);
        let more = self.count_ended(verdict.as_ref(), &mut status, &mut uncounted, &mut tracking.untrack);
        let (mut active, mut ready) = (self.active.len(), self.ready());
        let mut terminating = self.terminating;
        if let Some(verdict) = &verdict {
            tracking.delete = self.active.clone();
            terminating += active;
            (active, ready) = (0, 0);
            let kind = if verdict.succeeded { "SuccessCriteriaMet" } else { "FailureTarget" };
            self.add_condition(&mut status, kind, verdict);
        }
        let nothing_left = uncounted.succeeded.is_empty()
            && uncounted.failed.is_empty()
            && tracking.untrack.is_empty()
            && terminating == 0
            && !more;
        status.active = non_zero(active);
        status.ready = Some(saturating_i32(ready));
        status.terminating = Some(saturating_i32(terminating));
        status.uncounted_terminated_pods = Some(uncounted.to_status());
        if let Some(verdict) = verdict.filter(|_| nothing_left) {
            self.finish(&mut status, &verdict, &mut tracking.events);
        }
        if self.snapshot.job.status.as_ref() != Some(&status) {
            tracking.status = Some(status);
        }
        tracking
    }

    fn ready(&self) -> usize {
        self.active.iter().filter(|pod| is_ready(pod)).count()
    }

    /// Sets the start time and the `Suspended` condition.
    fn update_start_and_suspend(
        &self,
        status: &mut JobStatus,
        over: bool,
        events: &mut Vec<(EventType, String, String)>,
    ) {
        let now = Time(self.snapshot.now);
        if status.start_time.is_none() && !self.is_suspended() {
            status.start_time = Some(now.clone());
        }
        if over || self.snapshot.job.is_deleting() {
            return;
        }
        let known = self.condition("Suspended");
        let (value, word, reason) = match self.is_suspended() {
            true => ("True", "suspended", "JobSuspended"),
            false if known.is_none() => return,
            false => ("False", "resumed", "JobResumed"),
        };
        let message = format!("Job {word}");
        let same = |known: &JobCondition| {
            known.status == value
                && known.reason.as_deref() == Some(reason)
                && known.message.as_deref() == Some(&message)
        };
        if known.is_some_and(same) {
            return;
        }
        // `activeDeadlineSeconds` counts from the last resume.
        status.start_time = (!self.is_suspended()).then_some(now);
        put_condition(status, self.condition_of("Suspended", value, reason, &message));
        let event = if self.is_suspended() { "Suspended" } else { "Resumed" };
        events.push((EventType::Normal, event.to_owned(), message));
    }

    /// Moves UIDs whose pods have no finalizer any more into the counters. The others stay in the list.
    fn count_untracked(&self, status: &mut JobStatus) -> Uncounted {
        let tracked: BTreeSet<&str> =
            self.snapshot.pods.iter().filter(|pod| is_tracked(pod)).map(|pod| pod.uid()).collect();
        let mut left = self.uncounted.clone();
        left.succeeded.retain(|uid| tracked.contains(uid.as_str()));
        left.failed.retain(|uid| tracked.contains(uid.as_str()));
        let removed_count = |before: &BTreeSet<String>, left: &BTreeSet<String>| before.len() - left.len();
        let succeeded = sum(status.succeeded, removed_count(&self.uncounted.succeeded, &left.succeeded));
        let failed = sum(status.failed, removed_count(&self.uncounted.failed, &left.failed));
        status.succeeded = non_zero(succeeded as usize);
        status.failed = non_zero(failed as usize);
        left
    }

    /// Adds finished pods whose finalizer can be removed. Returns whether there are more than the list may
    /// hold.
    fn count_ended(
        &self,
        verdict: Option<&Verdict>,
        status: &mut JobStatus,
        uncounted: &mut Uncounted,
        untrack: &mut Vec<Arc<Pod>>,
    ) -> bool {
        let mut pods: Vec<&Arc<Pod>> = self
            .snapshot
            .pods
            .iter()
            .filter(|pod| is_tracked(pod) && self.can_untrack(pod, verdict))
            .collect();
        pods.sort_by_key(|pod| index_of(pod));
        let before = status.completed_indexes.as_deref().unwrap_or_default();
        let counted = Indexes::parse(before, self.indexed_completions().unwrap_or(0));
        let mut new_indexes = Vec::new();
        let mut more = false;
        for pod in pods {
            if new_indexes.len() + uncounted.succeeded.len() + uncounted.failed.len() >= MAX_UNCOUNTED_PODS {
                more = true;
                break;
            }
            untrack.push(pod.clone());
            let fails = self.is_failed(pod) || verdict.is_some_and(|verdict| !verdict.succeeded);
            if phase(pod) == "Succeeded" && !self.uncounted.failed.contains(pod.uid()) {
                match (&self.indexed, index_of(pod)) {
                    (None, _) => _ = uncounted.succeeded.insert(pod.uid().to_owned()),
                    (Some(indexed), Some(index))
                        if index < indexed.completions && !counted.contains(index) =>
                    {
                        new_indexes.push(index)
                    }
                    _ => {}
                }
            } else if fails && self.has_valid_index(pod) && self.failure_action(pod) != FailureAction::Ignore
            {
                uncounted.failed.insert(pod.uid().to_owned());
            }
        }
        if let Some(indexed) = &self.indexed {
            let succeeded = counted.with(&new_indexes.into_iter().collect());
            status.succeeded = non_zero(succeeded.total() as usize);
            status.completed_indexes = Some(succeeded.to_string()).filter(|text| !text.is_empty());
            status.failed_indexes = indexed.failed.as_ref().map(Indexes::to_string);
        }
        more
    }

    /// Whether the finalizer of a pod can be removed once it is counted.
    fn can_untrack(&self, pod: &Pod, verdict: Option<&Verdict>) -> bool {
        if self.snapshot.job.is_deleting() || verdict.is_some() || phase(pod) == "Succeeded" {
            return true;
        }
        let last_failed = || {
            let indexed = self.indexed.as_ref()?;
            indexed.last_failed.get(&index_of(pod)?)
        };
        self.is_failed(pod) && last_failed().is_none_or(|last_failed| last_failed.uid() != pod.uid())
    }

    fn finish(
        &self,
        status: &mut JobStatus,
        verdict: &Verdict,
        events: &mut Vec<(EventType, String, String)>,
    ) {
        let now = Time(self.snapshot.now);
        self.add_condition(status, if verdict.succeeded { "Complete" } else { "Failed" }, verdict);
        if !verdict.succeeded {
            events.push((EventType::Warning, verdict.reason.clone(), verdict.message.clone()));
            return;
        }
        status.completion_time = Some(now);
        if self.spec.completions.is_some_and(|completions| status.succeeded.unwrap_or(0) > completions) {
            let message = "Too many succeeded pods running after completion count reached";
            events.push((EventType::Warning, "TooManySucceededPods".to_owned(), message.to_owned()));
        }
        events.push((EventType::Normal, "Completed".to_owned(), "Job completed".to_owned()));
    }

    fn add_condition(&self, status: &mut JobStatus, kind: &str, verdict: &Verdict) {
        let known = status.conditions.iter().flatten();
        if !known.into_iter().any(|condition| condition.type_ == kind && condition.status == "True") {
            put_condition(status, self.condition_of(kind, "True", &verdict.reason, &verdict.message));
        }
    }

    fn condition_of(&self, kind: &str, status: &str, reason: &str, message: &str) -> JobCondition {
        let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        JobCondition {
            last_probe_time: Some(Time(self.snapshot.now)),
            last_transition_time: Some(Time(self.snapshot.now)),
            message: some(message),
            reason: some(reason),
            status: status.to_owned(),
            type_: kind.to_owned(),
        }
    }
}

impl Uncounted {
    fn to_status(&self) -> UncountedTerminatedPods {
        let list = |uids: &BTreeSet<String>| (!uids.is_empty()).then(|| uids.iter().cloned().collect());
        UncountedTerminatedPods { failed: list(&self.failed), succeeded: list(&self.succeeded) }
    }
}

fn put_condition(status: &mut JobStatus, condition: JobCondition) {
    let conditions = status.conditions.get_or_insert_default();
    match conditions.iter_mut().find(|known| known.type_ == condition.type_) {
        Some(known) => *known = condition,
        None => conditions.push(condition),
    }
}

fn saturating_i32(number: usize) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

/// Converts a counter; 0 is omitted, as in the Go API.
fn non_zero(number: usize) -> Option<i32> {
    Some(saturating_i32(number)).filter(|number| *number != 0)
}
