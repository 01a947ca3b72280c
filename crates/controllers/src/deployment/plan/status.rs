//! Computes a Deployment's status: replica counts, conditions and progress.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::apps::v1::{Deployment, DeploymentCondition, DeploymentStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use reconcile::Object as _;

use super::scale::RolloutLimits;
use super::sets::{ReplicaSetState, ReplicaSets};

const PROGRESS_CONDITION: &str = "Progressing";
const AVAILABLE_CONDITION: &str = "Available";
const FAILURE_CONDITION: &str = "ReplicaFailure";

const TIMED_OUT: &str = "ProgressDeadlineExceeded";
const PAUSED: &str = "DeploymentPaused";
const NEW_REPLICA_SET_AVAILABLE: &str = "NewReplicaSetAvailable";

/// Records pause and resume in the `Progressing` condition, so that a pause does not count as lack of
/// progress.
pub(super) fn pause_or_resume(updated: &mut Deployment, now: Timestamp) {
    let reason =
        condition(updated.status.as_ref(), PROGRESS_CONDITION).and_then(|found| found.reason.as_deref());
    // An exceeded deadline stays in the condition.
    if reason == Some(TIMED_OUT) {
        return;
    }
    let is_paused = updated.spec.as_ref().and_then(|spec| spec.paused).unwrap_or(false);
    match (is_paused, reason == Some(PAUSED)) {
        (true, false) => {
            set_progress_condition(updated, "Unknown", PAUSED, "Deployment is paused".to_owned(), now)
        }
        (false, true) => set_progress_condition(
            updated,
            "Unknown",
            "DeploymentResumed",
            "Deployment is resumed".to_owned(),
            now,
        ),
        _ => {}
    }
}

/// Records an existing new ReplicaSet when there is no `Progressing` condition yet.
pub(super) fn record_found_set(updated: &mut Deployment, name: &str, now: Timestamp) {
    if condition(updated.status.as_ref(), PROGRESS_CONDITION).is_none() {
        let message = format!("Found new replica set {name:?}");
        set_progress_condition(updated, "True", "FoundNewReplicaSet", message, now);
    }
}

pub(super) fn record_created_set(updated: &mut Deployment, name: &str, now: Timestamp) {
    set_progress_condition(
        updated,
        "True",
        "NewReplicaSetCreated",
        format!("Created new replica set {name:?}"),
        now,
    );
}

/// The Deployment with the condition that its new ReplicaSet cannot be created.
pub fn creation_failed(deployment: &Deployment, message: String, now: Timestamp) -> Deployment {
    let mut updated = deployment.clone();
    set_progress_condition(&mut updated, "False", "ReplicaSetCreateError", message, now);
    updated
}

/// The Deployment with an incremented collision count, which changes the name of the next ReplicaSet.
pub fn increment_collision_count(deployment: &Deployment) -> Deployment {
    let mut updated = deployment.clone();
    let status = updated.status.get_or_insert_default();
    status.collision_count = Some(status.collision_count.unwrap_or(0).saturating_add(1));
    updated
}

/// The status without progress.
pub(super) fn compute_status(
    updated: &Deployment,
    sets: &ReplicaSets,
    limits: &RolloutLimits,
    now: Timestamp,
) -> DeploymentStatus {
    let sum = |count: fn(&ReplicaSetState) -> i32| sets.0.iter().map(count).fold(0, i32::saturating_add);
    let available = sets.available();
    let some = |count: i32| Some(count).filter(|count| *count != 0);
    let before = updated.status.as_ref();
    let mut status = DeploymentStatus {
        observed_generation: updated.metadata.generation,
        replicas: some(sum(ReplicaSetState::reported_replicas)),
        updated_replicas: some(sets.new_set().map_or(0, ReplicaSetState::reported_replicas)),
        ready_replicas: some(sum(ReplicaSetState::ready)),
        available_replicas: some(available),
        unavailable_replicas: some(sets.existing_replicas().saturating_sub(available).max(0)),
        terminating_replicas: sets.terminating(),
        collision_count: before.and_then(|status| status.collision_count),
        conditions: before.and_then(|status| status.conditions.clone()),
    };
    let enough = match available >= limits.min_available() {
        true => ("True", "MinimumReplicasAvailable", "Deployment has minimum availability."),
        false => ("False", "MinimumReplicasUnavailable", "Deployment does not have minimum availability."),
    };
    let (is_enough, reason, message) = enough;
    set_condition(
        &mut status,
        new_condition(AVAILABLE_CONDITION, is_enough, reason, message.to_owned(), now),
    );
    status
}

