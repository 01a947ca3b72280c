//! Volume expansion controller: emits an event for claims whose volume has to be expanded by an external
//! resizer.
//!
//! All volume types that can be expanded are CSI by now, so this controller expands none itself.
//!
//! Upstream: `pkg/controller/volume/expand`.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use reconcile::{Controller, Ctx, Error, Key, Object, ObjectUpdate, ReconcileAction};
use schema::quantity::Quantity;

const MESSAGE: &str = "waiting for an external controller to expand this PVC";

pub async fn run(ctx: Ctx) {
    let client = ctx.client.impersonate("expand-controller");
    let ctx = Ctx { client, events: ctx.events.from("volume_expand"), ..ctx };
    let controller = Controller::new("volume_expand", &ctx);
    controller.on(
        ctx.caches.persistent_volume_claims(),
        |changed: &ObjectUpdate<'_, PersistentVolumeClaim>, enqueue| {
            let expansion_request = |claim: &std::sync::Arc<PersistentVolumeClaim>| {
                needs_expansion(claim).then(|| requested_size(claim))
            };
            if changed.after.is_some_and(|claim| needs_expansion(claim))
                && changed.before.map(expansion_request) != changed.after.map(expansion_request)
            {
                enqueue(changed.latest().key());
            }
        },
    );
    // Starts the cache, which is read in `reconcile`.
    ctx.caches.persistent_volumes();
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let ctx = work.clone();
        async move { reconcile(&ctx, &key).await }
    };
    controller.run(&ctx, 1, reconcile).await
}

fn requested_size(claim: &PersistentVolumeClaim) -> Option<Quantity> {
    let requests = claim.spec.as_ref()?.resources.as_ref()?.requests.as_ref()?;
    Quantity::parse(&requests.get("storage")?.0).ok()
}

/// Whether the claim is bound and requests more than its capacity.
fn needs_expansion(claim: &PersistentVolumeClaim) -> bool {
    let has = || {
        let capacity = claim.status.as_ref()?.capacity.as_ref()?;
        Quantity::parse(&capacity.get("storage")?.0).ok()
    };
    let bound = claim.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Bound");
    bound && matches!((requested_size(claim), has()), (Some(requested), Some(has)) if requested > has)
}

async fn reconcile(ctx: &Ctx, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(claim) = ctx.caches.persistent_volume_claims().get(key).filter(|claim| needs_expansion(claim))
    else {
        return Ok(ReconcileAction::AwaitChange);
    };
    let name = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default();
    let volume = ctx.caches.persistent_volumes().get(&Key::new("", name));
    let is_bound_to_claim = |volume: &PersistentVolume| {
        let reference = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
        reference.is_some_and(|reference| reference.uid.as_deref() == Some(claim.uid()))
    };
    if volume.is_some_and(|volume| is_bound_to_claim(&volume)) {
        ctx.events.normal(&*claim, "ExternalExpanding", MESSAGE);
    }
    Ok(ReconcileAction::AwaitChange)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_bound_claims_with_greater_request_need_expansion() {
        let check = |requested: &str, has: &str, phase: &str, expected: bool| {
            let value = json!({
                "metadata": {"name": "c"}, "spec": {"resources": {"requests": {"storage": requested}}},
                "status": {"phase": phase, "capacity": {"storage": has}},
            });
            assert_eq!(
                needs_expansion(&serde_json::from_value(value).expect("a claim")),
                expected,
                "{requested} {has} {phase}"
            );
        };
        check("2Gi", "1Gi", "Bound", true);
        check("2Gi", "2048Mi", "Bound", false);
        check("1Gi", "2Gi", "Bound", false);
        check("2Gi", "1Gi", "Pending", false);
    }
}
