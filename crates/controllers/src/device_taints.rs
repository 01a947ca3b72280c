//! Ends pods that use devices with taints they do not tolerate, or tolerate only for a while.
//!
//! Taints of devices stand in ResourceSlices. Those of rules are not looked at: that API is not served by default.

mod plan;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use parking_lot::Mutex;
use reconcile::{Changed, Controller, Ctx, Error, Key, Next, Object};

use crate::disruption_condition::{disruption_target, patch_pod_status};
use crate::pod;
use crate::resource_claims::claim_names;

const WORKERS: usize = 8;
const REASON: &str = "DeviceTaintManagerEviction";

pub async fn run(ctx: Ctx) {
    let name = "device-taint-eviction-controller";
    let ctx =
        Ctx { events: ctx.events.from("device-taint-eviction"), client: ctx.client.acting_as(name), ..ctx };
    let controller = Controller::new("device_taint_eviction", &ctx);
    controller.on(ctx.caches.pods(), |changed: &Changed<'_, Pod>, enqueue| {
        let pod = changed.newest();
        if !pod::node(pod).is_empty() && claim_names(pod).next().is_some() {
            enqueue(pod.key());
        }
    });
    controller.on(ctx.caches.resource_claims(), |changed: &Changed<'_, ResourceClaim>, enqueue| {
        users(changed.newest(), enqueue);
    });
    let claims = ctx.caches.resource_claims().clone();
    controller.on(ctx.caches.resource_slices(), move |changed: &Changed<'_, ResourceSlice>, enqueue| {
        let slice = changed.newest();
        let concerned = |claim: &&Arc<ResourceClaim>| plan::uses_pool(claim, slice);
        claims.all().iter().filter(concerned).for_each(|claim| users(claim, enqueue));
    });
    let work = Arc::new(Evictions { ctx: ctx.clone(), due: Mutex::default() });
    let reconcile = move |key: Key| {
        let work = work.clone();
        async move { work.reconcile(&key).await }
    };
    controller.run(&ctx, WORKERS, reconcile).await
}

/// The pods a claim is reserved for.
fn users(claim: &ResourceClaim, enqueue: &mut dyn FnMut(Key)) {
    let users = claim.status.iter().flat_map(|status| status.reserved_for.iter().flatten());
    users
        .filter(|user| user.resource == "pods")
        .for_each(|user| enqueue(Key::new(claim.namespace(), &user.name)));
}

struct Evictions {
    ctx: Ctx,
    /// The pods that have to go some time.
    due: Mutex<HashSet<Key>>,
}

impl Evictions {
    async fn reconcile(&self, key: &Key) -> Result<Next, Error> {
        let caches = &self.ctx.caches;
        let pod = caches.pods().get(key).filter(|pod| !pod.is_deleting() && !pod::is_terminal(pod));
        let Some(pod) = pod else {
            self.due.lock().remove(key);
            return Ok(Next::Change);
        };
        let claims = claim_names(&pod)
            .filter_map(|name| caches.resource_claims().get(&Key::new(pod.namespace(), name)));
        let claims: Vec<Arc<ResourceClaim>> = claims.collect();
        let slices = if claims.is_empty() { Vec::new() } else { caches.resource_slices().all() };
        let now = self.ctx.clock.now();
        match plan::leaves_at(&pod, &claims, &slices, now) {
            None => {
                if self.due.lock().remove(key) {
                    self.ctx.events.normal(&*pod, REASON, "Cancelling deletion");
                }
                Ok(Next::Change)
            }
            Some(at) if at > now => {
                self.due.lock().insert(key.clone());
                Ok(Next::At(at))
            }
            Some(_) => {
                self.ctx.events.normal(&*pod, REASON, "Marking for deletion");
                let message = "Device Taint manager: deleting due to NoExecute taint";
                if let Some(condition) = disruption_target(&pod, "DeletionByDeviceTaintManager", message, now)
                {
                    let status = serde_json::json!({"conditions": [condition]});
                    match patch_pod_status(&self.ctx, &pod, status).await {
                        Err(error) if error.is_not_found() => return Ok(Next::Change),
                        other => other?,
                    }
                }
                self.ctx.delete(&*pod).await?;
                self.due.lock().remove(key);
                Ok(Next::Change)
            }
        }
    }
}
