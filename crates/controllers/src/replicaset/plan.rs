//! Decides which pods a ReplicaSet creates and deletes, and its status. Does no I/O.

use std::sync::Arc;

use api::selector::LabelSelector;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{ReplicaSet, ReplicaSetCondition, ReplicaSetStatus};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use reconcile::Object as _;

use crate::ownership::{self, ClaimResult};
use crate::pod;

/// The maximum number of pods created or deleted per sync (upstream's `BurstReplicas`).
pub const BURST_REPLICAS: usize = 500;

/// The condition with the reason why pods cannot be created or deleted.
const REPLICA_FAILURE: &str = "ReplicaFailure";

/// The change that leads to the desired number of pods.
#[derive(Debug, PartialEq)]
pub enum PodChange {
    None,
    Create(usize),
    Delete(Vec<Arc<Pod>>),
}

/// The pods of a set that count for its status.
#[derive(Debug, PartialEq)]
pub struct ReplicaSetPods {
    pub active: Vec<Arc<Pod>>,
    pub terminating: usize,
}

/// Claims active pods. Others are neither adopted nor released.
pub fn claim(set: &ReplicaSet, selector: &LabelSelector, pods: &[Arc<Pod>]) -> ClaimResult<Pod> {
    ownership::claim(set, selector, pods.iter().filter(|pod| pod::is_active(pod)).cloned())
}

/// The pods owned by the set.
pub fn owned_pods(set: &ReplicaSet, selector: &LabelSelector, pods: &[Arc<Pod>]) -> ReplicaSetPods {
    ReplicaSetPods { active: claim(set, selector, pods).owned, terminating: terminating(set, selector, pods) }
}

/// The number of terminating pods of the set.
pub fn terminating(set: &ReplicaSet, selector: &LabelSelector, pods: &[Arc<Pod>]) -> usize {
    let terminating = pods.iter().filter(|pod| pod::is_terminating(pod)).cloned();
    ownership::claim(set, selector, terminating).owned.len()
}

/// Plans the pods to create or delete. `related` returns the pods of all sets with the same owner, which
/// determine the distribution over nodes; it is called only if pods have to be deleted.
pub fn pod_change(
    set: &ReplicaSet,
    active: &[Arc<Pod>],
    related: impl FnOnce() -> Vec<Arc<Pod>>,
    now: Timestamp,
) -> PodChange {
    let desired = desired_replicas(set);
    if set.is_deleting() || active.len() == desired {
        return PodChange::None;
    }
    if active.len() < desired {
        return PodChange::Create((desired - active.len()).min(BURST_REPLICAS));
    }
    let surplus = (active.len() - desired).min(BURST_REPLICAS);
    let mut pods = active.to_vec();
    if surplus < pods.len() {
        pod::sort_for_deletion(&mut pods, &related(), now);
        pods.truncate(surplus);
    }
    PodChange::Delete(pods)
}

/// Computes the status. `failure` is why pods could not be created or deleted in this sync.
pub fn status(
    set: &ReplicaSet,
    pods: &ReplicaSetPods,
    failure: Option<&str>,
    now: Timestamp,
) -> ReplicaSetStatus {
    let min_ready_seconds = min_ready_seconds(set);
    let template = set.spec.as_ref().and_then(|spec| spec.template.as_ref());
    let labels = template.and_then(|template| template.metadata.as_ref()?.labels.as_ref());
    let fully_labeled = |pod: &Pod| {
        let mut labels = labels.iter().flat_map(|labels| labels.iter());
        labels.all(|(name, value)| pod.label(name) == Some(value.as_str()))
    };
    let count = |matches: &dyn Fn(&Pod) -> bool| {
        let count = pods.active.iter().filter(|pod| matches(pod)).count();
        Some(count_of(count)).filter(|count| *count > 0)
    };
    ReplicaSetStatus {
        replicas: count_of(pods.active.len()),
        fully_labeled_replicas: count(&fully_labeled),
        ready_replicas: count(&pod::is_ready),
        available_replicas: count(&|pod| pod::is_available(pod, min_ready_seconds, now)),
        terminating_replicas: Some(count_of(pods.terminating)),
        observed_generation: set.metadata.generation,
        conditions: conditions(set, pods, failure, now),
    }
}

/// When to sync again without an event: when the next ready pod becomes available.
pub fn requeue_at(set: &ReplicaSet, pods: &ReplicaSetPods, now: Timestamp) -> Option<Timestamp> {
    match min_ready_seconds(set) {
        0 => None,
        seconds => pod::next_available(&pods.active, seconds, now),
    }
}

pub fn desired_replicas(set: &ReplicaSet) -> usize {
    let replicas = set.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1);
    usize::try_from(replicas).unwrap_or(0)
}

fn min_ready_seconds(set: &ReplicaSet) -> i32 {
    set.spec.as_ref().and_then(|spec| spec.min_ready_seconds).unwrap_or(0)
}

fn count_of(count: usize) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}

/// An existing failure condition stays unchanged, so that a persistent failure causes no writes.
fn conditions(
    set: &ReplicaSet,
    pods: &ReplicaSetPods,
    failure: Option<&str>,
    now: Timestamp,
) -> Option<Vec<ReplicaSetCondition>> {
    let existing = set.status.as_ref().and_then(|status| status.conditions.clone()).unwrap_or_default();
    let is_failure = |condition: &ReplicaSetCondition| condition.type_ == REPLICA_FAILURE;
    let conditions = match failure {
        Some(_) if existing.iter().any(is_failure) => existing,
        Some(message) => {
            let reason = match pods.active.len() < desired_replicas(set) {
                true => "FailedCreate",
                false => "FailedDelete",
            };
            let condition = ReplicaSetCondition {
                type_: REPLICA_FAILURE.to_owned(),
                status: "True".to_owned(),
                last_transition_time: Some(Time(now)),
                reason: Some(reason.to_owned()),
                message: Some(message.to_owned()),
            };
            existing.into_iter().chain([condition]).collect()
        }
        None => existing.into_iter().filter(|condition| !is_failure(condition)).collect(),
    };
    Some(conditions).filter(|conditions| !conditions.is_empty())
}

#[cfg(test)]
mod tests;
