//! Claims to devices: made from templates for pods that ask for them, reserved for pods that are on nodes already, and
//! given up once nobody uses them.

mod plan;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};
use reconcile::{Changed, Controller, Ctx, Delete, Error, Key, Next, Object, Patch, keys};
use serde_json::json;

use plan::Step;
pub use plan::claim_names;

const WORKERS: usize = 10;
const FIELD_MANAGER: &str = "ResourceClaimController";
/// How often a pod is looked at in one go: claims are made, then noted, then reserved.
const MOST_STEPS: usize = 4;

pub async fn run(ctx: Ctx) {
    let ctx = Ctx {
        client: ctx.client.acting_as("resource-claim-controller"),
        events: ctx.events.from("resource_claim"),
        ..ctx
    };
    let pods = Controller::new("resource_claim_pods", &ctx);
    let claims = Controller::new("resource_claim", &ctx);
    pods.on(ctx.caches.pods(), |changed: &Changed<'_, Pod>, enqueue| {
        if plan::asks(changed.newest()) {
            enqueue(changed.newest().key());
        }
    });
    claims.on(ctx.caches.pods(), |changed: &Changed<'_, Pod>, enqueue| {
        let pod = changed.newest();
        if changed.after.is_none() || plan::is_done(pod) {
            plan::claim_names(pod).for_each(|name| enqueue(Key::new(pod.namespace(), name)));
        }
    });
    claims.on(ctx.caches.resource_claims(), keys::own::<ResourceClaim>);
    let known = ctx.caches.pods().clone();
    pods.on(ctx.caches.resource_claims(), move |changed: &Changed<'_, ResourceClaim>, enqueue| {
        let claim = changed.newest();
        let uses =
            |pod: &&Arc<Pod>| plan::asks(pod) && plan::claim_names(pod).any(|name| name == claim.name());
        known.in_namespace(claim.namespace()).iter().filter(uses).for_each(|pod| enqueue(pod.key()));
    });
    let known = ctx.caches.pods().clone();
    pods.on(
        ctx.caches.resource_claim_templates(),
        move |changed: &Changed<'_, ResourceClaimTemplate>, enqueue| {
            let waiting = |pod: &&Arc<Pod>| plan::asks(pod);
            known
                .in_namespace(changed.newest().namespace())
                .iter()
                .filter(waiting)
                .for_each(|pod| enqueue(pod.key()));
        },
    );
    let work = ctx.clone();
    let look_at_pod = move |key: Key| {
        let ctx = work.clone();
        async move { pod(&ctx, &key).await }
    };
    let work = ctx.clone();
    let look_at_claim = move |key: Key| {
        let ctx = work.clone();
        async move { claim(&ctx, &key).await }
    };
    tokio::join!(pods.run(&ctx, WORKERS, look_at_pod), claims.run(&ctx, WORKERS, look_at_claim));
}

async fn pod(ctx: &Ctx, key: &Key) -> Result<Next, Error> {
    for _ in 0..MOST_STEPS {
        let Some(pod) = ctx.caches.pods().get(key) else { return Ok(Next::Forget) };
        let around = plan::Around {
            claims: ctx.caches.resource_claims().in_namespace(&key.namespace),
            templates: ctx.caches.resource_claim_templates().in_namespace(&key.namespace),
        };
        match plan::pod(&pod, &around) {
            Step::Nothing => break,
            Step::Refuse(message) => {
                ctx.events.warning(&*pod, "FailedResourceClaimCreation", message);
                break;
            }
            Step::Make { name, claim } => {
                if let Err(error) = ctx.create(&*claim).await {
                    let message = format!("PodResourceClaim {name}: create ResourceClaim : {error}");
                    ctx.events.warning(&*pod, "FailedResourceClaimCreation", message);
                    return Err(error);
                }
            }
            Step::Note(names) => note(ctx, &pod, &names).await?,
            Step::Reserve(claim) => drop(ctx.replace_status(&*claim).await?),
        }
    }
    Ok(Next::Change)
}

/// Writes into the pod's status which claims are its own.
async fn note(ctx: &Ctx, pod: &Pod, names: &BTreeMap<String, String>) -> Result<(), Error> {
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

async fn claim(ctx: &Ctx, key: &Key) -> Result<Next, Error> {
    let Some(claim) = ctx.caches.resource_claims().get(key) else { return Ok(Next::Forget) };
    let mut pods = BTreeMap::new();
    for (name, uid) in plan::consumers(&claim) {
        let place = Key::new(claim.namespace(), name);
        // A pod that is not known may only not be known yet, and to take away a claim from one that is just being
        // scheduled would be bad.
        let pod = match ctx.caches.pods().get_exactly(&place, uid) {
            Some(pod) => Some(pod),
            None => match ctx.client.get::<Pod>(&place).await {
                Ok(pod) => Some(Arc::new(pod)).filter(|pod| pod.uid() == uid),
                Err(error) if error.is_not_found() => None,
                Err(error) => return Err(error),
            },
        };
        pods.extend(pod.map(|pod| (uid.to_owned(), pod)));
    }
    let owner = plan::owner(&claim)
        .and_then(|owner| ctx.caches.pods().get(&Key::new(claim.namespace(), &owner.name)));
    let plan = plan::claim(&claim, &pods, owner.as_deref());
    let mut now = (*claim).clone();
    if let Some(status) = plan.status {
        now.status = Some(status);
        now = ctx.replace_status(&now).await?;
    }
    if plan.release {
        now.metadata.finalizers.get_or_insert_default().retain(|name| name != plan::FINALIZER);
        now = match ctx.replace(&now).await {
            // It was only waiting for this.
            Err(error) if error.is_not_found() => return Ok(Next::Change),
            other => other?,
        };
    }
    if plan.delete {
        ctx.delete_with::<ResourceClaim>(key, &Delete::uid(now.uid())).await?;
    }
    Ok(Next::Change)
}
