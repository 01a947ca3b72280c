//! DaemonSet controller: runs a pod on every eligible node.
//!
//! A sync loops over [`plan`](mod@plan): each step is applied, then the state is read from the caches again. The
//! order is template history, pods, status; the status therefore reflects the state after the pod changes.
//!
//! Upstream: `pkg/controller/daemon`.

pub mod plan;
mod pods;
mod rollout;

use std::collections::HashMap;
use std::sync::Arc;

use futures_util::future::join_all;
use k8s_openapi::api::apps::v1::{DaemonSet, DaemonSetStatus};
use k8s_openapi::api::core::v1::{Node, Pod};
use parking_lot::Mutex;
use reconcile::{
    Caches, Controller, Ctx, Error, Key, Object as _, ObjectUpdate, Patch, ReconcileAction, keys,
};
use serde_json::json;

use crate::history::{self, History, POD_REVISION};
use crate::slow_start::slow_start;
use crate::{ownership, template};
use plan::{DaemonSetSnapshot, Plan, PodChanges, Retries, Step, plan};

const WORKERS: usize = 2;

/// Backoff after failed pods, by the UID of the set.
type AllRetries = Mutex<HashMap<String, Retries>>;

pub async fn run(ctx: Ctx) {
    // The service account name differs from the controller name.
    let ctx = Ctx { client: ctx.client.impersonate("daemon-set-controller"), ..ctx };
    let controller = Controller::new("daemonset", &ctx);
    let sets = ctx.caches.daemon_sets();
    controller.on(sets, keys::own);
    controller.on(ctx.caches.pods(), keys::owner_of_kind("DaemonSet"));
    // A new revision is either this controller's own or not yet relevant; only changes are.
    let owners = keys::owner_of_kind("DaemonSet");
    controller.on(ctx.caches.controller_revisions(), move |changed, enqueue| {
        if changed.before.is_some() {
            owners(changed, enqueue);
        }
    });
    let matching_sets = keys::in_namespace(sets, |pod: &Pod, set: &DaemonSet| {
        let selector = reconcile::selector(set.spec.as_ref().map(|spec| &spec.selector));
        selector.matches(|name| pod.label(name))
    });
    controller.on(ctx.caches.pods(), move |changed, enqueue| {
        if changed.after.is_some_and(|pod| pod.controller().is_none()) {
            matching_sets(changed, enqueue);
        }
    });
    let caches = ctx.caches.clone();
    controller.on(ctx.caches.nodes(), move |changed, enqueue| on_node(&caches, changed, enqueue));
    let retries = Arc::new(AllRetries::default());
    let shared = ctx.clone();
    controller
        .run(&ctx, WORKERS, move |key| {
            let (ctx, retries) = (shared.clone(), retries.clone());
            async move { reconcile(&ctx, &retries, &key).await }
        })
        .await;
}

/// Enqueues the sets whose decision about a node changed.
fn on_node(caches: &Caches, changed: &ObjectUpdate<'_, Node>, enqueue: &mut dyn FnMut(Key)) {
    let labels_and_taints = |node: &Arc<Node>| {
        let taints = node.spec.as_ref().and_then(|spec| spec.taints.clone());
        (node.metadata.labels.clone(), taints)
    };
    // Heartbeats change neither labels nor taints.
    if let (Some(before), Some(after)) = (changed.before, changed.after)
        && labels_and_taints(before) == labels_and_taints(after)
    {
        return;
    }
    for set in caches.daemon_sets().all() {
        let decision = |node: &Arc<Node>| pods::node_should_run_daemon_pod(&set, node);
        if changed.before.map(decision) != changed.after.map(decision) {
            enqueue(set.key());
        }
    }
}

