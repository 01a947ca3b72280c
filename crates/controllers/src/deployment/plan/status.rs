//! What a Deployment's status says: how many, how far, and since when.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::apps::v1::{Deployment, DeploymentCondition, DeploymentStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use reconcile::Object as _;

use super::scale::Limits;
use super::sets::{Set, Sets};

const PROGRESSING: &str = "Progressing";
const AVAILABLE: &str = "Available";
const FAILURE: &str = "ReplicaFailure";

const TIMED_OUT: &str = "ProgressDeadlineExceeded";
const PAUSED: &str = "DeploymentPaused";
const DONE: &str = "NewReplicaSetAvailable";

/// Notes that a Deployment was paused or goes on, so that the pause is not taken for a lack of progress.
pub(super) fn pause_or_resume(told: &mut Deployment, now: Timestamp) {
    let reason = condition(told.status.as_ref(), PROGRESSING).and_then(|found| found.reason.as_deref());
    // A lack of progress that has been told stays told.
    if reason == Some(TIMED_OUT) {
        return;
    }
    let is_paused = told.spec.as_ref().and_then(|spec| spec.paused).unwrap_or(false);
    match (is_paused, reason == Some(PAUSED)) {
        (true, false) => progress(told, "Unknown", PAUSED, "Deployment is paused".to_owned(), now),
        (false, true) => {
            progress(told, "Unknown", "DeploymentResumed", "Deployment is resumed".to_owned(), now)
        }
        _ => {}
    }
}

/// Notes that the set was there when progress was first looked at.
pub(super) fn found(told: &mut Deployment, name: &str, now: Timestamp) {
    if condition(told.status.as_ref(), PROGRESSING).is_none() {
        let message = format!("Found new replica set {name:?}");
        progress(told, "True", "FoundNewReplicaSet", message, now);
    }
}

pub(super) fn created(told: &mut Deployment, name: &str, now: Timestamp) {
    progress(told, "True", "NewReplicaSetCreated", format!("Created new replica set {name:?}"), now);
}

/// The Deployment with its status saying that its new set cannot be created.
pub fn creation_failed(deployment: &Deployment, message: String, now: Timestamp) -> Deployment {
    let mut told = deployment.clone();
    progress(&mut told, "False", "ReplicaSetCreateError", message, now);
    told
}

/// The Deployment with its status saying that the name of its new set is another's, so that the next name
/// differs.
pub fn collided(deployment: &Deployment) -> Deployment {
    let mut told = deployment.clone();
    let status = told.status.get_or_insert_default();
    status.collision_count = Some(status.collision_count.unwrap_or(0).saturating_add(1));
    told
}

/// The status without an estimate of progress.
pub(super) fn observe(told: &Deployment, sets: &Sets, limits: &Limits, now: Timestamp) -> DeploymentStatus {
    let sum = |count: fn(&Set) -> i32| sets.0.iter().map(count).fold(0, i32::saturating_add);
    let available = sets.available();
    let some = |count: i32| Some(count).filter(|count| *count != 0);
    let before = told.status.as_ref();
    let mut status = DeploymentStatus {
        observed_generation: told.metadata.generation,
        replicas: some(sum(Set::running)),
        updated_replicas: some(sets.new_one().map_or(0, Set::running)),
        ready_replicas: some(sum(Set::ready)),
        available_replicas: some(available),
        unavailable_replicas: some(sets.known_replicas().saturating_sub(available).max(0)),
        terminating_replicas: sets.terminating(),
        collision_count: before.and_then(|status| status.collision_count),
        conditions: before.and_then(|status| status.conditions.clone()),
    };
    let enough = match available >= limits.fewest() {
        true => ("True", "MinimumReplicasAvailable", "Deployment has minimum availability."),
        false => ("False", "MinimumReplicasUnavailable", "Deployment does not have minimum availability."),
    };
    let (is_enough, reason, message) = enough;
    set_condition(&mut status, new_condition(AVAILABLE, is_enough, reason, message.to_owned(), now));
    status
}

/// The status in the course of a rollout: also how it goes.
pub(super) fn of_rollout(
    deployment: &Deployment,
    told: &Deployment,
    sets: &Sets,
    limits: &Limits,
    now: Timestamp,
) -> DeploymentStatus {
    let mut status = observe(told, sets, limits, now);
    let current = condition(told.status.as_ref(), PROGRESSING).cloned();
    if progress_deadline(told).is_none() {
        remove_condition(&mut status, PROGRESSING);
    } else {
        let is_done = status.replicas == status.updated_replicas
            && current.as_ref().is_some_and(|current| current.reason.as_deref() == Some(DONE));
        if !is_done {
            estimate(deployment, told, sets, &mut status, current, now);
        }
    }
    match sets.failure() {
        Some(failure) => set_condition(&mut status, failure),
        None => remove_condition(&mut status, FAILURE),
    }
    status
}

