//! Which pods a Job should have.

use std::collections::BTreeSet;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;

use super::backoff::{Backoff, finished_at};
use super::indexes::Indexes;
use super::plan::{Count, Indexed};
use super::pods::{Birth, failure_count, ignored_failure_count, index_of};
use super::policy::Judgement;
use crate::pod::{is_terminating, sort_for_deletion};

/// The most pods made or removed at once.
const MOST_PODS: usize = 500;

impl Count<'_> {
    /// The pods to remove, the pods to make, and until when to wait before making more.
    pub(super) fn manage(&self) -> (Vec<Arc<Pod>>, Vec<Birth>, Option<Timestamp>) {
        let wanted = self.wanted();
        let surplus = self.active.len().saturating_sub(wanted);
        let mut remove = self.surplus(surplus);
        if !self.is_suspended() {
            remove.truncate(MOST_PODS);
        }
        if !remove.is_empty() || self.is_suspended() {
            return (remove, Vec::new(), None);
        }
        let terminating = if self.waits_for_the_end() { self.terminating } else { 0 };
        let missing = wanted.saturating_sub(terminating + self.active.len()).min(MOST_PODS);
        if missing == 0 {
            return Default::default();
        }
        let Some(indexed) = &self.indexed else {
            return match self.backoff.until(self.sight.now) {
                Some(until) => (Vec::new(), Vec::new(), Some(until)),
                None => (Vec::new(), vec![Birth::default(); missing], None),
            };
        };
        let (births, until) = self.births(indexed, missing);
        (Vec::new(), births, until)
    }

    fn births(&self, indexed: &Indexed, count: usize) -> (Vec<Birth>, Option<Timestamp>) {
        let mut taken: Indexes = self.active.iter().filter_map(|pod| index_of(pod)).collect();
        taken = taken.with(&indexed.succeeded);
        if self.waits_for_the_end() {
            let going = self.sight.pods.iter().filter(|pod| is_terminating(pod));
            taken = taken.with(&going.filter_map(|pod| index_of(pod)).collect());
        }
        let Some(failed) = &indexed.failed else {
            if let Some(until) = self.backoff.until(self.sight.now) {
                return (Vec::new(), Some(until));
            }
            let missing = taken.missing(count, indexed.completions);
            return (
                missing.into_iter().map(|index| Birth { index: Some(index), failures: None }).collect(),
                None,
            );
        };
        let (mut births, mut wait) = (Vec::new(), None::<Timestamp>);
        for index in taken.with(failed).missing(count, indexed.completions) {
            let Some(last) = indexed.kept.get(&index) else {
                births.push(Birth { index: Some(index), failures: Some((0, 0)) });
                continue;
            };
            let (failures, ignored) = (failure_count(last), ignored_failure_count(last));
            let total = u32::try_from(failures.saturating_add(ignored).saturating_add(1)).unwrap_or(0);
            match (Backoff { failures: total, last: Some(finished_at(last)) }).until(self.sight.now) {
                Some(until) => wait = Some(wait.map_or(until, |wait| wait.min(until))),
                None => {
                    let failures = match self.judge(last) {
                        Judgement::Ignore => (failures, ignored.saturating_add(1)),
                        _ => (failures.saturating_add(1), ignored),
                    };
                    births.push(Birth { index: Some(index), failures: Some(failures) });
                }
            }
        }
        (births, wait)
    }

    /// How many pods should be active.
    fn wanted(&self) -> usize {
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

    /// At least `count` pods to remove: first those whose index is missing, wrong or taken by a better one.
    fn surplus(&self, count: usize) -> Vec<Arc<Pod>> {
        let mut candidates = self.active.clone();
        sort_for_deletion(&mut candidates, &[], self.sight.now);
        let mut remove = Vec::new();
        if let Some(indexed) = &self.indexed {
            // The best of an index comes last.
            let mut held = BTreeSet::new();
            candidates.reverse();
            candidates.retain(|pod| {
                let index = index_of(pod).filter(|index| *index < indexed.completions);
                let stays = index.is_some_and(|index| held.insert(index));
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
