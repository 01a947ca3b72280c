//! Disruption controller: maintains the status of PodDisruptionBudgets (expected and healthy pods, allowed
//! disruptions).
//!
//! The eviction API decrements `disruptionsAllowed`; this controller recomputes it. A second controller
//! clears stale `DisruptionTarget` conditions from pods that were not deleted.
//!
//! Upstream: `pkg/controller/disruption`.

mod plan;

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time};
use reconcile::{Cache, Controller, Ctx, Error, Key, Object, ObjectUpdate, Patch, ReconcileAction, keys};
use serde_json::json;

use crate::scale;
use plan::{Action, ControllerScale};

pub async fn run(mut ctx: Ctx) {
    // Upstream's event source for this controller.
    ctx.events = ctx.events.from("controllermanager");
    tokio::join!(sync_budgets(ctx.clone()), clear_stale_disruptions(ctx));
}

async fn sync_budgets(ctx: Ctx) {
    let controller = Controller::new("disruption", &ctx);
    controller.on(ctx.caches.disruption_budgets(), keys::own);
    controller.on(ctx.caches.pods(), enqueue_budgets(&ctx));
    // Subscribes to the caches of the controllers whose scale is needed.
    let caches = &ctx.caches;
    let _ = (
        caches.replica_sets(),
        caches.deployments(),
        caches.stateful_sets(),
        caches.replication_controllers(),
    );
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let ctx = work.clone();
        async move { reconcile(&ctx, &key).await }
    };
    controller.run(&ctx, 1, reconcile).await;
}

/// Enqueues the budgets that match a pod before or after a change.
fn enqueue_budgets(ctx: &Ctx) -> impl Fn(&ObjectUpdate<'_, Pod>, &mut dyn FnMut(Key)) + use<> {
    let (budgets, events) = (ctx.caches.disruption_budgets().clone(), ctx.events.clone());
    move |changed, enqueue| {
        let states = [changed.before, changed.after];
        let mut current = Vec::new();
        for budget in budgets.in_namespace(changed.latest().namespace()) {
            let selector = selector(&budget);
            let matches = states.map(|pod| pod.is_some_and(|pod| selector.matches(|name| pod.label(name))));
            if matches.contains(&true) {
                enqueue(budget.key());
            }
            if matches[1] {
                current.push(budget);
            }
        }
        let labels = states.map(|pod| pod.map(|pod| &pod.metadata.labels));
        if let [first, _, ..] = &current[..]
            && labels[0] != labels[1]
        {
            let pod = changed.latest();
            let message = format!(
                "Pod {:?}/{:?} matches multiple PodDisruptionBudgets.  Chose {:?} arbitrarily.",
                pod.namespace(),
                pod.name(),
                first.name()
            );
            events.warning(pod.as_ref(), "MultiplePodDisruptionBudgets", message);
        }
    }
}

async fn reconcile(ctx: &Ctx, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(budget) = ctx.caches.disruption_budgets().get(key) else { return Ok(ReconcileAction::Forget) };
    let pods = ctx.caches.pods().matching(budget.namespace(), &selector(&budget));
    let controller_scale = if plan::needs_controller_scale(&budget) {
        controller_scale(ctx, &pods).await
    } else {
        Ok(ControllerScale::new())
    };
    let mut next = ReconcileAction::AwaitChange;
    for action in plan::plan(&budget, &pods, controller_scale, ctx.clock.now()) {
        match action {
            Action::Normal(reason, message) => ctx.events.normal(budget.as_ref(), reason, message),
            Action::Warn(reason, message) => ctx.events.warning(budget.as_ref(), reason, message),
            Action::WarnPod(pod, message) => ctx.events.warning(pod.as_ref(), "NotDeleted", message),
            Action::WriteStatus(status) => {
                let updated = PodDisruptionBudget { status: Some(*status), ..budget.as_ref().clone() };
                ctx.replace_status(&updated).await?;
            }
            Action::RequeueAt(at) => next = ReconcileAction::RequeueAt(at),
        }
    }
    Ok(next)
}

/// The replica counts of the pods' controllers, by UID, or why they are unknown.
async fn controller_scale(ctx: &Ctx, pods: &[Arc<Pod>]) -> Result<ControllerScale, String> {
    let (mut controller_scale, mut seen) = (ControllerScale::new(), BTreeMap::new());
    for pod in pods {
        let Some(owner) = pod.controller() else { continue };
        if seen.insert(&owner.uid, ()).is_some() {
            continue;
        }
        let (uid, size) = match cached_scale(ctx, pod.namespace(), owner) {
            Some(found) => found,
            None => fetch_scale(ctx, pod, owner).await?,
        };
        controller_scale.insert(uid, size);
    }
    Ok(controller_scale)
}