/// The status during a rollout, including progress.
pub(super) fn compute_rollout_status(
    deployment: &Deployment,
    updated: &Deployment,
    sets: &ReplicaSets,
    limits: &RolloutLimits,
    now: Timestamp,
) -> DeploymentStatus {
    let mut status = compute_status(updated, sets, limits, now);
    let current = condition(updated.status.as_ref(), PROGRESS_CONDITION).cloned();
    if progress_deadline(updated).is_none() {
        remove_condition(&mut status, PROGRESS_CONDITION);
    } else {
        let is_done = status.replicas == status.updated_replicas
            && current
                .as_ref()
                .is_some_and(|current| current.reason.as_deref() == Some(NEW_REPLICA_SET_AVAILABLE));
        if !is_done {
            update_progress_condition(deployment, updated, sets, &mut status, current, now);
        }
    }
    match sets.failure() {
        Some(failure) => set_condition(&mut status, failure),
        None => remove_condition(&mut status, FAILURE_CONDITION),
    }
    status
}

/// When the progress deadline is exceeded. `None` if the rollout is complete or has no deadline.
pub(super) fn progress_deadline_at(updated: &Deployment) -> Option<Timestamp> {
    let seconds = progress_deadline(updated)?;
    let current = condition(updated.status.as_ref(), PROGRESS_CONDITION)?;
    if current.reason.as_deref() == Some(TIMED_OUT) || is_complete(updated, updated.status.as_ref()) {
        return None;
    }
    let from = current.last_update_time.as_ref()?.0;
    Some(from.checked_add(SignedDuration::from_secs(seconds)).unwrap_or(Timestamp::MAX))
}

/// Whether all desired pods are updated and available, and no old pods exist.
pub(super) fn is_complete(deployment: &Deployment, status: Option<&DeploymentStatus>) -> bool {
    let none = DeploymentStatus::default();
    let status = status.unwrap_or(&none);
    let desired = deployment.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1);
    let counts = [status.updated_replicas, status.replicas, status.available_replicas];
    counts.iter().all(|count| count.unwrap_or(0) == desired)
        && status.observed_generation.unwrap_or(0) >= deployment.metadata.generation.unwrap_or(0)
}

fn update_progress_condition(
    deployment: &Deployment,
    updated: &Deployment,
    sets: &ReplicaSets,
    status: &mut DeploymentStatus,
    current: Option<DeploymentCondition>,
    now: Timestamp,
) {
    let subject = match sets.new_set() {
        Some(set) => format!("ReplicaSet {:?}", set.desired.name()),
        None => format!("Deployment {:?}", deployment.name()),
    };
    if is_complete(updated, Some(status)) {
        let message = format!("{subject} has successfully progressed.");
        set_condition(
            status,
            new_condition(PROGRESS_CONDITION, "True", NEW_REPLICA_SET_AVAILABLE, message, now),
        );
    } else if has_new_progress(updated.status.as_ref(), status) {
        let message = format!("{subject} is progressing.");
        let mut progress = new_condition(PROGRESS_CONDITION, "True", "ReplicaSetUpdated", message, now);
        // Each bit of progress renews the update time, because the deadline counts from the last progress.
        if let Some(current) = current.filter(|current| current.status == "True") {
            progress.last_transition_time = current.last_transition_time;
        }
        remove_condition(status, PROGRESS_CONDITION);
        set_condition(status, progress);
    } else if has_timed_out(updated, status, now) {
        let message = format!("{subject} has timed out progressing.");
        set_condition(status, new_condition(PROGRESS_CONDITION, "False", TIMED_OUT, message, now));
    }
}

/// More updated pods, fewer old pods, or more ready or available pods.
fn has_new_progress(before: Option<&DeploymentStatus>, after: &DeploymentStatus) -> bool {
    let none = DeploymentStatus::default();
    let before = before.unwrap_or(&none);
    let more =
        |count: fn(&DeploymentStatus) -> Option<i32>| count(after).unwrap_or(0) > count(before).unwrap_or(0);
    let old = |status: &DeploymentStatus| status.replicas.unwrap_or(0) - status.updated_replicas.unwrap_or(0);
    more(|status| status.updated_replicas)
        || old(after) < old(before)
        || more(|status| status.ready_replicas)
        || more(|status| status.available_replicas)
}

