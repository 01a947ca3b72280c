//! Computes the pods that a Job should have.

use std::collections::BTreeSet;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;

use super::backoff::{Backoff, finished_at};
use super::indexes::Indexes;
use super::plan::{CountedJob, Indexed};
use super::pods::{NewPod, failure_count, ignored_failure_count, index_of};
use super::policy::FailureAction;
use crate::pod::{is_terminating, sort_for_deletion};

/// The maximum number of pods created or removed per sync (upstream's `MaxPodCreateDeletePerSync`).
const MAX_POD_CREATE_DELETE_PER_SYNC: usize = 500;

impl CountedJob<'_> {
    /// The pods to remove, the pods to create, and the end of the backoff if creation has to wait.
    pub(super) fn plan_pods(&self) -> (Vec<Arc<Pod>>, Vec<NewPod>, Option<Timestamp>) {
        let desired = self.desired_active();
        let surplus = self.active.len().saturating_sub(desired);
        let mut remove = self.pods_to_remove(surplus);
        if !self.is_suspended() {
            remove.truncate(MAX_POD_CREATE_DELETE_PER_SYNC);
        }
        if !remove.is_empty() || self.is_suspended() {
            return (remove, Vec::new(), None);
        }
        let terminating = if self.only_replace_failed_pods() { self.terminating } else { 0 };
        let missing =
            desired.saturating_sub(terminating + self.active.len()).min(MAX_POD_CREATE_DELETE_PER_SYNC);
        if missing == 0 {
            return Default::default();
        }
        let Some(indexed) = &self.indexed else {
            return match self.backoff.next_creation_at(self.snapshot.now) {
                Some(until) => (Vec::new(), Vec::new(), Some(until)),
                None => (Vec::new(), vec![NewPod::default(); missing], None),
            };
        };
        let (new_pods, until) = self.indexed_pods_to_create(indexed, missing);
        (Vec::new(), new_pods, until)
    }

    fn indexed_pods_to_create(&self, indexed: &Indexed, count: usize) -> (Vec<NewPod>, Option<Timestamp>) {
        let mut used_indexes: Indexes = self.active.iter().filter_map(|pod| index_of(pod)).collect();
        used_indexes = used_indexes.with(&indexed.succeeded);
        if self.only_replace_failed_pods() {
            let terminating = self.snapshot.pods.iter().filter(|pod| is_terminating(pod));
            used_indexes = used_indexes.with(&terminating.filter_map(|pod| index_of(pod)).collect());
        }
        let Some(failed) = &indexed.failed else {
            if let Some(until) = self.backoff.next_creation_at(self.snapshot.now) {
                return (Vec::new(), Some(until));
            }
            let missing = used_indexes.missing(count, indexed.completions);
            return (
                missing.into_iter().map(|index| NewPod { index: Some(index), failures: None }).collect(),
                None,
            );
        };
        let (mut new_pods, mut wait) = (Vec::new(), None::<Timestamp>);
        for index in used_indexes.with(failed).missing(count, indexed.completions) {
            let Some(last) = indexed.last_failed.get(&index) else {
                new_pods.push(NewPod { index: Some(index), failures: Some((0, 0)) });
                continue;
            };
            let (failures, ignored) = (failure_count(last), ignored_failure_count(last));
            let total = u32::try_from(failures.saturating_add(ignored).saturating_add(1)).unwrap_or(0);
            match (Backoff { failures: total, last: Some(finished_at(last)) })
                .next_creation_at(self.snapshot.now)
            {
                Some(until) => wait = Some(wait.map_or(until, |wait| wait.min(until))),
                None => {
                    let failures = match self.failure_action(last) {
                        FailureAction::Ignore => (failures, ignored.saturating_add(1)),
                        _ => (failures.saturating_add(1), ignored),
                    };
                    new_pods.push(NewPod { index: Some(index), failures: Some(failures) });
                }
            }
        }
        (new_pods, wait)
    }

    /// The desired number of active pods.
    fn desired_active(&self) -> usize {
        if self.is_suspended() {
            return 0;
        }
        let size = |number: i32| usize::try_from(number).unwrap_or(0);
        let parallelism = size(self.spec.parallelism.unwrap_or(1));
        match self.spec.completions {
            None if self.succeeded > 0 => self.active.len(),
            None => parallelism,
            Some(completions) => size(completions).saturating_sub(self.succeeded as usize).min(parallelism),
        }
    }

    /// At least `count` pods to remove. Pods with a missing, invalid or duplicate index come first.
    fn pods_to_remove(&self, count: usize) -> Vec<Arc<Pod>> {
        let mut candidates = self.active.clone();
        sort_for_deletion(&mut candidates, &[], self.snapshot.now);
        let mut remove = Vec::new();
        if let Some(indexed) = &self.indexed {
            // Iterates from best to worst, so that the best pod of each index is kept.
            let mut seen = BTreeSet::new();
            candidates.reverse();
            candidates.retain(|pod| {
                let index = index_of(pod).filter(|index| *index < indexed.completions);
                let stays = index.is_some_and(|index| seen.insert(index));
                if !stays {
                    remove.push(pod.clone());
                }
                stays
            });
            candidates.reverse();
        }
        let more = count.saturating_sub(remove.len());
        remove.extend(candidates.into_iter().take(more));
        remove
    }
}
