//! Type checks the CEL expressions of ValidatingAdmissionPolicies and writes the warnings to their status.
//!
//! Upstream: `pkg/controller/validatingadmissionpolicystatus`.

mod openapi;

use api::admissionregistration::type_check::{self, CustomKind};
use k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicy;
use reconcile::{Controller, Ctx, Error, Key, Patch, ReconcileAction, keys};
use serde_json::{Value, json};

const NAME: &str = "validatingadmissionpolicy-status";
const WORKERS: usize = 5;

pub async fn run(ctx: Ctx) {
    let controller = Controller::new(NAME, &ctx);
    controller.on(ctx.caches.validating_policies(), |changed, enqueue| {
        if changed.after.is_some_and(|policy| needs_type_check(policy)) {
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

fn needs_type_check(policy: &ValidatingAdmissionPolicy) -> bool {
    let observed = policy.status.as_ref().and_then(|status| status.observed_generation).unwrap_or(0);
    policy.metadata.generation.unwrap_or(0) > observed
}

async fn reconcile(ctx: &Ctx, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(policy) = ctx.caches.validating_policies().get(key) else { return Ok(ReconcileAction::Forget) };
    if needs_type_check(&policy) {
        // A decoded policy always serializes.
        let object = serde_json::to_value(&*policy).unwrap_or_default();
        let mut custom = Vec::new();
        for api_version in type_check::custom_versions(&object) {
            // A kind without schema is not checked, as if it did not exist.
            match openapi::kinds(&ctx.client, &api_version).await {
                Ok(kinds) => custom.extend(kinds),
                Err(error) => {
                    tracing::debug!(api_version, %error, "failed to fetch schemas, kinds are not type checked")
                }
            }
        }
        let patch = Patch::Apply { manager: NAME, object: status_patch(&policy, &object, &custom) };
        ctx.patch_status::<ValidatingAdmissionPolicy>(key, &patch).await?;
    }
    Ok(ReconcileAction::AwaitChange)
}

fn status_patch(policy: &ValidatingAdmissionPolicy, object: &Value, custom: &[CustomKind]) -> Value {
    let warnings: Vec<Value> = type_check::warnings(object, custom)
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
    use http::Method;

    use super::*;
    use crate::test_cluster::{TestCluster, wait_for};

    #[tokio::test(flavor = "multi_thread")]
    async fn status_contains_type_check_warnings() {
        let test_cluster = TestCluster::start(&["validatingadmissionpolicy-status-controller"]).await;
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
        test_cluster.client.create(&policy).await.expect("the policy is made");
        let checked = wait_for("type checking", || async {
            let policy: ValidatingAdmissionPolicy = test_cluster.client.get(&Key::new("", "p")).await.ok()?;
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

    #[tokio::test(flavor = "multi_thread")]
    async fn type_checks_policies_for_custom_resources() {
        let test_cluster = TestCluster::start(&["validatingadmissionpolicy-status-controller"]).await;
        let definition = json!({
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": "things.example.com"},
            "spec": {
                "group": "example.com", "scope": "Namespaced", "names": {"plural": "things", "kind": "Thing"},
                "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {
                    "type": "object",
                    "properties": {"spec": {"type": "object", "properties": {"n": {"type": "integer"}}}},
                }}}],
            },
        });
        let definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
        test_cluster
            .client
            .request(Method::POST, definitions, Some(&definition))
            .await
            .expect("a definition");
        wait_for("discovery", || async {
            test_cluster.client.resources_for_group_version("example.com/v1").await.ok()
        })
        .await;
        let policy = json!({
            "metadata": {"name": "p"},
            "spec": {
                "failurePolicy": "Fail",
                "matchConstraints": {"resourceRules": [{
                    "apiGroups": ["example.com", "absent.example.com"], "apiVersions": ["v1"],
                    "operations": ["*"], "resources": ["things"],
                }]},
                "validations": [
                    {"expression": "object.spec.n > 1 && object.metadata.labels.size() > 0"},
                    {"expression": "object.spec.n > '1'"},
                ],
            },
        });
        let policy: ValidatingAdmissionPolicy = serde_json::from_value(policy).expect("a policy");
        test_cluster.client.create(&policy).await.expect("the policy is created");
        let checked = wait_for("type checking", || async {
            let policy: ValidatingAdmissionPolicy = test_cluster.client.get(&Key::new("", "p")).await.ok()?;
            policy.status?.type_checking
        })
        .await;
        let warnings = checked.expression_warnings.unwrap_or_default();
        let fields: Vec<&str> = warnings.iter().map(|warning| warning.field_ref.as_str()).collect();
        assert_eq!(fields, ["spec.validations[1].expression"], "{warnings:?}");
        assert!(warnings[0].warning.starts_with("example.com/v1, Kind=Thing: "), "{warnings:?}");
    }
}
