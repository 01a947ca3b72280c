//! Job controller: runs pods to completion and counts each finished pod exactly once.
//!
//! A sync loops over [`plan`](mod@plan): each step is applied, then the state is read from the caches again. A stop
//! between any two steps leaves a state that the next sync can continue from.
//!
//! Upstream: `pkg/controller/job`.

mod backoff;
mod desired_pods;
mod indexes;
mod orphans;
pub mod plan;
mod pods;
mod policy;
mod tracking;
mod verdict;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use parking_lot::Mutex;
use reconcile::{Controller, Ctx, Error, Key, Object as _, Patch, ReconcileAction, keys};
use serde_json::json;

use crate::ownership::{adopt_and_release_with_finalizers, candidates, claim, may_create_pods};
use crate::slow_start::slow_start;
use crate::{pod, template};
use backoff::Backoff;
use plan::{JobSnapshot, Plan, Step, Tracking, plan};
use pods::{NewPod, TRACKING_FINALIZER, is_tracked};

const WORKERS: usize = 5;
/// Pod changes are batched for this long, because they come in bursts and each may cost a status update.
const SYNC_JOB_BATCH_PERIOD: Duration = Duration::from_millis(50);
/// The `managedBy` value of this controller, the default for Jobs without one.
const JOB_CONTROLLER_NAME: &str = "kubernetes.io/job-controller";

/// Pod failures of each Job, by UID. Kept in memory only; after a restart they are estimated from the
/// existing pods.
type BackoffStore = Mutex<HashMap<String, Backoff>>;

pub async fn run(ctx: Ctx) {
    tokio::join!(run_jobs(ctx.clone()), orphans::run(ctx));
}

async fn run_jobs(ctx: Ctx) {
    let controller = Controller::new("job", &ctx);
    controller.on(ctx.caches.jobs(), keys::own);
    let (later, owner) = (controller.enqueue(), keys::owner_of_kind::<Pod>("Job"));
    let matching_jobs = keys::in_namespace(ctx.caches.jobs(), |pod: &Pod, job: &Job| {
        let selector = job.spec.as_ref().and_then(|spec| spec.selector.as_ref());
        pod.controller().is_none() && reconcile::selector(selector).matches(|name| pod.label(name))
    });
    ctx.caches.pods().listen(move |changed| {
        owner(&changed, &mut |key| later.after(key, SYNC_JOB_BATCH_PERIOD));
        if changed.after.is_some_and(|pod| pod.controller().is_none()) {
            matching_jobs(&changed, &mut |key| later.after(key, SYNC_JOB_BATCH_PERIOD));
        }
    });
    let backoff_store = Arc::new(BackoffStore::default());
    let shared = ctx.clone();
    controller
        .run(&ctx, WORKERS, move |key| {
            let (ctx, backoff_store) = (shared.clone(), backoff_store.clone());
            async move { reconcile(&ctx, &backoff_store, &key).await }
        })
        .await;
}

/// Whether another controller manages the Job.
fn is_managed_by_other(job: &Job) -> bool {
    let manager = job.spec.as_ref().and_then(|spec| spec.managed_by.as_deref());
    manager.is_some_and(|manager| manager != JOB_CONTROLLER_NAME)
}

async fn reconcile(ctx: &Ctx, backoff_store: &BackoffStore, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(job) = ctx.caches.jobs().get(key) else { return Ok(ReconcileAction::Forget) };
    if is_managed_by_other(&job) {
        return Ok(ReconcileAction::AwaitChange);
    }
    if plan::is_finished(&job) {
        backoff_store.lock().remove(job.uid());
        return Ok(ReconcileAction::AwaitChange);
    }
    wait_for_counted_pods(ctx, backoff_store, &job).await?;
    let selector = reconcile::selector(job.spec.as_ref().and_then(|spec| spec.selector.as_ref()));
    let claim_result = claim(&*job, &selector, candidates(&*job, ctx.caches.pods()));
    adopt_and_release_with_finalizers(ctx, &*job, &claim_result, &[TRACKING_FINALIZER]).await?;
    let (mut may_change_pods, mut failure) = (true, None);
    loop {
        // The caches contain this controller's own writes, so this is the state after them.
        let Some(job) = ctx.caches.jobs().get_exactly(key, job.uid()) else {
            return Ok(ReconcileAction::AwaitChange);
        };
        let pods: Vec<Arc<Pod>> = ctx.caches.pods().owned_by(job.uid());
        let known = backoff_store.lock().get(job.uid()).copied();
        let backoff = known.unwrap_or_else(|| backoff_from_counted_pods(&pods));
        let Plan { step, backoff, requeue_at } =
            plan(&JobSnapshot { job: &job, pods: &pods, backoff, now: ctx.clock.now() }, may_change_pods);
        match step {
            Step::Done => {
                backoff_store.lock().entry(job.uid().to_owned()).or_insert(backoff);
                return match failure {
                    Some(error) => Err(error),
                    None => Ok(requeue_at.map_or(ReconcileAction::AwaitChange, ReconcileAction::RequeueAt)),
                };
            }
            // No expected count is passed: the finalizer ensures that pods are seen as deleting before they
            // disappear.
            Step::Pods { create, .. }
                if !create.is_empty() && !may_create_pods(ctx, &*job, &pods, None).await? =>
            {
                return Ok(ReconcileAction::AwaitChange);
            }
            Step::Pods { remove, create } => {
                may_change_pods = false;
                failure = change_pods(ctx, &job, &remove, &create).await.err();
            }
            Step::Track(tracking) => {
                apply_tracking(ctx, &job, *tracking, || {
                    _ = backoff_store.lock().insert(job.uid().to_owned(), backoff)
                })
                .await?
            }
        }
    }
}

