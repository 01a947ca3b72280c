//! TTL-after-finished controller: deletes finished Jobs after `ttlSecondsAfterFinished`.
//!
//! Upstream: `pkg/controller/ttlafterfinished`.

pub mod plan;

use k8s_openapi::api::batch::v1::Job;
use reconcile::{Controller, Ctx, DeleteOptions, Error, Key, Object as _, ReconcileAction, keys};

use plan::expires_at;

const WORKERS: usize = 5;

pub async fn run(ctx: Ctx) {
    let controller = Controller::new("ttl_jobs_to_delete", &ctx);
    controller.on(ctx.caches.jobs(), |changed, enqueue| {
        if changed.after.is_some_and(|job| expires_at(job).is_some()) {
            keys::own(changed, enqueue);
        }
    });
    let shared = ctx.clone();
    controller
        .run(&ctx, WORKERS, move |key| {
            let ctx = shared.clone();
            async move { reconcile(&ctx, &key).await }
        })
        .await;
}

async fn reconcile(ctx: &Ctx, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(job) = ctx.caches.jobs().get(key) else { return Ok(ReconcileAction::Forget) };
    let Some(at) = expires_at(&job) else { return Ok(ReconcileAction::AwaitChange) };
    if at > ctx.clock.now() {
        return Ok(ReconcileAction::RequeueAt(at));
    }
    // The deletion requires the resource version that was read, because the TTL may have been changed
    // meanwhile.
    let options = DeleteOptions {
        propagation: Some("Foreground"),
        resource_version: job.metadata.resource_version.clone(),
        ..DeleteOptions::uid(job.uid())
    };
    ctx.delete_with::<Job>(key, &options).await?;
    Ok(ReconcileAction::AwaitChange)
}

#[cfg(test)]
mod tests;
