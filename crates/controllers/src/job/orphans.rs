//! Removes the tracking finalizer from pods whose Job is deleted or finished, because they are no longer
//! counted.

use std::sync::Arc;

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use reconcile::{Caches, Controller, Ctx, Error, Key, Object as _, ReconcileAction};

use super::pods::is_tracked;
use super::{is_managed_by_other, plan, untrack};

pub async fn run(ctx: Ctx) {
    let controller = Controller::new("job_orphan_pod", &ctx);
    let caches = ctx.caches.clone();
    controller.on(ctx.caches.pods(), move |changed, enqueue| {
        if let Some(pod) = changed.after.filter(|pod| is_orphan_pod(&caches, pod)) {
            enqueue(pod.key());
        }
    });
    let caches = ctx.caches.clone();
    controller.on(ctx.caches.jobs(), move |changed, enqueue| {
        if changed.after.is_none_or(|job| plan::is_finished(job)) {
            let pods = caches.pods().owned_by(changed.latest().uid());
            pods.iter().filter(|pod| is_tracked(pod)).for_each(|pod| enqueue(pod.key()));
        }
    });
    let shared = ctx.clone();
    controller
        .run(&ctx, 1, move |key| {
            let ctx = shared.clone();
            async move { reconcile(&ctx, &key).await }
        })
        .await;
}

async fn reconcile(ctx: &Ctx, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(pod) = ctx.caches.pods().get(key).filter(|pod| is_orphan_pod(&ctx.caches, pod)) else {
        return Ok(ReconcileAction::AwaitChange);
    };
    // The Job cache may lag behind the pod cache. A finalizer that is removed too early means a pod is never
    // counted, so a live read confirms that the Job is gone or finished.
    if let Some(owner) = pod.controller() {
        match ctx.client.get::<Job>(&Key::new(pod.namespace(), &owner.name)).await {
            Ok(job) if job.uid() == owner.uid && !plan::is_finished(&job) => {
                return Ok(ReconcileAction::AwaitChange);
            }
            Err(error) if !error.is_not_found() => return Err(error),
            _ => {}
        }
    }
    untrack(ctx, &pod).await?;
    Ok(ReconcileAction::AwaitChange)
}

fn is_orphan_pod(caches: &Caches, pod: &Arc<Pod>) -> bool {
    if !is_tracked(pod) {
        return false;
    }
    let Some(owner) = pod.controller() else { return true };
    if owner.kind != "Job" || owner.api_version != "batch/v1" {
        return false;
    }
    let job: Option<Arc<Job>> =
        caches.jobs().get_exactly(&Key::new(pod.namespace(), &owner.name), &owner.uid);
    job.is_none_or(|job| plan::is_finished(&job) && !is_managed_by_other(&job))
}