/// When the rollout will have made no progress for too long; `None` where it has ended.
pub(super) fn deadline(told: &Deployment) -> Option<Timestamp> {
    let seconds = progress_deadline(told)?;
    let current = condition(told.status.as_ref(), PROGRESSING)?;
    if current.reason.as_deref() == Some(TIMED_OUT) || is_complete(told, told.status.as_ref()) {
        return None;
    }
    let from = current.last_update_time.as_ref()?.0;
    Some(from.checked_add(SignedDuration::from_secs(seconds)).unwrap_or(Timestamp::MAX))
}

/// All wanted pods are of the new set and available, and no others are there.
pub(super) fn is_complete(deployment: &Deployment, status: Option<&DeploymentStatus>) -> bool {
    let none = DeploymentStatus::default();
    let status = status.unwrap_or(&none);
    let wanted = deployment.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1);
    let counts = [status.updated_replicas, status.replicas, status.available_replicas];
    counts.iter().all(|count| count.unwrap_or(0) == wanted)
        && status.observed_generation.unwrap_or(0) >= deployment.metadata.generation.unwrap_or(0)
}

fn estimate(
    deployment: &Deployment,
    told: &Deployment,
    sets: &Sets,
    status: &mut DeploymentStatus,
    current: Option<DeploymentCondition>,
    now: Timestamp,
) {
    let who = match sets.new_one() {
        Some(set) => format!("ReplicaSet {:?}", set.now.name()),
        None => format!("Deployment {:?}", deployment.name()),
    };
    if is_complete(told, Some(status)) {
        let message = format!("{who} has successfully progressed.");
        set_condition(status, new_condition(PROGRESSING, "True", DONE, message, now));
    } else if has_progressed(told.status.as_ref(), status) {
        let message = format!("{who} is progressing.");
        let mut progressing = new_condition(PROGRESSING, "True", "ReplicaSetUpdated", message, now);
        // Said again with each bit of progress, for the deadline counts from the last one.
        if let Some(current) = current.filter(|current| current.status == "True") {
            progressing.last_transition_time = current.last_transition_time;
        }
        remove_condition(status, PROGRESSING);
        set_condition(status, progressing);
    } else if has_timed_out(told, status, now) {
        let message = format!("{who} has timed out progressing.");
        set_condition(status, new_condition(PROGRESSING, "False", TIMED_OUT, message, now));
    }
}

/// More new pods, fewer old ones, or more of either ready or available.
fn has_progressed(before: Option<&DeploymentStatus>, after: &DeploymentStatus) -> bool {
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

fn has_timed_out(told: &Deployment, status: &DeploymentStatus, now: Timestamp) -> bool {
    let (Some(seconds), Some(current)) = (progress_deadline(told), condition(Some(status), PROGRESSING))
    else {
        return false;
    };
    match current.reason.as_deref() {
        // It was done; what comes next has not begun yet.
        Some(DONE) => false,
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
fn progress(told: &mut Deployment, status: &str, reason: &str, message: String, now: Timestamp) {
    if progress_deadline(told).is_some() {
        let condition = new_condition(PROGRESSING, status, reason, message, now);
        set_condition(told.status.get_or_insert_default(), condition);
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

impl Sets {
    /// Pods on their way out; `None` as long as some set does not tell.
    fn terminating(&self) -> Option<i32> {
        let statuses = self.0.iter().filter_map(|set| set.now.status.as_ref());
        let told = statuses.filter(|status| {
            status.observed_generation.unwrap_or(0) != 0 || status.terminating_replicas.is_some()
        });
        told.map(|status| status.terminating_replicas).sum()
    }

    /// Why pods of a set cannot be created or deleted; the new set's reason comes first.
    fn failure(&self) -> Option<DeploymentCondition> {
        let of_set = |set: &Set| {
            let conditions = set.now.status.as_ref()?.conditions.as_ref()?;
            conditions.iter().find(|condition| condition.type_ == FAILURE).cloned()
        };
        let failure = self.new_one().and_then(of_set).or_else(|| self.old().find_map(of_set))?;
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
