//! Patches and field ownership of built-in types.

use patch::apply::{FieldManager, apply, track};
use patch::strategic;
use schema::TypeId;
use serde_json::{Value, json};

fn ty(group: &str, version: &str, kind: &str) -> TypeId {
    schema::kubernetes().type_by_kind(group, version, kind).expect("a built-in kind")
}

fn writer(api_version: &str) -> FieldManager<'_> {
    FieldManager {
        manager: "me",
        api_version,
        subresource: "",
        now: "2026-01-01T00:00:00Z",
        ignore: &[&["status"]],
    }
}

fn deployment() -> Value {
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web", "namespace": "ns", "uid": "u", "generation": 1, "labels": {"app": "web"}},
        "spec": {
            "progressDeadlineSeconds": 600,
            "replicas": 1,
            "revisionHistoryLimit": 10,
            "selector": {"matchLabels": {"app": "web"}},
            "strategy": {"rollingUpdate": {"maxSurge": "25%", "maxUnavailable": "25%"}, "type": "RollingUpdate"},
            "template": {
                "metadata": {"labels": {"app": "web"}},
                "spec": {
                    "containers": [{
                        "image": "nginx",
                        "imagePullPolicy": "Always",
                        "name": "nginx",
                        "ports": [{"containerPort": 80, "protocol": "TCP"}],
                        "resources": {},
                        "terminationMessagePath": "/dev/termination-log",
                        "terminationMessagePolicy": "File",
                    }],
                    "dnsPolicy": "ClusterFirst",
                    "restartPolicy": "Always",
                    "schedulerName": "default-scheduler",
                    "securityContext": {},
                    "terminationGracePeriodSeconds": 30,
                },
            },
        },
        "status": {},
    })
}

/// The field set of the first entry after a create.
fn field_set_after_create(ty: TypeId, mut object: Value) -> Value {
    let api_version = object["apiVersion"].as_str().unwrap_or("").to_owned();
    track(schema::kubernetes(), ty, None, &mut object, &writer(&api_version));
    object["metadata"]["managedFields"][0]["fieldsV1"].take()
}

#[test]
fn created_deployment_has_upstream_field_ownership() {
    assert_eq!(
        field_set_after_create(ty("apps", "v1", "Deployment"), deployment()),
        json!({
            "f:metadata": {"f:labels": {".": {}, "f:app": {}}},
            "f:spec": {
                "f:progressDeadlineSeconds": {},
                "f:replicas": {},
                "f:revisionHistoryLimit": {},
                "f:selector": {},
                "f:strategy": {
                    "f:rollingUpdate": {".": {}, "f:maxSurge": {}, "f:maxUnavailable": {}},
                    "f:type": {},
                },
                "f:template": {
                    "f:metadata": {"f:labels": {".": {}, "f:app": {}}},
                    "f:spec": {
                        "f:containers": {
                            "k:{\"name\":\"nginx\"}": {
                                ".": {},
                                "f:image": {},
                                "f:imagePullPolicy": {},
                                "f:name": {},
                                "f:ports": {
                                    ".": {},
                                    "k:{\"containerPort\":80,\"protocol\":\"TCP\"}": {
                                        ".": {},
                                        "f:containerPort": {},
                                        "f:protocol": {},
                                    },
                                },
                                "f:resources": {},
                                "f:terminationMessagePath": {},
                                "f:terminationMessagePolicy": {},
                            },
                        },
                        "f:dnsPolicy": {},
                        "f:restartPolicy": {},
                        "f:schedulerName": {},
                        "f:securityContext": {},
                        "f:terminationGracePeriodSeconds": {},
                    },
                },
            },
        })
    );
}

