//! Counts what is used of resource quotas.
//!
//! The API server adds to a quota's status what it grants; this loop finds what was given back, and whatever else is
//! not as the status says. It looks at once when something goes, and a little later when something comes, since what
//! has just been granted may not be stored yet ([`grants`]). Only kinds that some quota limits are followed, and of their objects
//! only what they use is kept ([`ledger`]).

mod grants;
mod ledger;
mod plan;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ResourceQuota;
use reconcile::{Changed, Controller, Ctx, Error, Key, Next, Object};

use grants::Grants;
use ledger::Ledger;

/// How long after a grant it must have come to something.
const GRANTED: Duration = Duration::from_secs(2);

pub async fn run(ctx: Ctx) {
    let ctx = Ctx { client: ctx.client.acting_as("resourcequota-controller"), ..ctx };
    let controller = Controller::new("resource_quota_controller_resource_changes", &ctx);
    let later = controller.enqueue();
    let grants = Arc::new(Grants::default());
    let granted = grants.clone();
    controller.on(ctx.caches.resource_quotas(), move |changed: &Changed<'_, ResourceQuota>, enqueue| {
        let (quota, key) = (changed.newest(), changed.newest().key());
        match changed.before {
            // Somebody was granted something, or this loop has just written.
            Some(before) if before.spec == quota.spec && plan::used(before) != plan::used(quota) => {
                if plan::is_less(&plan::used(before), &plan::used(quota)) {
                    granted.granted(key.clone());
                }
                later.after(key, GRANTED)
            }
            _ => enqueue(key),
        }
    });
    let open = Ledger::open(ctx.clone(), controller.enqueue());
    let (work, ledger) = (ctx.clone(), open.0.clone());
    let reconcile = move |key: Key| {
        let (ctx, ledger, grants) = (work.clone(), ledger.clone(), grants.clone());
        async move { reconcile(&ctx, &ledger, &grants, &key).await }
    };
    controller.run(&ctx, 2, reconcile).await
}

async fn reconcile(ctx: &Ctx, ledger: &Arc<Ledger>, grants: &Grants, key: &Key) -> Result<Next, Error> {
    let quotas = ctx.caches.resource_quotas();
    ledger.follow_only(plan::kinds(&quotas.all()));
    let Some(quota) = quotas.get(key) else {
        grants.forget(key);
        return Ok(Next::Change);
    };
    let now = ctx.clock.now();
    // Kinds that are not known yet ask for another look once they are.
    let Some((used, recheck)) = ledger.count(&quota, now) else { return Ok(Next::Change) };
    if let Some(counted) = plan::counted(&quota, &used) {
        if plan::is_less(&used, &plan::used(&quota))
            && let Some(pause) = grants.pause(key)
        {
            return Ok(Next::After(pause));
        }
        match ctx.replace_status(&counted).await {
            Err(error) if error.is_not_found() => {}
            other => drop(other?),
        }
    }
    Ok(recheck.map_or(Next::Change, Next::At))
}
