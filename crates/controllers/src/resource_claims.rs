//! ResourceClaim controller: creates claims from templates for pods, reserves claims for scheduled pods,
//! and deallocates unused claims.
//!
//! Upstream: `pkg/controller/resourceclaim`.

mod plan;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};
use reconcile::{
    Controller, Ctx, DeleteOptions, Error, Key, Object, ObjectUpdate, Patch, ReconcileAction, keys,
};
use serde_json::json;

use plan::Step;
pub use plan::claim_names;

const WORKERS: usize = 10;
const FIELD_MANAGER: &str = "ResourceClaimController";
/// The maximum number of steps for a pod per sync. Claims are created, then recorded, then reserved.
const MAX_STEPS_PER_SYNC: usize = 4;

pub async fn run(ctx: Ctx) {
    let ctx = Ctx {
        client: ctx.client.impersonate("resource-claim-controller"),
        events: ctx.events.from("resource_claim"),
        ..ctx
    };
    let pods = Controller::new("resource_claim_pods", &ctx);
    let claims = Controller::new("resource_claim", &ctx);
    pods.on(ctx.caches.pods(), |changed: &ObjectUpdate<'_, Pod>, enqueue| {
        if plan::needs_claims(changed.latest()) {
            enqueue(changed.latest().key());
        }
    });
    claims.on(ctx.caches.pods(), |changed: &ObjectUpdate<'_, Pod>, enqueue| {
        let pod = changed.latest();
        if changed.after.is_none() || plan::is_done(pod) {
            plan::claim_names(pod).for_each(|name| enqueue(Key::new(pod.namespace(), name)));
        }
    });
    claims.on(ctx.caches.resource_claims(), keys::own::<ResourceClaim>);
    let known = ctx.caches.pods().clone();
    pods.on(ctx.caches.resource_claims(), move |changed: &ObjectUpdate<'_, ResourceClaim>, enqueue| {
        let claim = changed.latest();
        let uses = |pod: &&Arc<Pod>| {
            plan::needs_claims(pod) && plan::claim_names(pod).any(|name| name == claim.name())
        };
        known.in_namespace(claim.namespace()).iter().filter(uses).for_each(|pod| enqueue(pod.key()));
    });
    let known = ctx.caches.pods().clone();
    pods.on(
        ctx.caches.resource_claim_templates(),
        move |changed: &ObjectUpdate<'_, ResourceClaimTemplate>, enqueue| {
            let waiting = |pod: &&Arc<Pod>| plan::needs_claims(pod);
            known
                .in_namespace(changed.latest().namespace())
                .iter()
                .filter(waiting)
                .for_each(|pod| enqueue(pod.key()));
        },
    );
    let work = ctx.clone();
    let sync_pod_fn = move |key: Key| {
        let ctx = work.clone();
        async move { sync_pod(&ctx, &key).await }
    };
    let work = ctx.clone();
    let sync_claim_fn = move |key: Key| {
        let ctx = work.clone();
        async move { sync_claim(&ctx, &key).await }
    };
    tokio::join!(pods.run(&ctx, WORKERS, sync_pod_fn), claims.run(&ctx, WORKERS, sync_claim_fn));
}

async fn sync_pod(ctx: &Ctx, key: &Key) -> Result<ReconcileAction, Error> {
    for _ in 0..MAX_STEPS_PER_SYNC {
        let Some(pod) = ctx.caches.pods().get(key) else { return Ok(ReconcileAction::Forget) };
        let namespace_claims = plan::NamespaceClaims {
            claims: ctx.caches.resource_claims().in_namespace(&key.namespace),
            templates: ctx.caches.resource_claim_templates().in_namespace(&key.namespace),
        };
        match plan::plan_pod(&pod, &namespace_claims) {
            Step::Nothing => break,
            Step::Reject(message) => {
                ctx.events.warning(&*pod, "FailedResourceClaimCreation", message);
                break;
            }
            Step::Create { name, claim } => {
                if let Err(error) = ctx.create(&*claim).await {
                    let message = format!("PodResourceClaim {name}: create ResourceClaim : {error}");
                    ctx.events.warning(&*pod, "FailedResourceClaimCreation", message);
                    return Err(error);
                }
            }
            Step::RecordClaimNames(names) => record_claim_names(ctx, &pod, &names).await?,
            Step::Reserve(claim) => drop(ctx.replace_status(&*claim).await?),
        }
    }
    Ok(ReconcileAction::AwaitChange)
}

/// Records the names of the pod's claims in its status.
async fn record_claim_names(ctx: &Ctx, pod: &Pod, names: &BTreeMap<String, String>) -> Result<(), Error> {
    let statuses: Vec<_> =
        names.iter().map(|(name, claim)| json!({"name": name, "resourceClaimName": claim})).collect();
    let object = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": pod.name(), "namespace": pod.namespace(), "uid": pod.uid()},
        "status": {"resourceClaimStatuses": statuses},
    });
    let patch = Patch::Apply { manager: FIELD_MANAGER, object };
    ctx.patch_status::<Pod>(&pod.key(), &patch).await.map(drop)
}

async fn sync_claim(ctx: &Ctx, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(claim) = ctx.caches.resource_claims().get(key) else { return Ok(ReconcileAction::Forget) };
    let mut pods = BTreeMap::new();
    for (name, uid) in plan::reserved_pods(&claim) {
        let pod_key = Key::new(claim.namespace(), name);
        // A pod that is missing in the cache may be new. Taking the claim from a pod that is just being
        // scheduled must not happen, so a live read confirms that the pod is deleted.
        let pod = match ctx.caches.pods().get_exactly(&pod_key, uid) {
            Some(pod) => Some(pod),
            None => match ctx.client.get::<Pod>(&pod_key).await {
                Ok(pod) => Some(Arc::new(pod)).filter(|pod| pod.uid() == uid),
                Err(error) if error.is_not_found() => None,
                Err(error) => return Err(error),
            },
        };
        pods.extend(pod.map(|pod| (uid.to_owned(), pod)));
    }
    let owner = plan::owner(&claim)
        .and_then(|owner| ctx.caches.pods().get(&Key::new(claim.namespace(), &owner.name)));
    let plan = plan::plan_claim(&claim, &pods, owner.as_deref());
    let mut updated = (*claim).clone();
    if let Some(status) = plan.status {
        updated.status = Some(status);
        updated = ctx.replace_status(&updated).await?;
    }
    if plan.release {
        updated.metadata.finalizers.get_or_insert_default().retain(|name| name != plan::FINALIZER);
        updated = match ctx.replace(&updated).await {
            // The claim was being deleted and waited for this finalizer only.
            Err(error) if error.is_not_found() => return Ok(ReconcileAction::AwaitChange),
            other => other?,
        };
    }
    if plan.delete {
        ctx.delete_with::<ResourceClaim>(key, &DeleteOptions::uid(updated.uid())).await?;
    }
    Ok(ReconcileAction::AwaitChange)
}