fn has_timed_out(updated: &Deployment, status: &DeploymentStatus, now: Timestamp) -> bool {
    let (Some(seconds), Some(current)) =
        (progress_deadline(updated), condition(Some(status), PROGRESS_CONDITION))
    else {
        return false;
    };
    match current.reason.as_deref() {
        // The last rollout was complete and the next one has not started.
        Some(NEW_REPLICA_SET_AVAILABLE) => false,
        Some(TIMED_OUT) => true,
        _ => current.last_update_time.as_ref().is_some_and(|from| {
            from.0.checked_add(SignedDuration::from_secs(seconds)).is_ok_and(|until| until < now)
        }),
    }
}

/// The progress deadline in seconds. `None` if there is none.
fn progress_deadline(deployment: &Deployment) -> Option<i64> {
    let seconds = deployment.spec.as_ref()?.progress_deadline_seconds?;
    (seconds != i32::MAX).then_some(seconds.into())
}

/// Sets the `Progressing` condition if the Deployment has a progress deadline.
fn set_progress_condition(
    updated: &mut Deployment,
    status: &str,
    reason: &str,
    message: String,
    now: Timestamp,
) {
    if progress_deadline(updated).is_some() {
        let condition = new_condition(PROGRESS_CONDITION, status, reason, message, now);
        set_condition(updated.status.get_or_insert_default(), condition);
    }
}

fn condition<'a>(status: Option<&'a DeploymentStatus>, kind: &str) -> Option<&'a DeploymentCondition> {
    status?.conditions.as_ref()?.iter().find(|condition| condition.type_ == kind)
}

fn new_condition(
    kind: &str,
    status: &str,
    reason: &str,
    message: String,
    now: Timestamp,
) -> DeploymentCondition {
    DeploymentCondition {
        type_: kind.to_owned(),
        status: status.to_owned(),
        last_update_time: Some(Time(now)),
        last_transition_time: Some(Time(now)),
        reason: Some(reason.to_owned()),
        message: Some(message),
    }
}

/// Appends the condition unless status and reason are unchanged.
fn set_condition(status: &mut DeploymentStatus, mut condition: DeploymentCondition) {
    if let Some(current) = self::condition(Some(status), &condition.type_)
        && current.status == condition.status
    {
        if current.reason == condition.reason {
            return;
        }
        condition.last_transition_time = current.last_transition_time.clone();
    }
    remove_condition(status, &condition.type_);
    status.conditions.get_or_insert_default().push(condition);
}

fn remove_condition(status: &mut DeploymentStatus, kind: &str) {
    if let Some(conditions) = &mut status.conditions {
        conditions.retain(|condition| condition.type_ != kind);
    }
    status.conditions.take_if(|conditions| conditions.is_empty());
}

impl ReplicaSets {
    /// The number of terminating pods. `None` while some observed ReplicaSet does not report it.
    fn terminating(&self) -> Option<i32> {
        let statuses = self.0.iter().filter_map(|set| set.desired.status.as_ref());
        let updated = statuses.filter(|status| {
            status.observed_generation.unwrap_or(0) != 0 || status.terminating_replicas.is_some()
        });
        updated.map(|status| status.terminating_replicas).sum()
    }

    /// The `ReplicaFailure` condition of the new ReplicaSet, or else of an old one.
    fn failure(&self) -> Option<DeploymentCondition> {
        let of_set = |set: &ReplicaSetState| {
            let conditions = set.desired.status.as_ref()?.conditions.as_ref()?;
            conditions.iter().find(|condition| condition.type_ == FAILURE_CONDITION).cloned()
        };
        let failure = self.new_set().and_then(of_set).or_else(|| self.old_sets().find_map(of_set))?;
        Some(DeploymentCondition {
            type_: failure.type_,
            status: failure.status,
            last_update_time: failure.last_transition_time.clone(),
            last_transition_time: failure.last_transition_time,
            reason: failure.reason,
            message: failure.message,
        })
    }
}
