//! Decides how a Deployment's ReplicaSets change, step by step, and what its status says.
//!
//! A step is small: it scales up what may be, or else scales down what may be, and waits for the ReplicaSets
//! to report before the next one. So at every moment there are at most `maxSurge` pods too many, and the steps
//! that take pods away count only on what is available now.

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

/// One change to the world.
#[derive(Debug, PartialEq)]
pub enum Action {
    CreateSet(Box<ReplicaSet>),
    /// `from` is how many replicas it had.
    UpdateSet {
        set: Arc<ReplicaSet>,
        from: i32,
    },
    DeleteSet(Arc<ReplicaSet>),
    /// Writes the status and, with it, the revision in the annotations.
    WriteStatus(Box<Deployment>),
    /// Writes all of it: only a rollback changes what its user wrote.
    WriteSpec(Box<Deployment>),
    Event(EventType, &'static str, String),
    /// Progress may have taken too long by then.
    RequeueAt(Timestamp),
}

/// What to do next for a Deployment with these ReplicaSets, all of them its own. `runs_pods` tells whether
/// there are pods of a ReplicaSet that are not over.
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

    /// As it reports itself.
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
