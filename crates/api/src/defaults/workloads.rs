//! Defaults of `apps`, `batch` and `autoscaling`.

use serde_json::{Value, json};

use super::DefaultRule::{Apply, Set};
use super::DefaultValue::{Flag, Int, Struct, Text};
use super::TypeDefaults;
use crate::json::JsonExt;

pub(super) const TYPE_DEFAULTS: &[TypeDefaults] = &[
    TypeDefaults {
        ty: "apps.v1.DeploymentSpec",
        rules: &[
            Set("replicas", Int(1)),
            Set("revisionHistoryLimit", Int(10)),
            Set("progressDeadlineSeconds", Int(600)),
        ],
    },
    TypeDefaults { ty: "apps.v1.DeploymentStrategy", rules: &[Apply(deployment_strategy)] },
    TypeDefaults { ty: "apps.v1.DaemonSetSpec", rules: &[Set("revisionHistoryLimit", Int(10))] },
    TypeDefaults { ty: "apps.v1.DaemonSetUpdateStrategy", rules: &[Apply(daemon_set_strategy)] },
    TypeDefaults { ty: "apps.v1.ReplicaSetSpec", rules: &[Set("replicas", Int(1))] },
    TypeDefaults {
        ty: "apps.v1.StatefulSetSpec",
        rules: &[
            Set("podManagementPolicy", Text("OrderedReady")),
            Set("persistentVolumeClaimRetentionPolicy", Struct),
            Set("replicas", Int(1)),
            Set("revisionHistoryLimit", Int(10)),
            Apply(claim_templates),
        ],
    },
    TypeDefaults { ty: "apps.v1.StatefulSetUpdateStrategy", rules: &[Apply(stateful_set_strategy)] },
    TypeDefaults {
        ty: "apps.v1.StatefulSetPersistentVolumeClaimRetentionPolicy",
        rules: &[Set("whenDeleted", Text("Retain")), Set("whenScaled", Text("Retain"))],
    },
    // JobSpec itself has no rules, because the template of a CronJob gets no Job defaults.
    TypeDefaults { ty: "batch.v1.Job", rules: &[Apply(job)] },
    TypeDefaults {
        ty: "batch.v1.PodFailurePolicyOnPodConditionsPattern",
        rules: &[Set("status", Text("True"))],
    },
    TypeDefaults {
        ty: "batch.v1.CronJobSpec",
        rules: &[
            Set("concurrencyPolicy", Text("Allow")),
            Set("suspend", Flag(false)),
            Set("successfulJobsHistoryLimit", Int(3)),
            Set("failedJobsHistoryLimit", Int(1)),
        ],
    },
    TypeDefaults { ty: "autoscaling.v1.HorizontalPodAutoscalerSpec", rules: &[Set("minReplicas", Int(1))] },
    TypeDefaults {
        ty: "autoscaling.v2.HorizontalPodAutoscalerSpec",
        rules: &[Set("minReplicas", Int(1)), Apply(metrics)],
    },
    TypeDefaults { ty: "autoscaling.v2.HorizontalPodAutoscalerBehavior", rules: &[Apply(behavior)] },
];

fn deployment_strategy(strategy: &mut Value) {
    rolling_update(strategy, json!("25%"), json!("25%"));
}

fn daemon_set_strategy(strategy: &mut Value) {
    rolling_update(strategy, json!(1), json!(0));
}

fn rolling_update(strategy: &mut Value, unavailable: Value, surge: Value) {
    if strategy.text("type").is_empty() {
        strategy.set("type", "RollingUpdate");
    }
    if strategy.text("type") == "RollingUpdate" {
        strategy.object_mut("rollingUpdate");
        strategy["rollingUpdate"].set_default("maxUnavailable", unavailable);
        strategy["rollingUpdate"].set_default("maxSurge", surge);
    }
}

/// Claim templates get `apiVersion` and `kind`, as by upstream's conversion.
fn claim_templates(spec: &mut Value) {
    for claim in spec.get_mut("volumeClaimTemplates").and_then(Value::as_array_mut).into_iter().flatten() {
        claim.set("apiVersion", "v1");
        claim.set("kind", "PersistentVolumeClaim");
    }
}

fn stateful_set_strategy(strategy: &mut Value) {
    if strategy.text("type").is_empty() {
        strategy.set("type", "RollingUpdate");
        strategy.object_mut("rollingUpdate");
    }
    if strategy.text("type") == "RollingUpdate" && strategy.has("rollingUpdate") {
        strategy["rollingUpdate"].set_default("partition", 0);
    }
}

fn job(job: &mut Value) {
    job.object_mut("spec");
    let spec = &mut job["spec"];
    if !spec.has("parallelism") {
        spec.set_default("completions", 1);
        spec.set_default("parallelism", 1);
    }
    let per_index = spec.has("backoffLimitPerIndex");
    spec.set_default("backoffLimit", if per_index { i32::MAX } else { 6 });
    spec.set_default("completionMode", "NonIndexed");
    spec.set_default("suspend", false);
    let replace = if spec.has("podFailurePolicy") { "Failed" } else { "TerminatingOrFailed" };
    spec.set_default("podReplacementPolicy", replace);
    spec.set_default("manualSelector", false);
}

fn metrics(spec: &mut Value) {
    if spec.items("metrics").is_empty() {
        spec.set(
            "metrics",
            json!([{
                "type": "Resource",
                "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}},
            }]),
        );
    }
}

fn behavior(behavior: &mut Value) {
    let percent = json!({"type": "Percent", "value": 100, "periodSeconds": 15});
    let pods = json!({"type": "Pods", "value": 4, "periodSeconds": 15});
    behavior.object_mut("scaleUp");
    behavior["scaleUp"].set_default("stabilizationWindowSeconds", 0);
    for (direction, policies) in [("scaleUp", json!([pods, percent])), ("scaleDown", json!([percent]))] {
        behavior.object_mut(direction);
        behavior[direction].set_default("selectPolicy", "Max");
        behavior[direction].set_default("policies", policies);
    }
}
