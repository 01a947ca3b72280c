//! What goes in and what comes out, complaints included.

use expect_test::{Expect, expect};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::kubernetes;

fn read(kind: &str, text: &str) -> String {
    let table = kubernetes();
    let id = ["", "apps", "apiextensions.k8s.io", "batch", "coordination.k8s.io"]
        .iter()
        .find_map(|group| table.kind(group, "v1", kind))
        .expect("a kind of these groups");
    match from_json(table, id, text.as_bytes()) {
        Ok(decoded) => {
            let mut lines = vec![decoded.value.to_string()];
            lines.extend(decoded.unknown);
            lines.join("\n")
        }
        Err(error) => error.to_string(),
    }
}

#[track_caller]
fn check(kind: &str, value: Value, expect: Expect) {
    expect.assert_eq(&read(kind, &value.to_string()));
}

#[track_caller]
fn check_text(kind: &str, text: &str, expect: Expect) {
    expect.assert_eq(&read(kind, text));
}

/// A Pod with one container that has these fields.
fn container(fields: Value) -> Value {
    json!({"spec": {"containers": [fields]}})
}

#[test]
fn zeros_that_mean_nothing_are_dropped_and_what_is_always_written_is_added() {
    check("Pod", json!({}), expect![""]);
    check("Service", json!({"spec": {"ports": [{"port": 80, "name": "", "nodePort": 0}]}}), expect![""]);
    check("Deployment", json!({"spec": {"replicas": 0, "paused": false, "minReadySeconds": 0}}), expect![""]);
    check(
        "ConfigMap",
        json!({"data": {}, "metadata": {"labels": null, "creationTimestamp": null}}),
        expect![""],
    );
    check(
        "Pod",
        container(json!({"name": "a", "env": [], "securityContext": {}, "stdin": false})),
        expect![""],
    );
    check("Pod", container(json!(null)), expect![""]);
}

#[test]
fn values_take_their_canonical_form() {
    check(
        "Pod",
        container(json!({"resources": {"limits": {"cpu": 0.5, "memory": "1000m", "x": 3, "y": null}}})),
        expect![""],
    );
    check("Secret", json!({"data": {"a": "YQ==", "b": "YR==", "c": "Y\nQ==", "d": null}}), expect![""]);
    check("Pod", json!({"metadata": {"deletionTimestamp": "2026-01-01T01:00:00+01:00"}}), expect![""]);
    check("Lease", json!({"spec": {"renewTime": "2026-01-01T01:00:00.000001+01:00"}}), expect![""]);
}

#[test]
fn strict_decoding_complains_in_order() {
    check("Pod", container(json!({"name": "a", "colour": "red", "Image": "b"})), expect![""]);
    check_text(
        "Pod",
        r#"{"spec":{"nodeName":"a","nodeName":"b","x":[{"y":1}]},"metadata":{"labels":{"a":"1","a":"2"}}}"#,
        expect![""],
    );
}

#[test]
fn values_that_do_not_fit() {
    check("Pod", container(json!({"name": "a", "image": 5})), expect![""]);
    check("Pod", container(json!({"ports": [{"containerPort": 3_000_000_000u32}]})), expect![""]);
    check("Pod", container(json!({"ports": [{"containerPort": 1.5}]})), expect![""]);
    check("Pod", container(json!({"ports": "80"})), expect![""]);
    check("Pod", json!({"spec": []}), expect![""]);
    check("Pod", json!([]), expect![""]);
    check("Pod", json!({"metadata": {"labels": {"a": 1}}}), expect![""]);
    check("Pod", json!({"metadata": {"creationTimestamp": 5}}), expect![""]);
    check("Pod", json!({"metadata": {"creationTimestamp": "yesterday"}}), expect![""]);
    check("Pod", container(json!({"resources": {"limits": {"cpu": "lots"}}})), expect![""]);
    check("Pod", container(json!({"resources": {"limits": {"cpu": {}}}})), expect![""]);
    check("Secret", json!({"data": {"a": "a b"}}), expect![""]);
    check("Secret", json!({"data": {"a": "YWI"}}), expect![""]);
    check("Service", json!({"spec": {"ports": [{"targetPort": true}]}}), expect![""]);
}

#[test]
fn text_that_is_no_json() {
    check_text("Pod", r#"{"spec": {"nodeName": 5}"#, expect![""]);
    check_text("Pod", "", expect![""]);
    check_text("Pod", "{} {}", expect![""]);
    check_text("Pod", &"[".repeat(100_000), expect![""]);
    check_text("Pod", &r#"{"a":"#.repeat(100_000), expect![""]);
}

#[test]
fn schemas_of_custom_resources() {
    let schema = |schema: Value| json!({"spec": {"versions": [{"name": "v1", "schema": {"openAPIV3Schema": schema}}]}});
    check(
        "CustomResourceDefinition",
        schema(json!({"items": {"type": "", "pattern": "x", "colour": 1}})),
        expect![""],
    );
    check(
        "CustomResourceDefinition",
        schema(json!({"additionalProperties": false, "maxLength": 0, "default": null})),
        expect![""],
    );
    check("CustomResourceDefinition", schema(json!({"additionalProperties": 5})), expect![""]);
    check(
        "CustomResourceDefinition",
        schema(json!({"enum": [null, 1, "a"], "maximum": 1.0, "default": {"a": null}})),
        expect![""],
    );
    check(
        "CustomResourceDefinition",
        schema(json!({"dependencies": {"a": ["b"], "c": {"title": ""}}})),
        expect![""],
    );
}

#[test]
fn a_value_too_deep_is_refused() {
    let table = kubernetes();
    let id = table.named("io.k8s.api.apps.v1.ControllerRevision").expect("a built-in type");
    let mut value = json!({});
    for _ in 0..MAX_DEPTH {
        value = json!({ "a": value });
    }
    let mut object = json!({"data": value});
    assert_eq!(normalize(table, id, &mut object), Err(DecodeError::Depth));
}

proptest! {
    #[test]
    fn never_panics(text in "\\PC*") {
        let table = kubernetes();
        let id = table.named("io.k8s.api.core.v1.Pod").expect("a built-in type");
        let _ = from_json(table, id, text.as_bytes());
    }
}
