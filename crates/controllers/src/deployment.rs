//! Deployment controller: rolls out pod templates over ReplicaSets.
//!
//! Upstream: `pkg/controller/deployment`.

mod plan;

use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::api::core::v1::Pod;
use reconcile::{Controller, Ctx, Error, EventType, Key, Object as _, ObjectUpdate, ReconcileAction, keys};

use crate::{ownership, pod};
use plan::Action;

/// Upstream's default of `--concurrent-deployment-syncs`.
const WORKERS: usize = 5;

pub async fn run(ctx: Ctx) {
    let controller = Controller::new("deployment", &ctx);
    controller.on(ctx.caches.deployments(), keys::own);
    controller.on(ctx.caches.replica_sets(), keys::owner_of_kind("Deployment"));
    controller.on(ctx.caches.replica_sets(), on_orphaned_replica_set(&ctx));
    controller.on(ctx.caches.pods(), on_pod_finished(&ctx));
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let ctx = work.clone();
        async move { reconcile(&ctx, &key).await }
    };
    controller.run(&ctx, WORKERS, reconcile).await;
}

/// Enqueues the Deployments that may adopt an orphaned ReplicaSet.
fn on_orphaned_replica_set(ctx: &Ctx) -> impl Fn(&ObjectUpdate<'_, ReplicaSet>, &mut dyn FnMut(Key)) + use<> {
    let deployments = ctx.caches.deployments().clone();
    move |changed, enqueue| {
        let Some(set) = changed.after.filter(|set| set.controller().is_none()) else { return };
        let labels_or_owner_changed = changed.before.is_none_or(|before| {
            before.metadata.labels != set.metadata.labels || before.controller().is_some()
        });
        if !labels_or_owner_changed || set.metadata.labels.is_none() {
            return;
        }
        for deployment in deployments.in_namespace(set.namespace()) {
            if selector(&deployment).matches(|name| set.label(name)) {
                enqueue(deployment.key());
            }
        }
    }
}

/// Enqueues the owner of a finished or deleted pod if its strategy is `Recreate`, because the new
/// ReplicaSet is created once the last old pod is gone.
fn on_pod_finished(ctx: &Ctx) -> impl Fn(&ObjectUpdate<'_, Pod>, &mut dyn FnMut(Key)) + use<> {
    let (deployments, sets) = (ctx.caches.deployments().clone(), ctx.caches.replica_sets().clone());
    move |changed, enqueue| {
        let pod = changed.latest();
        if changed.after.is_some_and(|pod| !pod::is_terminal(pod)) {
            return;
        }
        let Some(owner) = pod.controller().filter(|owner| owner.kind == "ReplicaSet") else { return };
        let set = sets.get_exactly(&Key::new(pod.namespace(), &owner.name), &owner.uid);
        let Some(owner) = set.as_ref().and_then(|set| set.controller()) else { return };
        let key = Key::new(pod.namespace(), &owner.name);
        let is_recreate = |deployment: &Deployment| {
            let strategy = deployment.spec.as_ref().and_then(|spec| spec.strategy.as_ref());
            strategy.and_then(|strategy| strategy.type_.as_deref()) == Some("Recreate")
        };
        if deployments.get_exactly(&key, &owner.uid).is_some_and(|deployment| is_recreate(&deployment)) {
            enqueue(key);
        }
    }
}

async fn reconcile(ctx: &Ctx, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(deployment) = ctx.caches.deployments().get(key) else { return Ok(ReconcileAction::Forget) };
    let selector = selector(&deployment);
    let candidates = || {
        let sets = ownership::candidates(deployment.as_ref(), ctx.caches.replica_sets());
        ownership::claim(deployment.as_ref(), &selector, sets)
    };
    ownership::adopt_and_release(ctx, deployment.as_ref(), &candidates()).await?;
    let runs_pods =
        |set: &ReplicaSet| ctx.caches.pods().owned_by(set.uid()).iter().any(|pod| !pod::is_terminal(pod));
    let actions = plan::plan(&deployment, &candidates().owned, runs_pods, ctx.clock.now());
    match apply(ctx, &deployment, actions).await {
        // Nothing can be created in a terminating namespace, so a retry is useless.
        Err(error) if error.is_namespace_terminating() => Ok(ReconcileAction::AwaitChange),
        result => result,
    }
}

async fn apply(ctx: &Ctx, deployment: &Deployment, actions: Vec<Action>) -> Result<ReconcileAction, Error> {
    let mut next = ReconcileAction::AwaitChange;
    for action in actions {
        match action {
            Action::CreateSet(set) => {
                if !create(ctx, deployment, &set).await? {
                    return Ok(ReconcileAction::AwaitChange);
                }
            }
            Action::UpdateSet { set, from } => {
                ctx.replace(set.as_ref()).await?;
                record_scale_event(ctx, deployment, &set, from);
            }
            Action::DeleteSet(set) => ctx.delete(set.as_ref()).await?,
            Action::WriteStatus(updated) => _ = ctx.replace_status(updated.as_ref()).await?,
            Action::WriteSpec(written) => _ = ctx.replace(written.as_ref()).await?,
            Action::Event(EventType::Normal, reason, message) => {
                ctx.events.normal(deployment, reason, message)
            }
            Action::Event(EventType::Warning, reason, message) => {
                ctx.events.warning(deployment, reason, message)
            }
            Action::RequeueAt(at) => next = ReconcileAction::RequeueAt(at),
        }
    }
    Ok(next)
}

/// Creates a ReplicaSet and returns whether it exists now. On a name collision with a foreign ReplicaSet the
/// collision count is incremented, which changes the name for the next sync.
async fn create(ctx: &Ctx, deployment: &Deployment, set: &ReplicaSet) -> Result<bool, Error> {
    match ctx.create(set).await {
        Ok(_) => {
            record_scale_event(ctx, deployment, set, 0);
            Ok(true)
        }
        Err(error) if error.is_already_exists() => {
            let other: ReplicaSet = ctx.client.get(&set.key()).await?;
            let is_owned = other.controller().is_some_and(|owner| owner.uid == deployment.uid());
            if is_owned && plan::is_new(deployment, &other) {
                // The cache lags behind. The retry finds the ReplicaSet once the cache has caught up.
                ctx.caches.replica_sets().wait_until_revision(other.revision()).await?;
                return Err(error);
            }
            ctx.replace_status(&plan::increment_collision_count(deployment)).await?;
            Ok(false)
        }
        Err(error) if error.is_namespace_terminating() => Err(error),
        Err(error) => {
            let message = format!("Failed to create new replica set {:?}: {error}", set.name());
            let updated = plan::creation_failed(deployment, message.clone(), ctx.clock.now());
            if updated != *deployment {
                ctx.replace_status(&updated).await?;
            }
            ctx.events.warning(deployment, "ReplicaSetCreateError", message);
            Err(error)
        }
    }
}

fn record_scale_event(ctx: &Ctx, deployment: &Deployment, set: &ReplicaSet, from: i32) {
    let to = set.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1);
    let direction = match to.cmp(&from) {
        std::cmp::Ordering::Greater => "up",
        std::cmp::Ordering::Less => "down",
        std::cmp::Ordering::Equal => return,
    };
    let message = format!("Scaled {direction} replica set {} from {from} to {to}", set.name());
    ctx.events.normal(deployment, "ScalingReplicaSet", message);
}

fn selector(deployment: &Deployment) -> api::selector::LabelSelector {
    reconcile::selector(deployment.spec.as_ref().map(|spec| &spec.selector))
}

#[cfg(test)]
mod tests;