/// Before the first sync of a Job that another process has counted pods for: the pod cache must be at least
/// as new as the counters, otherwise the pods that were counted last would be counted again.
async fn wait_for_counted_pods(ctx: &Ctx, backoff_store: &BackoffStore, job: &Job) -> Result<(), Error> {
    let has_counted = job.status.as_ref().is_some_and(|status| status.uncounted_terminated_pods.is_some());
    if has_counted && !backoff_store.lock().contains_key(job.uid()) {
        ctx.caches.pods().wait_until_revision(job.revision()).await?;
    }
    Ok(())
}

/// The backoff state according to the existing pods that are counted already.
fn backoff_from_counted_pods(pods: &[Arc<Pod>]) -> Backoff {
    let counted = |expected_phase: &'static str| {
        let pods = pods.iter().filter(|pod| !is_tracked(pod)).map(AsRef::as_ref);
        pods.filter(move |pod| pod::phase(pod) == expected_phase)
    };
    Backoff::default().with_finished(counted("Succeeded"), counted("Failed"))
}

async fn change_pods(ctx: &Ctx, job: &Job, remove: &[Arc<Pod>], create: &[NewPod]) -> Result<(), Error> {
    let deletions = remove.iter().map(|pod| async move {
        untrack(ctx, pod).await?;
        template::delete_pod(ctx, job, pod).await
    });
    try_join_all(deletions).await?;
    let creation = slow_start(create.len(), |i| async move {
        let created = template::create_pod(ctx, job, &pods::pod(job, &create[i])).await;
        created.map(drop)
    });
    match creation.await {
        (_, Some(error)) if !error.is_namespace_terminating() => Err(error),
        _ => Ok(()),
    }
}

async fn apply_tracking(
    ctx: &Ctx,
    job: &Job,
    tracking: Tracking,
    written: impl FnOnce(),
) -> Result<(), Error> {
    if let Some(status) = tracking.status {
        ctx.replace_status(&Job { status: Some(status), ..job.clone() }).await?;
        for (severity, reason, message) in tracking.events {
            ctx.events.record(reconcile::reference(job), severity, &reason, message);
        }
    }
    // The status is written before the finalizers are removed: a pod without the finalizer may disappear,
    // and must be accounted for by then.
    written();
    try_join_all(tracking.delete.iter().map(|pod| template::delete_pod(ctx, job, pod))).await?;
    try_join_all(tracking.untrack.iter().map(|pod| untrack(ctx, pod))).await?;
    Ok(())
}

/// Removes the tracking finalizer of a pod. A pod that is deleted already is not an error.
async fn untrack(ctx: &Ctx, pod: &Pod) -> Result<(), Error> {
    if !is_tracked(pod) {
        return Ok(());
    }
    let metadata = json!({"$deleteFromPrimitiveList/finalizers": [TRACKING_FINALIZER], "uid": pod.uid()});
    let patch = Patch::Strategic(json!({"metadata": metadata}));
    match ctx.patch::<Pod>(&pod.key(), &patch).await {
        // The pod is deleted, or another pod has its name.
        Err(error) if error.is_not_found() || error.is_conflict() || error.is_invalid() => {
            let (key, uid, pods) = (pod.key(), pod.uid(), ctx.caches.pods());
            let is_untracked = || pods.get_exactly(&key, uid).is_none_or(|pod| !is_tracked(&pod));
            pods.wait_until(&format!("deletion of pod {key}"), is_untracked).await
        }
        other => other.map(drop),
    }
}

#[cfg(test)]
mod tests;
