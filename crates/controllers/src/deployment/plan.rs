//! Computes the changes of a Deployment's ReplicaSets and its status. Does no I/O.
//!
//! Each sync takes one small step: it scales up as far as allowed, or else scales down as far as allowed,
//! and waits for the ReplicaSets to report before the next step. Therefore at most `maxSurge` extra pods
//! exist at any time, and scaling down relies only on pods that are available now.

mod rollback;
mod scale;
mod sets;
mod status;

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use reconcile::{EventType, Object as _};

pub use sets::is_new;
pub use status::{creation_failed, increment_collision_count};

use scale::{RolloutLimits, RolloutResult};
use sets::{ReplicaSetState, ReplicaSets};

/// One change to apply. The controller applies the changes in order.
#[derive(Debug, PartialEq)]
pub enum Action {
    CreateSet(Box<ReplicaSet>),
    /// `from` is the previous replica count.
    UpdateSet {
        set: Arc<ReplicaSet>,
        from: i32,
    },
    DeleteSet(Arc<ReplicaSet>),
    /// Update the status and the revision annotation.
    WriteStatus(Box<Deployment>),
    /// Update the whole object. Only a rollback changes the user's spec.
    WriteSpec(Box<Deployment>),
    Event(EventType, &'static str, String),
    /// Sync again at this time, when the progress deadline may be exceeded.
    RequeueAt(Timestamp),
}

/// Plans the next step of a Deployment. `owned` are its ReplicaSets. `runs_pods` returns whether a
/// ReplicaSet has pods that are not terminal.
pub fn plan(
    deployment: &Deployment,
    owned: &[Arc<ReplicaSet>],
    runs_pods: impl Fn(&ReplicaSet) -> bool,
    now: Timestamp,
) -> Vec<Action> {
    let (limits, mut sets) = (RolloutLimits::of(deployment), ReplicaSets::new(deployment, owned));
    let mut updated = deployment.clone();
    let mut history_surplus = Vec::new();

    if !deployment.is_deleting() {
        status::pause_or_resume(&mut updated, now);
    }
    sets.sync_annotations(&mut updated, now);

    let result = if deployment.is_deleting() {
        RolloutResult::NoRollout
    } else if limits.paused {
        sets.scale(&limits);
        history_surplus = sets.surplus(deployment);
        RolloutResult::NoRollout
    } else if let Some(revision) = rollback::rollback_revision(deployment) {
        return rollback::plan(deployment, &sets, revision);
    } else if sets.is_scaling_event(&limits) {
        sets.scale(&limits);
        RolloutResult::NoRollout
    } else {
        let result = match limits.rolling {
            true => sets.rolling_update(&mut updated, &limits, now),
            false => sets.recreate(&mut updated, &limits, runs_pods, now),
        };
        if result == RolloutResult::Unchanged && status::is_complete(deployment, deployment.status.as_ref()) {
            history_surplus = sets.surplus(deployment);
        }
        result
    };

    let next = match result {
        RolloutResult::NoRollout => {
            updated.status = Some(status::compute_status(&updated, &sets, &limits, now));
            None
        }
        RolloutResult::Scaled | RolloutResult::Unchanged => {
            updated.status = Some(status::compute_rollout_status(deployment, &updated, &sets, &limits, now));
            status::progress_deadline_at(&updated)
        }
    };
    let mut actions = sets.into_actions();
    actions.extend(history_surplus.into_iter().map(Action::DeleteSet));
    if updated != *deployment {
        actions.push(Action::WriteStatus(Box::new(updated)));
    }
    actions.extend(next.map(Action::RequeueAt));
    actions
}

impl ReplicaSetState {
    fn replicas(&self) -> i32 {
        self.desired.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1)
    }

    /// The replica count in the ReplicaSet's status.
    fn reported_replicas(&self) -> i32 {
        self.desired.status.as_ref().map_or(0, |status| status.replicas)
    }

    fn available(&self) -> i32 {
        self.desired.status.as_ref().and_then(|status| status.available_replicas).unwrap_or(0)
    }

    fn ready(&self) -> i32 {
        self.desired.status.as_ref().and_then(|status| status.ready_replicas).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests;
