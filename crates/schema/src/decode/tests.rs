//! Decoding and normalization, including the error messages.

use expect_test::{Expect, expect};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::kubernetes;

fn decode_text(kind: &str, text: &str) -> String {
    let table = kubernetes();
    let id = ["", "apps", "apiextensions.k8s.io", "batch", "coordination.k8s.io"]
        .iter()
        .find_map(|group| table.type_by_kind(group, "v1", kind))
        .expect("a kind of these groups");
    match from_json(table, id, text.as_bytes()) {
        Ok(decoded) => {
            let mut lines = vec![decoded.value.to_string()];
            lines.extend(decoded.strict_errors);
            lines.join("\n")
        }
        Err(error) => error.to_string(),
    }
}

#[track_caller]
fn check(kind: &str, value: Value, expect: Expect) {
    expect.assert_eq(&decode_text(kind, &value.to_string()));
}

#[track_caller]
fn check_text(kind: &str, text: &str, expect: Expect) {
    expect.assert_eq(&decode_text(kind, text));
}

/// Returns a Pod with one container that has these fields.
fn container(fields: Value) -> Value {
    json!({"spec": {"containers": [fields]}})
}

#[test]
fn decode_drops_empty_fields_except_always_present() {
    check("Pod", json!({}), expect![[r#"{"metadata":{},"spec":{"containers":null},"status":{}}"#]]);
    check(
        "Service",
        json!({"spec": {"ports": [{"port": 80, "name": "", "nodePort": 0}]}}),
        expect![[
            r#"{"metadata":{},"spec":{"ports":[{"port":80,"targetPort":0}]},"status":{"loadBalancer":{}}}"#
        ]],
    );
    check(
        "Deployment",
        json!({"spec": {"replicas": 0, "paused": false, "minReadySeconds": 0}}),
        expect![[
            r#"{"metadata":{},"spec":{"replicas":0,"selector":null,"strategy":{},"template":{"metadata":{},"spec":{"containers":null}}},"status":{}}"#
        ]],
    );
    check(
        "ConfigMap",
        json!({"data": {}, "metadata": {"labels": null, "creationTimestamp": null}}),
        expect![[r#"{"metadata":{}}"#]],
    );
    check(
        "Pod",
        container(json!({"name": "a", "env": [], "securityContext": {}, "stdin": false})),
        expect![[
            r#"{"metadata":{},"spec":{"containers":[{"name":"a","resources":{},"securityContext":{}}]},"status":{}}"#
        ]],
    );
    check(
        "Pod",
        container(json!(null)),
        expect![[r#"{"metadata":{},"spec":{"containers":[{"name":"","resources":{}}]},"status":{}}"#]],
    );
}

#[test]
fn values_have_canonical_form() {
    check(
        "Pod",
        container(json!({"resources": {"limits": {"cpu": 0.5, "memory": "1000m", "x": 3, "y": null}}})),
        expect![[
            r#"{"metadata":{},"spec":{"containers":[{"name":"","resources":{"limits":{"cpu":"500m","memory":"1","x":"3","y":"0"}}}]},"status":{}}"#
        ]],
    );
    check(
        "Secret",
        json!({"data": {"a": "YQ==", "b": "YR==", "c": "Y\nQ==", "d": null}}),
        expect![[r#"{"data":{"a":"YQ==","b":"YQ==","c":"YQ==","d":""},"metadata":{}}"#]],
    );
    check(
        "Pod",
        json!({"metadata": {"deletionTimestamp": "2026-01-01T01:00:00+01:00"}}),
        expect![[
            r#"{"metadata":{"deletionTimestamp":"2026-01-01T00:00:00Z"},"spec":{"containers":null},"status":{}}"#
        ]],
    );
    check(
        "Lease",
        json!({"spec": {"renewTime": "2026-01-01T01:00:00.000001+01:00"}}),
        expect![[r#"{"metadata":{},"spec":{"renewTime":"2026-01-01T00:00:00.000001Z"}}"#]],
    );
}

#[test]
fn reports_strict_errors_in_order() {
    check(
        "Pod",
        container(json!({"name": "a", "colour": "red", "Image": "b"})),
        expect![[r#"
        {"metadata":{},"spec":{"containers":[{"name":"a","resources":{}}]},"status":{}}
        unknown field "spec.containers[0].Image"
        unknown field "spec.containers[0].colour""#]],
    );
    check_text(
        "Pod",
        r#"{"spec":{"nodeName":"a","nodeName":"b","x":[{"y":1}]},"metadata":{"labels":{"a":"1","a":"2"}}}"#,
        expect![[r#"
            {"metadata":{"labels":{"a":"2"}},"spec":{"containers":null,"nodeName":"b"},"status":{}}
            duplicate field "spec.nodeName"
            unknown field "spec.x"
            duplicate field "metadata.labels.a""#]],
    );
}

#[test]
fn rejects_values_of_wrong_type() {
    check(
        "Pod",
        container(json!({"name": "a", "image": 5})),
        expect![
            "json: cannot unmarshal number into Go struct field Container.spec.containers.image of type string"
        ],
    );
    check(
        "Pod",
        container(json!({"ports": [{"containerPort": 3_000_000_000u32}]})),
        expect![
            "json: cannot unmarshal number 3000000000 into Go struct field ContainerPort.spec.containers.ports.containerPort of type int32"
        ],
    );
    check(
        "Pod",
        container(json!({"ports": [{"containerPort": 1.5}]})),
        expect![
            "json: cannot unmarshal number 1.5 into Go struct field ContainerPort.spec.containers.ports.containerPort of type int32"
        ],
    );
    check(
        "Pod",
        container(json!({"ports": "80"})),
        expect![
            "json: cannot unmarshal string into Go struct field Container.spec.containers.ports of type []v1.ContainerPort"
        ],
    );
    check(
        "Pod",
        json!({"spec": []}),
        expect!["json: cannot unmarshal array into Go struct field Pod.spec of type v1.PodSpec"],
    );
    check("Pod", json!([]), expect!["json: cannot unmarshal array into Go value of type v1.Pod"]);
    check(
        "Pod",
        json!({"metadata": {"labels": {"a": 1}}}),
        expect![
            "json: cannot unmarshal number into Go struct field ObjectMeta.metadata.labels of type string"
        ],
    );
    check(
        "Pod",
        json!({"metadata": {"creationTimestamp": 5}}),
        expect![
            "json: cannot unmarshal number into Go struct field ObjectMeta.metadata.creationTimestamp of type string"
        ],
    );
    check(
        "Pod",
        json!({"metadata": {"creationTimestamp": "yesterday"}}),
        expect![[
            r#"parsing time "yesterday" as "2006-01-02T15:04:05Z07:00": cannot parse "yesterday" as "2006""#
        ]],
    );
    check(
        "Pod",
        container(json!({"resources": {"limits": {"cpu": "lots"}}})),
        expect![
            "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
        ],
    );
    check(
        "Pod",
        container(json!({"resources": {"limits": {"cpu": {}}}})),
        expect![
            "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
        ],
    );
    check("Secret", json!({"data": {"a": "a b"}}), expect!["illegal base64 data at input byte 1"]);
    check("Secret", json!({"data": {"a": "YWI"}}), expect!["illegal base64 data at input byte 0"]);
    check(
        "Service",
        json!({"spec": {"ports": [{"targetPort": true}]}}),
        expect![
            "json: cannot unmarshal bool into Go struct field ServicePort.spec.ports.targetPort of type int32"
        ],
    );
}

#[test]
fn errors_contain_go_type_name() {
    check(
        "Pod",
        container(json!({"imagePullPolicy": 5})),
        expect![
            "json: cannot unmarshal number into Go struct field Container.spec.containers.imagePullPolicy of type v1.PullPolicy"
        ],
    );
    check(
        "Pod",
        container(json!({"resources": {"limits": 5}})),
        expect![
            "json: cannot unmarshal number into Go struct field ResourceRequirements.spec.containers.resources.limits of type v1.ResourceList"
        ],
    );
    check(
        "PersistentVolume",
        json!({"spec": {"accessModes": [5]}}),
        expect![
            "json: cannot unmarshal number into Go struct field PersistentVolumeSpec.spec.accessModes of type v1.PersistentVolumeAccessMode"
        ],
    );
    check(
        "PersistentVolume",
        json!({"spec": {"accessModes": 5}}),
        expect![
            "json: cannot unmarshal number into Go struct field PersistentVolumeSpec.spec.accessModes of type []v1.PersistentVolumeAccessMode"
        ],
    );
    check(
        "Pod",
        json!({"metadata": {"uid": {}}}),
        expect![
            "json: cannot unmarshal object into Go struct field ObjectMeta.metadata.uid of type types.UID"
        ],
    );
}

#[test]
fn rejects_invalid_json() {
    check_text("Pod", r#"{"spec": {"nodeName": 5}"#, expect!["unexpected end of JSON input"]);
    check_text("Pod", "", expect!["unexpected end of JSON input"]);
    check_text("Pod", "{} {}", expect!["invalid character '{' after top-level value"]);
    check_text("Pod", "nonsense", expect!["invalid character 'o' in literal null (expecting 'u')"]);
    check_text("Pod", "apiVersion: v1", expect!["invalid character 'a' looking for beginning of value"]);
    check_text("Pod", "{\n\"a\" 1}", expect!["invalid character '1' after object key"]);
    check_text("Pod", "{a: 1}", expect!["invalid character 'a' looking for beginning of object key string"]);
    check_text(
        "Pod",
        r#"{"spec": {} "status": {}}"#,
        expect![[r#"invalid character '"' after object key:value pair"#]],
    );
    check_text(
        "Pod",
        r#"{"spec": {},}"#,
        expect!["invalid character '}' looking for beginning of object key string"],
    );
    check_text("Pod", &"[".repeat(100_000), expect!["unexpected end of JSON input"]);
    check_text("Pod", &r#"{"a":"#.repeat(100_000), expect!["unexpected end of JSON input"]);
}

#[test]
fn decode_handles_json_schema_props() {
    let schema = |schema: Value| json!({"spec": {"versions": [{"name": "v1", "schema": {"openAPIV3Schema": schema}}]}});
    check(
        "CustomResourceDefinition",
        schema(json!({"items": {"type": "", "pattern": "x", "colour": 1}})),
        expect![[
            r#"{"metadata":{},"spec":{"group":"","names":{"kind":"","plural":""},"scope":"","versions":[{"name":"v1","schema":{"openAPIV3Schema":{"items":{"pattern":"x"}}},"served":false,"storage":false}]},"status":{"acceptedNames":{"kind":"","plural":""},"conditions":null,"storedVersions":null}}"#
        ]],
    );
    check(
        "CustomResourceDefinition",
        schema(json!({"additionalProperties": false, "maxLength": 0, "default": null})),
        expect![[
            r#"{"metadata":{},"spec":{"group":"","names":{"kind":"","plural":""},"scope":"","versions":[{"name":"v1","schema":{"openAPIV3Schema":{"additionalProperties":false,"maxLength":0}},"served":false,"storage":false}]},"status":{"acceptedNames":{"kind":"","plural":""},"conditions":null,"storedVersions":null}}"#
        ]],
    );
    check(
        "CustomResourceDefinition",
        schema(json!({"additionalProperties": 5})),
        expect!["boolean or JSON schema expected"],
    );
    check(
        "CustomResourceDefinition",
        schema(json!({"enum": [null, 1, "a"], "maximum": 1.0, "default": {"a": null}})),
        expect![[
            r#"{"metadata":{},"spec":{"group":"","names":{"kind":"","plural":""},"scope":"","versions":[{"name":"v1","schema":{"openAPIV3Schema":{"default":{"a":null},"enum":[null,1,"a"],"maximum":1}},"served":false,"storage":false}]},"status":{"acceptedNames":{"kind":"","plural":""},"conditions":null,"storedVersions":null}}"#
        ]],
    );
    check(
        "CustomResourceDefinition",
        schema(json!({"dependencies": {"a": ["b"], "c": {"title": ""}}})),
        expect![[
            r#"{"metadata":{},"spec":{"group":"","names":{"kind":"","plural":""},"scope":"","versions":[{"name":"v1","schema":{"openAPIV3Schema":{"dependencies":{"a":["b"],"c":{}}}},"served":false,"storage":false}]},"status":{"acceptedNames":{"kind":"","plural":""},"conditions":null,"storedVersions":null}}"#
        ]],
    );
}

#[test]
fn rejects_value_over_max_depth() {
    let table = kubernetes();
    let id = table.type_by_name("io.k8s.api.apps.v1.ControllerRevision").expect("a built-in type");
    let mut value = json!({});
    for _ in 0..MAX_DEPTH {
        value = json!({ "a": value });
    }
    let mut object = json!({"data": value});
    assert_eq!(normalize(table, id, &mut object), Err(DecodeError::Depth));
}

/// Visitors with typed values have the largest stack frames, and a thread's stack is small.
#[test]
fn schema_of_max_depth_fits_on_stack() {
    let table = kubernetes();
    let name = "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSONSchemaProps";
    let id = table.type_by_name(name).expect("a built-in type");
    let nested = |levels: usize| format!("{}{{}}{}", r#"{"items":"#.repeat(levels), "}".repeat(levels));
    assert!(from_json(table, id, nested(MAX_DEPTH - 2).as_bytes()).is_ok());
    let error = from_json(table, id, nested(MAX_DEPTH).as_bytes()).map(|decoded| decoded.value);
    assert_eq!(error, Err(DecodeError::Depth));
}

proptest! {
    #[test]
    fn never_panics(text in "\\PC*") {
        let table = kubernetes();
        let id = table.type_by_name("io.k8s.api.core.v1.Pod").expect("a built-in type");
        let _ = from_json(table, id, text.as_bytes());
    }
}