#[test]
fn created_service_and_config_map_have_upstream_field_ownership() {
    let service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "s"},
        "spec": {
            "internalTrafficPolicy": "Cluster",
            "ports": [{"port": 80, "protocol": "TCP", "targetPort": 80}],
            "selector": {"a": "b"},
            "sessionAffinity": "None",
            "type": "ClusterIP",
        },
        "status": {"loadBalancer": {}},
    });
    assert_eq!(
        field_set_after_create(ty("", "v1", "Service"), service),
        json!({"f:spec": {
            "f:internalTrafficPolicy": {},
            "f:ports": {
                ".": {},
                "k:{\"port\":80,\"protocol\":\"TCP\"}": {
                    ".": {}, "f:port": {}, "f:protocol": {}, "f:targetPort": {},
                },
            },
            "f:selector": {},
            "f:sessionAffinity": {},
            "f:type": {},
        }})
    );
    let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a": "1"}});
    assert_eq!(
        field_set_after_create(ty("", "v1", "ConfigMap"), map),
        json!({"f:data": {".": {}, "f:a": {}}})
    );
}

#[test]
fn applied_services_merge_ports_by_port_and_protocol() {
    let table = schema::kubernetes();
    let service = |ports: Value| json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "sv", "namespace": "ns"}, "spec": {"ports": ports}});
    let one = service(json!([{"name": "x", "port": 80}]));
    let live = apply(table, ty("", "v1", "Service"), None, &one, &writer("v1"), false).expect("applies");
    let other = FieldManager { manager: "two", ..writer("v1") };
    let config = service(json!([{"name": true, "port": 81}]));
    let error =
        apply(table, ty("", "v1", "Service"), Some(&live), &config, &other, false).expect_err("refused");
    assert_eq!(
        error.to_string(),
        "failed to create typed patch object (ns/sv; /v1, Kind=Service): \
         .spec.ports[port=81,protocol=\"TCP\"].name: expected string, got &value.valueUnstructured{Value:true}"
    );
    let config = service(json!([{"name": "y", "port": 81}]));
    let both = apply(table, ty("", "v1", "Service"), Some(&live), &config, &other, false).expect("applies");
    assert_eq!(both["spec"]["ports"], json!([{"name": "x", "port": 80}, {"name": "y", "port": 81}]));
}

#[test]
fn applies_strategic_patches_to_deployment() {
    let mut doc = deployment();
    let mut patch = |patch: Value| {
        strategic(schema::kubernetes(), ty("apps", "v1", "Deployment"), &mut doc, &patch).expect("applies");
        doc["spec"].clone()
    };
    let spec = patch(json!({"spec": {"template": {"spec": {"containers": [
        {"name": "nginx", "env": [{"name": "A", "value": "1"}]},
        {"name": "side", "image": "busybox"},
    ]}}}}));
    let containers = &spec["template"]["spec"]["containers"];
    assert_eq!(containers[0]["env"], json!([{"name": "A", "value": "1"}]));
    assert_eq!(containers[0]["image"], "nginx");
    assert_eq!(containers[1], json!({"name": "side", "image": "busybox"}));

    let spec = patch(
        json!({"spec": {"template": {"spec": {"containers": [{"name": "side", "$patch": "delete"}]}}}}),
    );
    assert_eq!(spec["template"]["spec"]["containers"].as_array().map(Vec::len), Some(1));

    let spec = patch(json!({"spec": {"strategy": {"$retainKeys": ["type"], "type": "Recreate"}}}));
    assert_eq!(spec["strategy"], json!({"type": "Recreate"}));
}

#[test]
fn selector_of_disruption_budget_is_replaced() {
    let mut doc = json!({"spec": {"selector": {"matchLabels": {"a": "b"}}}});
    let patch = json!({"spec": {"selector": {"matchLabels": {"c": "d"}}}});
    let budget = ty("policy", "v1", "PodDisruptionBudget");
    strategic(schema::kubernetes(), budget, &mut doc, &patch).expect("applies");
    assert_eq!(doc["spec"]["selector"], json!({"matchLabels": {"c": "d"}}));
}
