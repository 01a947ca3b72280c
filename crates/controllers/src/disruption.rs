//! Keeps the books of PodDisruptionBudgets: how many pods there should be, are, and may be evicted.
//!
//! Evictions take from the status what it allows; this loop fills it up again. A second, small loop clears the
//! mark of an eviction that never came to pass from pods that live on.

mod plan;

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time};
use reconcile::{Cache, Changed, Controller, Ctx, Error, Key, Next, Object, Patch, keys};
use serde_json::json;

use crate::scale;
use plan::{Action, Scales};

pub async fn run(mut ctx: Ctx) {
    // Upstream's budgets tell their events under this name.
    ctx.events = ctx.events.from("controllermanager");
    tokio::join!(keep_books(ctx.clone()), clear_marks(ctx));
}

async fn keep_books(ctx: Ctx) {
    let controller = Controller::new("disruption", &ctx);
    controller.on(ctx.caches.disruption_budgets(), keys::own);
    controller.on(ctx.caches.pods(), budgets(&ctx));
    // Whose sizes are asked for.
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

/// The budgets a pod counts for, before and after the change.
fn budgets(ctx: &Ctx) -> impl Fn(&Changed<'_, Pod>, &mut dyn FnMut(Key)) + use<> {
    let (budgets, events) = (ctx.caches.disruption_budgets().clone(), ctx.events.clone());
    move |changed, enqueue| {
        let states = [changed.before, changed.after];
        let mut current = Vec::new();
        for budget in budgets.in_namespace(changed.newest().namespace()) {
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
            let pod = changed.newest();
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

async fn reconcile(ctx: &Ctx, key: &Key) -> Result<Next, Error> {
    let Some(budget) = ctx.caches.disruption_budgets().get(key) else { return Ok(Next::Forget) };
    let pods = ctx.caches.pods().matching(budget.namespace(), &selector(&budget));
    let scales = if plan::needs_scales(&budget) { scales(ctx, &pods).await } else { Ok(Scales::new()) };
    let mut next = Next::Change;
    for action in plan::plan(&budget, &pods, scales, ctx.clock.now()) {
        match action {
            Action::Normal(reason, message) => ctx.events.normal(budget.as_ref(), reason, message),
            Action::Warn(reason, message) => ctx.events.warning(budget.as_ref(), reason, message),
            Action::WarnPod(pod, message) => ctx.events.warning(pod.as_ref(), "NotDeleted", message),
            Action::WriteStatus(status) => {
                let told = PodDisruptionBudget { status: Some(*status), ..budget.as_ref().clone() };
                ctx.replace_status(&told).await?;
            }
            Action::LookAt(at) => next = Next::At(at),
        }
    }
    Ok(next)
}

/// The sizes of what controls the pods, by uid, or why they cannot be known.
async fn scales(ctx: &Ctx, pods: &[Arc<Pod>]) -> Result<Scales, String> {
    let (mut scales, mut asked) = (Scales::new(), BTreeMap::new());
    for pod in pods {
        let Some(owner) = pod.controller() else { continue };
        if asked.insert(&owner.uid, ()).is_some() {
            continue;
        }
        let (uid, size) = match known_scale(ctx, pod.namespace(), owner) {
            Some(found) => found,
            None => any_scale(ctx, pod, owner).await?,
        };
        scales.insert(uid, size);
    }
    Ok(scales)
}

/// The size of a kind that is at hand. Of a Deployment's ReplicaSets, the Deployment's counts.
fn known_scale(ctx: &Ctx, namespace: &str, owner: &OwnerReference) -> Option<(String, i32)> {
    let key = Key::new(namespace, &owner.name);
    let group = owner.api_version.split_once('/').map_or("", |(group, _)| group);
    let found = |uid: &str, replicas: Option<i32>| Some((uid.to_owned(), replicas.unwrap_or(1)));
    match (group, owner.kind.as_str()) {
        ("", "ReplicationController") => {
            let owner = exactly(ctx.caches.replication_controllers(), &key, &owner.uid)?;
            found(owner.uid(), owner.spec.as_ref()?.replicas)
        }
        ("apps", "StatefulSet") => {
            let owner = exactly(ctx.caches.stateful_sets(), &key, &owner.uid)?;
            found(owner.uid(), owner.spec.as_ref()?.replicas)
        }
        ("apps", "ReplicaSet") => {
            let set = exactly(ctx.caches.replica_sets(), &key, &owner.uid)?;
            match set.controller().filter(|owner| owner.kind == "Deployment") {
                Some(owner) => {
                    let key = Key::new(namespace, &owner.name);
                    let owner = exactly(ctx.caches.deployments(), &key, &owner.uid)?;
                    found(owner.uid(), owner.spec.as_ref()?.replicas)
                }
                None => found(set.uid(), set.spec.as_ref()?.replicas),
            }
        }
        _ => None,
    }
}

fn exactly<T: Object>(cache: &Cache<T>, key: &Key, uid: &str) -> Option<Arc<T>> {
    cache.get_exactly(key, uid)
}

/// The size of anything else that has one.
async fn any_scale(ctx: &Ctx, pod: &Pod, owner: &OwnerReference) -> Result<(String, i32), String> {
    let told = |error: Error| error.to_string();
    let nobody = || format!("found no controllers for pod {:?}", pod.name());
    let kind = scale::kind(&ctx.client, &owner.api_version, &owner.kind).await.map_err(told)?;
    let Some(kind) = kind else {
        let (kind, version) = (&owner.kind, &owner.api_version);
        return Err(format!("no matches for kind {kind:?} in version {version:?}"));
    };
    let key = Key::new(pod.namespace(), &owner.name);
    match scale::read(&ctx.client, &kind, &key).await {
        Ok(scale) if scale.metadata.uid.as_deref() == Some(&owner.uid) => {
            Ok((owner.uid.clone(), scale.spec.and_then(|spec| spec.replicas).unwrap_or(0)))
        }
        Ok(_) => Err(nobody()),
        Err(error) if error.is_not_found() => {
            // The object is gone, or its kind has no size.
            match ctx.client.request(http::Method::GET, &kind.object(&key), None).await {
                Ok(_) => {
                    let kind = scale::group_resource(&kind);
                    Err(format!("{kind} does not implement the scale subresource"))
                }
                Err(_) => Err(nobody()),
            }
        }
        Err(error) => Err(told(error)),
    }
}

async fn clear_marks(ctx: Ctx) {
    let controller = Controller::new("stale_pod_disruption", &ctx);
    let marked = |changed: &Changed<'_, Pod>, enqueue: &mut dyn FnMut(Key)| {
        if let Some(pod) = changed.after.filter(|pod| plan::mark_ends(pod).is_some()) {
            enqueue(pod.key());
        }
    };
    controller.on(ctx.caches.pods(), marked);
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let ctx = work.clone();
        async move { clear_mark(&ctx, &key).await }
    };
    controller.run(&ctx, 1, reconcile).await;
}

async fn clear_mark(ctx: &Ctx, key: &Key) -> Result<Next, Error> {
    let Some(pod) = ctx.caches.pods().get(key) else { return Ok(Next::Forget) };
    let now = ctx.clock.now();
    match plan::mark_ends(&pod) {
        None => return Ok(Next::Change),
        Some(at) if at > now => return Ok(Next::At(at)),
        Some(_) => {}
    }
    let cleared = json!({"type": plan::MARK, "status": "False", "lastTransitionTime": Time(now),
        "reason": null, "message": null});
    let patch = json!({"metadata": {"uid": pod.uid()}, "status": {"conditions": [cleared]}});
    match ctx.patch_status::<Pod>(key, &Patch::Strategic(patch)).await {
        Err(error) if !error.is_not_found() => Err(error),
        _ => Ok(Next::Change),
    }
}

fn selector(budget: &PodDisruptionBudget) -> api::selector::LabelSelector {
    reconcile::selector(budget.spec.as_ref().and_then(|spec| spec.selector.as_ref()))
}

#[cfg(test)]
mod tests;