async fn reconcile(ctx: &Ctx, all: &AllRetries, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(set) = ctx.caches.daemon_sets().get(key) else { return Ok(ReconcileAction::Forget) };
    let Some(spec) = &set.spec else { return Ok(ReconcileAction::AwaitChange) };
    let selector = reconcile::selector(Some(&spec.selector));
    let pods = ownership::claim(&*set, &selector, ownership::candidates(&*set, ctx.caches.pods()));
    ownership::adopt_and_release(ctx, &*set, &pods).await?;
    let revisions = ownership::candidates(&*set, ctx.caches.controller_revisions());
    ownership::adopt_and_release(ctx, &*set, &ownership::claim(&*set, &selector, revisions)).await?;
    let (mut may_change_pods, mut failure) = (true, None);
    loop {
        let Some(set) = ctx.caches.daemon_sets().get_exactly(key, set.uid()) else {
            all.lock().remove(set.uid());
            return Ok(ReconcileAction::AwaitChange);
        };
        let Some(spec) = &set.spec else { return Ok(ReconcileAction::AwaitChange) };
        let nodes = ctx.caches.nodes().all();
        let pods = ctx.caches.pods().owned_by(set.uid());
        let history = History::of(&spec.template, ctx.caches.controller_revisions().owned_by(set.uid()));
        let retries = all.lock().get(set.uid()).cloned().unwrap_or_default();
        let snapshot = DaemonSetSnapshot {
            set: &set,
            spec,
            nodes: &nodes,
            pods: &pods,
            history: &history,
            retries: &retries,
            now: ctx.clock.now(),
        };
        let Plan { step, requeue_at } = plan(&snapshot, may_change_pods);
        match step {
            Step::Done => {
                return match failure {
                    Some(error) => Err(error),
                    None => Ok(requeue_at.map_or(ReconcileAction::AwaitChange, ReconcileAction::RequeueAt)),
                };
            }
            Step::Pods(change)
                if !change.create.is_empty()
                    && !ownership::may_create_pods(ctx, &*set, &pods, reported_scheduled(&set)).await? =>
            {
                return Ok(ReconcileAction::AwaitChange);
            }
            Step::Pods(pods) => {
                may_change_pods = false;
                let hash = history.latest().and_then(|revision| revision.label(POD_REVISION));
                all.lock().entry(set.uid().to_owned()).or_default().extend(pods.retries.iter().cloned());
                failure = apply_pod_changes(ctx, &set, hash.unwrap_or_default(), pods).await.err();
            }
            Step::Status(status) => write_status(ctx, &set, status).await?,
            other => sync_revisions(ctx, &set, other).await?,
        }
    }
}

/// The number of pods in the set's status.
fn reported_scheduled(set: &DaemonSet) -> Option<i32> {
    set.status.as_ref().map(|status| status.current_number_scheduled)
}

async fn apply_pod_changes(ctx: &Ctx, set: &DaemonSet, hash: &str, pods: PodChanges) -> Result<(), Error> {
    for (severity, reason, message) in pods.events {
        ctx.events.record(reconcile::reference(set), severity, reason, message);
    }
    let create = &pods.create;
    let creation = slow_start(create.len(), |i| async move {
        template::create_pod(ctx, set, &pods::pod(set, &create[i], hash)).await.map(drop)
    });
    let (_, failure) = creation.await;
    for deleted in join_all(pods.delete.iter().map(|pod| template::delete_pod(ctx, set, pod))).await {
        deleted?;
    }
    match failure {
        Some(error) if !error.is_namespace_terminating() => Err(error),
        _ => Ok(()),
    }
}

async fn write_status(ctx: &Ctx, set: &DaemonSet, status: DaemonSetStatus) -> Result<(), Error> {
    ctx.replace_status(&DaemonSet { status: Some(status), ..set.clone() }).await.map(drop)
}

async fn sync_revisions(ctx: &Ctx, set: &DaemonSet, step: Step) -> Result<(), Error> {
    match step {
        Step::Revise(missing_revision) => {
            let template = set.spec.as_ref().map(|spec| spec.template.clone()).unwrap_or_default();
            let mut status = set.status.clone().unwrap_or_default();
            let collisions = &mut status.collision_count;
            let new_revision =
                |number| history::new_revision(set, &template, POD_REVISION, number, *collisions);
            if !history::sync_revision(ctx, missing_revision, new_revision).await? {
                *collisions = Some(collisions.unwrap_or(0).saturating_add(1));
                write_status(ctx, set, status).await?;
            }
        }
        Step::MergeRevisions { keep, drop, pods_to_label } => {
            for pod in pods_to_label {
                let labels = json!({POD_REVISION: keep.label(POD_REVISION)});
                ctx.patch::<Pod>(&pod.key(), &Patch::Merge(json!({"metadata": {"labels": labels}}))).await?;
            }
            history::remove(ctx, &drop).await?;
        }
        Step::TruncateHistory(old) => history::remove(ctx, &old).await?,
        Step::Done | Step::Pods(_) | Step::Status(_) => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests;
