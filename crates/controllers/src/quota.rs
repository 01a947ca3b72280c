//! ResourceQuota controller: recomputes the usage in the status of resource quotas.
//!
//! Quota admission in the API server increases the usage in the status; this controller accounts for
//! deletions and corrects deviations. Deletions trigger a sync at once. Creations trigger one after a
//! delay, because admitted objects may not be stored yet ([`pending_usage`]). Only kinds that some quota
//! limits are watched, and only the usage of their objects is kept ([`usage_cache`]).
//!
//! Upstream: `pkg/controller/resourcequota`.

mod pending_usage;
mod plan;
#[cfg(test)]
mod tests;
mod usage_cache;

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ResourceQuota;
use reconcile::{Controller, Ctx, Error, Key, Object, ObjectUpdate, ReconcileAction};

use pending_usage::PendingUsage;
use usage_cache::UsageCache;

/// The delay of a sync after an increase, by which time the admitted object must be stored.
const RESYNC_AFTER_INCREASE: Duration = Duration::from_secs(2);

pub async fn run(ctx: Ctx) {
    let ctx = Ctx { client: ctx.client.impersonate("resourcequota-controller"), ..ctx };
    let controller = Controller::new("resource_quota_controller_resource_changes", &ctx);
    let later = controller.enqueue();
    let pending_usage = Arc::new(PendingUsage::default());
    let usage_recorder = pending_usage.clone();
    controller.on(ctx.caches.resource_quotas(), move |changed: &ObjectUpdate<'_, ResourceQuota>, enqueue| {
        let (quota, key) = (changed.latest(), changed.latest().key());
        match changed.before {
            // Admission increased the usage, or this controller has written the status.
            Some(before)
                if before.spec == quota.spec && plan::status_used(before) != plan::status_used(quota) =>
            {
                if plan::any_less(&plan::status_used(before), &plan::status_used(quota)) {
                    usage_recorder.record(key.clone());
                }
                later.after(key, RESYNC_AFTER_INCREASE)
            }
            _ => enqueue(key),
        }
    });
    let guard = UsageCache::start(ctx.clone(), controller.enqueue());
    let (work, usage_cache) = (ctx.clone(), guard.0.clone());
    let reconcile = move |key: Key| {
        let (ctx, usage_cache, pending_usage) = (work.clone(), usage_cache.clone(), pending_usage.clone());
        async move { reconcile(&ctx, &usage_cache, &pending_usage, &key).await }
    };
    controller.run(&ctx, 2, reconcile).await
}

async fn reconcile(
    ctx: &Ctx,
    usage_cache: &Arc<UsageCache>,
    pending_usage: &PendingUsage,
    key: &Key,
) -> Result<ReconcileAction, Error> {
    let quotas = ctx.caches.resource_quotas();
    usage_cache.watch_only(plan::limited_resources(&quotas.all()));
    let Some(quota) = quotas.get(key) else {
        pending_usage.forget(key);
        return Ok(ReconcileAction::AwaitChange);
    };
    let now = ctx.clock.now();
    // A kind that is not synced yet wakes all quotas once it is.
    let Some((used, requeue_at)) = usage_cache.count(&quota, now) else {
        return Ok(ReconcileAction::AwaitChange);
    };
    if let Some(counted) = plan::updated_status(&quota, &used) {
        if plan::any_less(&used, &plan::status_used(&quota))
            && let Some(pause) = pending_usage.update_delay(key)
        {
            return Ok(ReconcileAction::RequeueAfter(pause));
        }
        match ctx.replace_status(&counted).await {
            Err(error) if error.is_not_found() => {}
            other => drop(other?),
        }
    }
    Ok(requeue_at.map_or(ReconcileAction::AwaitChange, ReconcileAction::RequeueAt))
}
