//! Says in the status of a ValidatingAdmissionPolicy what is odd about its expressions.

use api::admissionregistration::type_check;
use k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicy;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use reconcile::{Controller, Ctx, Error, Key, Next, Patch, keys};
use serde_json::{Value, json};

const NAME: &str = "validatingadmissionpolicy-status";
const WORKERS: usize = 5;

pub async fn run(ctx: Ctx) {
    let controller = Controller::new(NAME, &ctx);
    controller.on(ctx.caches.validating_policies(), |changed, enqueue| {
        if changed.after.is_some_and(|policy| is_behind(policy)) {
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
    let Some(policy) = ctx.caches.validating_policies().get(key) else { return Ok(Next::Forget) };
    if is_behind(&policy) {
        // What was decoded can be encoded.
        let object = serde_json::to_value(&*policy).unwrap_or_default();
        let definitions = match type_check::wants_definitions(&object) {
            true => ctx.client.list::<CustomResourceDefinition>("").await?,
            false => Vec::new(),
        };
        let definitions: Vec<Value> =
            definitions.iter().filter_map(|one| serde_json::to_value(one).ok()).collect();
        let patch = Patch::Apply { manager: NAME, object: status(&policy, &object, &definitions) };
        ctx.patch_status::<ValidatingAdmissionPolicy>(key, &patch).await?;
    }
    Ok(Next::Change)
}

fn status(policy: &ValidatingAdmissionPolicy, object: &Value, definitions: &[Value]) -> Value {
    let warnings: Vec<Value> = type_check::warnings(object, definitions)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rig::{Rig, until};

    #[tokio::test(flavor = "multi_thread")]
    async fn the_status_says_what_is_odd() {
        let rig = Rig::start(&["validatingadmissionpolicy-status-controller"]).await;
        let policy = json!({
            "metadata": {"name": "p"},
            "spec": {
                "failurePolicy": "Fail",
                "matchConstraints": {"resourceRules": [
                    {"apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["*"], "resources": ["deployments"]}
                ]},
                "validations": [{"expression": "object.spec.replicas > 1"}, {"expression": "object.spec.replicas > '1'"}],
            },
        });
        let policy: ValidatingAdmissionPolicy = serde_json::from_value(policy).expect("a policy");
        rig.client.create(&policy).await.expect("the policy is made");
        let checked = until("type checking", || async {
            let policy: ValidatingAdmissionPolicy = rig.client.get(&Key::new("", "p")).await.ok()?;
            policy.status?.type_checking
        })
        .await;
        let warnings = checked.expression_warnings.unwrap_or_default();
        assert_eq!(warnings.len(), 1);
        assert_eq!(warnings[0].field_ref, "spec.validations[1].expression");
        assert!(
            warnings[0].warning.contains("found no matching overload for '_>_' applied to '(int, string)'")
        );
    }
}
