//! What a Deployment's status says: how many, how far, and since when.

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

/// Notes that a Deployment was paused or goes on, so that the pause is not taken for a lack of progress.
pub(super) fn pause_or_resume(updated: &mut Deployment, now: Timestamp) {
    let reason =
        condition(updated.status.as_ref(), PROGRESS_CONDITION).and_then(|found| found.reason.as_deref());
    // A lack of progress that has been told stays told.
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

/// Notes that the set was there when progress was first looked at.
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

/// The Deployment with its status saying that its new set cannot be created.
pub fn creation_failed(deployment: &Deployment, message: String, now: Timestamp) -> Deployment {
    let mut updated = deployment.clone();
    set_progress_condition(&mut updated, "False", "ReplicaSetCreateError", message, now);
    updated
}

/// The Deployment with its status saying that the name of its new set is another's, so that the next name
/// differs.
pub fn increment_collision_count(deployment: &Deployment) -> Deployment {
    let mut updated = deployment.clone();
    let status = updated.status.get_or_insert_default();
    status.collision_count = Some(status.collision_count.unwrap_or(0).saturating_add(1));
    updated
}

/// The status without an estimate of progress.
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

/// The status in the course of a rollout: also how it goes.
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

/// When the rollout will have made no progress for too long; `None` where it has ended.
pub(super) fn progress_deadline_at(updated: &Deployment) -> Option<Timestamp> {
    let seconds = progress_deadline(updated)?;
    let current = condition(updated.status.as_ref(), PROGRESS_CONDITION)?;
    if current.reason.as_deref() == Some(TIMED_OUT) || is_complete(updated, updated.status.as_ref()) {
        return None;
    }
    let from = current.last_update_time.as_ref()?.0;
    Some(from.checked_add(SignedDuration::from_secs(seconds)).unwrap_or(Timestamp::MAX))
}

/// All wanted pods are of the new set and available, and no others are there.
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
        // Said again with each bit of progress, for the deadline counts from the last one.
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

/// More new pods, fewer old ones, or more of either ready or available.
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
        // It was done; what comes next has not begun yet.
        Some(NEW_REPLICA_SET_AVAILABLE) => false,
        Some(TIMED_OUT) => true,
        _ => current.last_update_time.as_ref().is_some_and(|from| {
            from.0.checked_add(SignedDuration::from_secs(seconds)).is_ok_and(|until| until < now)
        }),
    }
}

/// In seconds; `None` where progress has no deadline.
fn progress_deadline(deployment: &Deployment) -> Option<i64> {
    let seconds = deployment.spec.as_ref()?.progress_deadline_seconds?;
    (seconds != i32::MAX).then_some(seconds.into())
}

/// Says something about progress, where that is looked at at all.
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

/// Puts the condition last, unless the same is said already.
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
    /// Pods on their way out; `None` as long as some set does not tell.
    fn terminating(&self) -> Option<i32> {
        let statuses = self.0.iter().filter_map(|set| set.desired.status.as_ref());
        let updated = statuses.filter(|status| {
            status.observed_generation.unwrap_or(0) != 0 || status.terminating_replicas.is_some()
        });
        updated.map(|status| status.terminating_replicas).sum()
    }

    /// Why pods of a set cannot be created or deleted; the new set's reason comes first.
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
