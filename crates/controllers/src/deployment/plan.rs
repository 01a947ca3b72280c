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
use reconcile::{Object as _, Severity};

pub use sets::is_new;
pub use status::{collided, creation_failed};

use scale::{Limits, Outcome};
use sets::{Set, Sets};

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
    Tell(Severity, &'static str, String),
    /// Progress may have taken too long by then.
    LookAt(Timestamp),
}

/// What to do next for a Deployment with these ReplicaSets, all of them its own. `runs_pods` tells whether
/// there are pods of a ReplicaSet that are not over.
pub fn plan(
    deployment: &Deployment,
    owned: &[Arc<ReplicaSet>],
    runs_pods: impl Fn(&ReplicaSet) -> bool,
    now: Timestamp,
) -> Vec<Action> {
    let (limits, mut sets) = (Limits::of(deployment), Sets::new(deployment, owned));
    let mut told = deployment.clone();
    let mut expected = Vec::new();

    if !deployment.is_deleting() {
        status::pause_or_resume(&mut told, now);
    }
    sets.follow(&mut told, now);

    let outcome = if deployment.is_deleting() {
        Outcome::Observe
    } else if limits.paused {
        sets.scale(&limits);
        expected = sets.surplus(deployment);
        Outcome::Observe
    } else if let Some(revision) = rollback::wanted(deployment) {
        return rollback::plan(deployment, &sets, revision);
    } else if sets.was_scaled(&limits) {
        sets.scale(&limits);
        Outcome::Observe
    } else {
        let outcome = match limits.rolling {
            true => sets.roll(&mut told, &limits, now),
            false => sets.recreate(&mut told, &limits, runs_pods, now),
        };
        if outcome == Outcome::Settled && status::is_complete(deployment, deployment.status.as_ref()) {
            expected = sets.surplus(deployment);
        }
        outcome
    };

    let next = match outcome {
        Outcome::Observe => {
            told.status = Some(status::observe(&told, &sets, &limits, now));
            None
        }
        Outcome::Scaled | Outcome::Settled => {
            told.status = Some(status::of_rollout(deployment, &told, &sets, &limits, now));
            status::deadline(&told)
        }
    };
    let mut actions = sets.into_actions();
    actions.extend(expected.into_iter().map(Action::DeleteSet));
    if told != *deployment {
        actions.push(Action::WriteStatus(Box::new(told)));
    }
    actions.extend(next.map(Action::LookAt));
    actions
}

impl Set {
    fn replicas(&self) -> i32 {
        self.now.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1)
    }

    /// As it reports itself.
    fn running(&self) -> i32 {
        self.now.status.as_ref().map_or(0, |status| status.replicas)
    }

    fn available(&self) -> i32 {
        self.now.status.as_ref().and_then(|status| status.available_replicas).unwrap_or(0)
    }

    fn ready(&self) -> i32 {
        self.now.status.as_ref().and_then(|status| status.ready_replicas).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests;
