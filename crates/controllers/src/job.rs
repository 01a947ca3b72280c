//! Jobs: pods that run to completion, counted exactly once.
//!
//! [`plan`] has the judgement. Here each step it asks for is carried out and then looked at afresh, so that
//! being stopped between any two of them leaves a state the next look understands.

mod backoff;
mod crew;
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
use reconcile::{Controller, Ctx, Error, Key, Next, Object as _, Patch, keys};
use serde_json::json;

use crate::batches::slow_start;
use crate::ownership::{candidates, claim, may_have_more, settle_with};
use crate::{pod, template};
use backoff::Backoff;
use plan::{Plan, Sight, Step, Tracking, plan};
use pods::{Birth, TRACKING, is_tracked};

const WORKERS: usize = 5;
/// Changes of pods are gathered for this long, since they come in swarms and each may cost a status.
const GATHER: Duration = Duration::from_millis(50);
/// Who looks after Jobs that do not say.
const OURSELVES: &str = "kubernetes.io/job-controller";

/// The failures of the pods of each Job, by uid. In memory only: what is lost with it is told by those pods
/// that are still there.
type Backoffs = Mutex<HashMap<String, Backoff>>;

pub async fn run(ctx: Ctx) {
    tokio::join!(run_jobs(ctx.clone()), orphans::run(ctx));
}

async fn run_jobs(ctx: Ctx) {
    let controller = Controller::new("job", &ctx);
    controller.on(ctx.caches.jobs(), keys::own);
    let (later, owner) = (controller.enqueue(), keys::owner_of_kind::<Pod>("Job"));
    let adopters = keys::in_namespace(ctx.caches.jobs(), |pod: &Pod, job: &Job| {
        let selector = job.spec.as_ref().and_then(|spec| spec.selector.as_ref());
        pod.controller().is_none() && reconcile::selector(selector).matches(|name| pod.label(name))
    });
    ctx.caches.pods().listen(move |changed| {
        owner(&changed, &mut |key| later.after(key, GATHER));
        if changed.after.is_some_and(|pod| pod.controller().is_none()) {
            adopters(&changed, &mut |key| later.after(key, GATHER));
        }
    });
    let backoffs = Arc::new(Backoffs::default());
    let shared = ctx.clone();
    controller
        .run(&ctx, WORKERS, move |key| {
            let (ctx, backoffs) = (shared.clone(), backoffs.clone());
            async move { reconcile(&ctx, &backoffs, &key).await }
        })
        .await;
}

/// Whether another controller looks after the Job.
fn is_managed_elsewhere(job: &Job) -> bool {
    let manager = job.spec.as_ref().and_then(|spec| spec.managed_by.as_deref());
    manager.is_some_and(|manager| manager != OURSELVES)
}

async fn reconcile(ctx: &Ctx, backoffs: &Backoffs, key: &Key) -> Result<Next, Error> {
    let Some(job) = ctx.caches.jobs().get(key) else { return Ok(Next::Forget) };
    if is_managed_elsewhere(&job) {
        return Ok(Next::Change);
    }
    if plan::is_finished(&job) {
        backoffs.lock().remove(job.uid());
        return Ok(Next::Change);
    }
    take_over(ctx, backoffs, &job).await?;
    let selector = reconcile::selector(job.spec.as_ref().and_then(|spec| spec.selector.as_ref()));
    let wanted = claim(&*job, &selector, candidates(&*job, ctx.caches.pods()));
    settle_with(ctx, &*job, &wanted, &[TRACKING]).await?;
    let (mut manage, mut failure) = (true, None);
    loop {
        // Its own writes have been seen, so what the caches have is the state after them.
        let Some(job) = ctx.caches.jobs().get_exactly(key, job.uid()) else { return Ok(Next::Change) };
        let pods: Vec<Arc<Pod>> = ctx.caches.pods().owned_by(job.uid());
        let known = backoffs.lock().get(job.uid()).copied();
        let backoff = known.unwrap_or_else(|| told_by(&pods));
        let Plan { step, backoff, recheck } =
            plan(&Sight { job: &job, pods: &pods, backoff, now: ctx.clock.now() }, manage);
        match step {
            Step::Rest => {
                backoffs.lock().entry(job.uid().to_owned()).or_insert(backoff);
                return match failure {
                    Some(error) => Err(error),
                    None => Ok(recheck.map_or(Next::Change, Next::At)),
                };
            }
            // Its pods do not go before they were seen to be on their way.
            Step::Pods { create, .. }
                if !create.is_empty() && !may_have_more(ctx, &*job, &pods, None).await? =>
            {
                return Ok(Next::Change);
            }
            Step::Pods { remove, create } => {
                manage = false;
                failure = change_pods(ctx, &job, &remove, &create).await.err();
            }
            Step::Track(tracking) => {
                track(ctx, &job, *tracking, || _ = backoffs.lock().insert(job.uid().to_owned(), backoff))
                    .await?
            }
        }
    }
}

