//! Counts what is used of resource quotas.
//!
//! The API server adds to a quota's status what it grants; this loop finds what was given back, and whatever else is
//! not as the status says. It looks at once when something goes, and a little later when something comes, since what
//! has just been granted may not be stored yet ([`grants`]). Only kinds that some quota limits are followed, and of their objects
//! only what they use is kept ([`ledger`]).

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

/// How long after a grant it must have come to something.
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
            // Somebody was granted something, or this loop has just written.
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
    // Kinds that are not known yet ask for another look once they are.
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
