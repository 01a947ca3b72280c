//! Says in the status of a ValidatingAdmissionPolicy what is odd about its expressions.

use k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicy;
use reconcile::{Controller, Ctx, Error, Key, Next, Patch, keys};
use serde_json::{Value, json};

const NAME: &str = "validatingadmissionpolicy-status";
const WORKERS: usize = 5;

pub async fn run(ctx: Ctx) {
    let controller = Controller::new(NAME, &ctx);
    controller.on(ctx.caches.validating_policies(), |changed, enqueue| {
        if changed.after.is_some_and(is_behind) {
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

fn is_behind(policy: &ValidatingAdmissionPolicy) -> bool {
    let seen = policy.status.as_ref().and_then(|status| status.observed_generation).unwrap_or(0);
    policy.metadata.generation.unwrap_or(0) > seen
}

async fn reconcile(ctx: &Ctx, key: &Key) -> Result<Next, Error> {
    let Some(policy) = ctx.caches.validating_policies().get(key) else { return Ok(Next::Change) };
    if is_behind(&policy) {
        let patch = Patch::Apply { manager: NAME, object: status(&policy) };
        ctx.patch_status::<ValidatingAdmissionPolicy>(key, &patch).await?;
    }
    Ok(Next::Change)
}

fn status(policy: &ValidatingAdmissionPolicy) -> Value {
    // What was decoded can be encoded.
    let object = serde_json::to_value(policy).unwrap_or_default();
    let warnings: Vec<Value> = api::admissionregistration::type_check::warnings(&object)
        .into_iter()
        .map(|(field, warning)| json!({"fieldRef": field, "warning": warning}))
        .collect();
    let checked = if warnings.is_empty() { json!({}) } else { json!({"expressionWarnings": warnings}) };
    json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": policy.metadata.name},
        "status": {"observedGeneration": policy.metadata.generation, "typeChecking": checked},
    })
}
