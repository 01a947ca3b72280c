//! Device taint eviction controller: deletes pods that use devices with `NoExecute` taints which they do
//! not tolerate, or no longer tolerate.
//!
//! Only taints in ResourceSlices are supported. DeviceTaintRules are ignored, because their API is not
//! served by default.
//!
//! Upstream: `pkg/controller/devicetainteviction`.

mod plan;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use parking_lot::Mutex;
use reconcile::{Controller, Ctx, Error, Key, Object, ObjectUpdate, ReconcileAction};

use crate::disruption_condition::{disruption_target, patch_pod_status};
use crate::pod;
use crate::resource_claims::claim_names;

const WORKERS: usize = 8;
const REASON: &str = "DeviceTaintManagerEviction";

pub async fn run(ctx: Ctx) {
    let name = "device-taint-eviction-controller";
    let ctx =
        Ctx { events: ctx.events.from("device-taint-eviction"), client: ctx.client.impersonate(name), ..ctx };
    let controller = Controller::new("device_taint_eviction", &ctx);
    controller.on(ctx.caches.pods(), |changed: &ObjectUpdate<'_, Pod>, enqueue| {
        let pod = changed.latest();
        if !pod::node(pod).is_empty() && claim_names(pod).next().is_some() {
            enqueue(pod.key());
        }
    });
    controller.on(ctx.caches.resource_claims(), |changed: &ObjectUpdate<'_, ResourceClaim>, enqueue| {
        enqueue_reserved_pods(changed.latest(), enqueue);
    });
    let claims = ctx.caches.resource_claims().clone();
    controller.on(ctx.caches.resource_slices(), move |changed: &ObjectUpdate<'_, ResourceSlice>, enqueue| {
        let slice = changed.latest();
        let is_affected = |claim: &&Arc<ResourceClaim>| plan::uses_pool(claim, slice);
        claims.all().iter().filter(is_affected).for_each(|claim| enqueue_reserved_pods(claim, enqueue));
    });
    let work = Arc::new(Evictions { ctx: ctx.clone(), scheduled_evictions: Mutex::default() });
    let reconcile = move |key: Key| {
        let work = work.clone();
        async move { work.reconcile(&key).await }
    };
    controller.run(&ctx, WORKERS, reconcile).await
}

/// Enqueues the pods that a claim is reserved for.
fn enqueue_reserved_pods(claim: &ResourceClaim, enqueue: &mut dyn FnMut(Key)) {
    let users = claim.status.iter().flat_map(|status| status.reserved_for.iter().flatten());
    users
        .filter(|user| user.resource == "pods")
        .for_each(|user| enqueue(Key::new(claim.namespace(), &user.name)));
}

struct Evictions {
    ctx: Ctx,
    /// Pods with a scheduled eviction.
    scheduled_evictions: Mutex<HashSet<Key>>,
}

impl Evictions {
    async fn reconcile(&self, key: &Key) -> Result<ReconcileAction, Error> {
        let caches = &self.ctx.caches;
        let pod = caches.pods().get(key).filter(|pod| !pod.is_deleting() && !pod::is_terminal(pod));
        let Some(pod) = pod else {
            self.scheduled_evictions.lock().remove(key);
            return Ok(ReconcileAction::AwaitChange);
        };
        let claims = claim_names(&pod)
            .filter_map(|name| caches.resource_claims().get(&Key::new(pod.namespace(), name)));
        let claims: Vec<Arc<ResourceClaim>> = claims.collect();
        let slices = if claims.is_empty() { Vec::new() } else { caches.resource_slices().all() };
        let now = self.ctx.clock.now();
        match plan::eviction_time(&pod, &claims, &slices, now) {
            None => {
                if self.scheduled_evictions.lock().remove(key) {
                    self.ctx.events.normal(&*pod, REASON, "Cancelling deletion");
                }
                Ok(ReconcileAction::AwaitChange)
            }
            Some(at) if at > now => {
                self.scheduled_evictions.lock().insert(key.clone());
                Ok(ReconcileAction::RequeueAt(at))
            }
            Some(_) => {
                self.ctx.events.normal(&*pod, REASON, "Marking for deletion");
                let message = "Device Taint manager: deleting due to NoExecute taint";
                if let Some(condition) = disruption_target(&pod, "DeletionByDeviceTaintManager", message, now)
                {
                    let status = serde_json::json!({"conditions": [condition]});
                    match patch_pod_status(&self.ctx, &pod, status).await {
                        Err(error) if error.is_not_found() => return Ok(ReconcileAction::AwaitChange),
                        other => other?,
                    }
                }
                self.ctx.delete(&*pod).await?;
                self.scheduled_evictions.lock().remove(key);
                Ok(ReconcileAction::AwaitChange)
            }
        }
    }
}