/// The scale of a built-in controller from the cache. For the ReplicaSet of a Deployment it is the
/// Deployment's.
fn cached_scale(ctx: &Ctx, namespace: &str, owner: &OwnerReference) -> Option<(String, i32)> {
    let key = Key::new(namespace, &owner.name);
    let group = owner.api_version.split_once('/').map_or("", |(group, _)| group);
    let found = |uid: &str, replicas: Option<i32>| Some((uid.to_owned(), replicas.unwrap_or(1)));
    match (group, owner.kind.as_str()) {
        ("", "ReplicationController") => {
            let owner = get_owner(ctx.caches.replication_controllers(), &key, &owner.uid)?;
            found(owner.uid(), owner.spec.as_ref()?.replicas)
        }
        ("apps", "StatefulSet") => {
            let owner = get_owner(ctx.caches.stateful_sets(), &key, &owner.uid)?;
            found(owner.uid(), owner.spec.as_ref()?.replicas)
        }
        ("apps", "ReplicaSet") => {
            let set = get_owner(ctx.caches.replica_sets(), &key, &owner.uid)?;
            match set.controller().filter(|owner| owner.kind == "Deployment") {
                Some(owner) => {
                    let key = Key::new(namespace, &owner.name);
                    let owner = get_owner(ctx.caches.deployments(), &key, &owner.uid)?;
                    found(owner.uid(), owner.spec.as_ref()?.replicas)
                }
                None => found(set.uid(), set.spec.as_ref()?.replicas),
            }
        }
        _ => None,
    }
}

fn get_owner<T: Object>(cache: &Cache<T>, key: &Key, uid: &str) -> Option<Arc<T>> {
    cache.get_exactly(key, uid)
}

/// The scale of any other controller, through its scale subresource.
async fn fetch_scale(ctx: &Ctx, pod: &Pod, owner: &OwnerReference) -> Result<(String, i32), String> {
    let describe = |error: Error| error.to_string();
    let no_controller = || format!("found no controllers for pod {:?}", pod.name());
    let kind = scale::find_kind(&ctx.client, &owner.api_version, &owner.kind).await.map_err(describe)?;
    let Some(kind) = kind else {
        let (kind, version) = (&owner.kind, &owner.api_version);
        return Err(format!("no matches for kind {kind:?} in version {version:?}"));
    };
    let key = Key::new(pod.namespace(), &owner.name);
    match scale::get_scale(&ctx.client, &kind, &key).await {
        Ok(scale) if scale.metadata.uid.as_deref() == Some(&owner.uid) => {
            Ok((owner.uid.clone(), scale.spec.and_then(|spec| spec.replicas).unwrap_or(0)))
        }
        Ok(_) => Err(no_controller()),
        Err(error) if error.is_not_found() => {
            // Either the object does not exist, or its kind has no scale subresource.
            match ctx.client.request(http::Method::GET, &kind.object(&key), None).await {
                Ok(_) => {
                    let kind = scale::group_resource(&kind);
                    Err(format!("{kind} does not implement the scale subresource"))
                }
                Err(_) => Err(no_controller()),
            }
        }
        Err(error) => Err(describe(error)),
    }
}

async fn clear_stale_disruptions(ctx: Ctx) {
    let controller = Controller::new("stale_pod_disruption", &ctx);
    let on_pod = |changed: &ObjectUpdate<'_, Pod>, enqueue: &mut dyn FnMut(Key)| {
        if let Some(pod) = changed.after.filter(|pod| plan::stale_at(pod).is_some()) {
            enqueue(pod.key());
        }
    };
    controller.on(ctx.caches.pods(), on_pod);
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let ctx = work.clone();
        async move { clear_stale_disruption(&ctx, &key).await }
    };
    controller.run(&ctx, 1, reconcile).await;
}

async fn clear_stale_disruption(ctx: &Ctx, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(pod) = ctx.caches.pods().get(key) else { return Ok(ReconcileAction::Forget) };
    let now = ctx.clock.now();
    match plan::stale_at(&pod) {
        None => return Ok(ReconcileAction::AwaitChange),
        Some(at) if at > now => return Ok(ReconcileAction::RequeueAt(at)),
        Some(_) => {}
    }
    let cleared = json!({"type": plan::DISRUPTION_TARGET, "status": "False", "lastTransitionTime": Time(now),
        "reason": null, "message": null});
    let patch = json!({"metadata": {"uid": pod.uid()}, "status": {"conditions": [cleared]}});
    match ctx.patch_status::<Pod>(key, &Patch::Strategic(patch)).await {
        Err(error) if !error.is_not_found() => Err(error),
        _ => Ok(ReconcileAction::AwaitChange),
    }
}

fn selector(budget: &PodDisruptionBudget) -> api::selector::LabelSelector {
    reconcile::selector(budget.spec.as_ref().and_then(|spec| spec.selector.as_ref()))
}

#[cfg(test)]
mod tests;
