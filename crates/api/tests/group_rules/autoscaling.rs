use expect_test::expect;
use serde_json::{Value, json};

use super::{check, check_status, check_update, check_valid, with_value};

const HPA: &str = "HorizontalPodAutoscaler";

fn hpa() -> Value {
    json!({
        "metadata": {"name": "web", "namespace": "shop"},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web"},
            "minReplicas": 1,
            "maxReplicas": 5,
            "metrics": [{
                "type": "Resource",
                "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}},
            }],
        },
    })
}

#[test]
fn validates_replicas_and_scale_target() {
    check_valid(HPA, hpa());
    check(
        HPA,
        json!({"spec": {"minReplicas": 0}}),
        expect![[r#"
        spec.minReplicas: Invalid value: 0: must be greater than or equal to 1
        spec.maxReplicas: Required value: must be set and greater than 0
        spec.scaleTargetRef.kind: Required value
        spec.scaleTargetRef.name: Required value
        spec.scaleTargetRef.apiVersion: Invalid value: "": apiVersion must specify API group
        spec.metrics: Forbidden: must specify at least one Object or External metric to support scaling to zero replicas
    "#]],
    );
    check(
        HPA,
        with_value(hpa(), "/spec/maxReplicas", json!(-1)),
        expect![[r#"
        spec.maxReplicas: Invalid value: -1: must be greater than or equal to 1
        spec.maxReplicas: Invalid value: -1: must be greater than or equal to `minReplicas`
    "#]],
    );
    check(
        HPA,
        with_value(hpa(), "/spec/scaleTargetRef/apiVersion", json!("v1")),
        expect![[r#"
        spec.scaleTargetRef.apiVersion: Invalid value: "v1": apiVersion must specify API group
    "#]],
    );
    check(
        HPA,
        with_value(hpa(), "/spec/scaleTargetRef/apiVersion", json!("a/b/c")),
        expect![[r#"
        spec.scaleTargetRef.apiVersion: Invalid value: "a/b/c": unexpected GroupVersion string: a/b/c
    "#]],
    );
    let controller = json!({"apiVersion": "v1", "kind": "ReplicationController", "name": "web"});
    check_valid(HPA, with_value(hpa(), "/spec/scaleTargetRef", controller));
}

#[test]
fn stored_invalid_fields_are_allowed_on_update() {
    let old = with_value(hpa(), "/spec/scaleTargetRef/apiVersion", json!("v1"));
    let old = with_value(old, "/spec/minReplicas", json!(0));
    check_update(
        HPA,
        old.clone(),
        with_value(old.clone(), "/spec/maxReplicas", json!(9)),
        expect![[r#"
        spec.metrics: Forbidden: must specify at least one Object or External metric to support scaling to zero replicas
    "#]],
    );
    check_update(
        HPA,
        old.clone(),
        with_value(old, "/spec/scaleTargetRef/kind", json!("ReplicaSet")),
        expect![[r#"
        spec.scaleTargetRef.apiVersion: Invalid value: "v1": apiVersion must specify API group
        spec.metrics: Forbidden: must specify at least one Object or External metric to support scaling to zero replicas
    "#]],
    );
}

#[test]
fn validates_metric_source_and_target() {
    let metrics = json!([
        {},
        {"type": "Pods", "object": {}, "external": {}},
        {"type": "Pods", "pods": {"metric": {"name": "a/b"}, "target": {"type": "Value", "averageValue": "0"}}},
        {"type": "External", "external": {"metric": {"name": "q"}, "target": {"type": "Value", "value": "1", "averageValue": "1"}}},
        {"type": "Resource", "resource": {"target": {"type": "Mean", "averageUtilization": 0, "averageValue": "-1"}}},
        {"type": "ContainerResource", "containerResource": {"name": "pods", "container": "A", "target": {"type": "Utilization"}}},
        {"type": "ContainerResource", "containerResource": {"name": "requests.x/y", "container": "a", "target": {"type": "Utilization", "averageUtilization": 1}}},
    ]);
    check(
        HPA,
        with_value(hpa(), "/spec/metrics", metrics),
        expect![[r#"
        spec.metrics[0].type: Required value: must specify a metric source type
        spec.metrics[0].type: Unsupported value: "": supported values: "ContainerResource", "External", "Object", "Pods", "Resource"
        spec.metrics[0].type: Unsupported value: "": supported values: "ContainerResource", "External", "Object", "Pods", "Resource"
        spec.metrics[1].object.describedObject.kind: Required value
        spec.metrics[1].object.describedObject.name: Required value
        spec.metrics[1].object.metric.name: Required value: must specify a metric name
        spec.metrics[1].object.target.type: Required value: must specify a metric target type
        spec.metrics[1].object.target.type: Invalid value: "": must be either Utilization, Value, or AverageValue
        spec.metrics[1].object.target.averageValue: Required value: must set either a target value or averageValue
        spec.metrics[1].pods: Required value: must populate information for the given metric source
        spec.metrics[1].object: Forbidden: must populate the given metric source only
        spec.metrics[1].external: Forbidden: must populate the given metric source only
        spec.metrics[2].pods.metric.name: Invalid value: "a/b": may not contain '/'
        spec.metrics[2].pods.target.averageValue: Invalid value: "0": must be positive
        spec.metrics[3].external.target.value: Forbidden: may not set both a target value for metric and a per-pod target
        spec.metrics[4].resource.name: Required value: must specify a resource name
        spec.metrics[4].resource.target.type: Invalid value: "Mean": must be either Utilization, Value, or AverageValue
        spec.metrics[4].resource.target.averageValue: Invalid value: "-1": must be positive
        spec.metrics[4].resource.target.averageUtilization: Invalid value: 0: must be greater than 0
        spec.metrics[4].resource.target.averageValue: Forbidden: may not set both a target raw value and a target utilization
        spec.metrics[5].containerResource.name: Invalid value: "pods": must be a standard resource for containers
        spec.metrics[5].containerResource.container: Invalid value: "A": a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')
        spec.metrics[5].containerResource.target.averageUtilization: Required value: must set either a target raw value or a target utilization
        spec.metrics[6].containerResource.name: Invalid value: "requests.x/y": doesn't follow extended resource name standard
    "#]],
    );
}

#[test]
fn validates_behavior() {
    let behavior = json!({
        "scaleUp": {"stabilizationWindowSeconds": 3601, "selectPolicy": "Most", "tolerance": "-1"},
        "scaleDown": {"stabilizationWindowSeconds": -1, "policies": [
            {"type": "Pods", "value": 1, "periodSeconds": 60},
            {"type": "All", "value": 0, "periodSeconds": 1801},
        ]},
    });
    check(
        HPA,
        with_value(hpa(), "/spec/behavior", behavior),
        expect![[r#"
        spec.behavior.scaleUp.stabilizationWindowSeconds: Invalid value: 3601: must be less than or equal to 3600
        spec.behavior.scaleUp.selectPolicy: Unsupported value: "Most": supported values: "Disabled", "Max", "Min"
        spec.behavior.scaleUp.policies: Required value: must specify at least one Policy
        spec.behavior.scaleUp.tolerance: Invalid value: "-1": must be greater than or equal to 0
        spec.behavior.scaleDown.stabilizationWindowSeconds: Invalid value: -1: must be greater than or equal to zero
        spec.behavior.scaleDown.policies[1].type: Unsupported value: "All": supported values: "Percent", "Pods"
        spec.behavior.scaleDown.policies[1].value: Invalid value: 0: must be greater than zero
        spec.behavior.scaleDown.policies[1].periodSeconds: Invalid value: 1801: must be less than or equal to 1800
    "#]],
    );
}

#[test]
fn validates_status() {
    check_status(
        HPA,
        json!({"status": {"currentReplicas": -1, "desiredReplicas": 2}}),
        expect![[r#"
        status.currentReplicas: Invalid value: -1: must be greater than or equal to 0
    "#]],
    );
}