/// Before the first look at a Job that another process has counted for: its pods must be as new as its
/// counters, or what was counted last would be counted again.
async fn take_over(ctx: &Ctx, backoffs: &Backoffs, job: &Job) -> Result<(), Error> {
    let begun = job.status.as_ref().is_some_and(|status| status.uncounted_terminated_pods.is_some());
    if begun && !backoffs.lock().contains_key(job.uid()) {
        ctx.caches.pods().seen(job.revision()).await?;
    }
    Ok(())
}

/// The failures that pods which have been counted tell of.
fn told_by(pods: &[Arc<Pod>]) -> Backoff {
    let counted = |wanted: &'static str| {
        let pods = pods.iter().filter(|pod| !is_tracked(pod)).map(AsRef::as_ref);
        pods.filter(move |pod| pod::phase(pod) == wanted)
    };
    Backoff::default().after(counted("Succeeded"), counted("Failed"))
}

async fn change_pods(ctx: &Ctx, job: &Job, remove: &[Arc<Pod>], create: &[Birth]) -> Result<(), Error> {
    let removals = remove.iter().map(|pod| async move {
        untrack(ctx, pod).await?;
        template::delete(ctx, job, pod).await
    });
    try_join_all(removals).await?;
    let births = slow_start(create.len(), |i| async move {
        let created = template::create(ctx, job, &pods::pod(job, &create[i])).await;
        created.map(drop)
    });
    match births.await {
        (_, Some(error)) if !error.is_namespace_terminating() => Err(error),
        _ => Ok(()),
    }
}

async fn track(ctx: &Ctx, job: &Job, tracking: Tracking, written: impl FnOnce()) -> Result<(), Error> {
    if let Some(status) = tracking.status {
        ctx.replace_status(&Job { status: Some(status), ..job.clone() }).await?;
        for (severity, reason, message) in tracking.events {
            ctx.events.record(reconcile::reference(job), severity, &reason, message);
        }
    }
    written();
    try_join_all(tracking.delete.iter().map(|pod| template::delete(ctx, job, pod))).await?;
    try_join_all(tracking.untrack.iter().map(|pod| untrack(ctx, pod))).await?;
    Ok(())
}

/// Lets a pod go. One that is gone already is no failure.
async fn untrack(ctx: &Ctx, pod: &Pod) -> Result<(), Error> {
    if !is_tracked(pod) {
        return Ok(());
    }
    let metadata = json!({"$deleteFromPrimitiveList/finalizers": [TRACKING], "uid": pod.uid()});
    let patch = Patch::Strategic(json!({"metadata": metadata}));
    match ctx.patch::<Pod>(&pod.key(), &patch).await {
        // Gone, or another pod has its name.
        Err(error) if error.is_not_found() || error.is_conflict() || error.is_invalid() => {
            let (key, uid, pods) = (pod.key(), pod.uid(), ctx.caches.pods());
            let let_go = || pods.get_exactly(&key, uid).is_none_or(|pod| !is_tracked(&pod));
            pods.until(&format!("the end of pod {key}"), let_go).await
        }
        other => other.map(drop),
    }
}

#[cfg(test)]
mod tests;
