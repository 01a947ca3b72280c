//! Reference bytes, round trips of generated values of every kind, and malformed messages.

use expect_test::{Expect, expect};
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::kubernetes;

mod arbitrary;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[track_caller]
fn check(name: &str, value: Value, expect: Expect) {
    let table = kubernetes();
    let id = table.type_by_name(name).expect("a built-in type");
    let mut normalized = value;
    crate::normalize(table, id, &mut normalized).expect("a value that fits");
    let bytes = to_protobuf(table, id, &normalized);
    expect.assert_eq(&hex(&bytes));
    assert_eq!(from_protobuf(table, id, &bytes), Ok(normalized));
}

#[test]
fn encodes_reference_bytes() {
    // Strings, integers and zero values of fields that are not pointers.
    check(
        "io.k8s.api.core.v1.ContainerPort",
        json!({"name": "a", "containerPort": 80}),
        expect!["0a01611000185022002a00"],
    );
    // The embedded volume source is field 2 of the volume; `emptyDir` is field 2 of the source.
    check(
        "io.k8s.api.core.v1.Volume",
        json!({"name": "v", "emptyDir": {"sizeLimit": "1Gi"}}),
        expect!["0a0176120b12090a0012050a03314769"],
    );
    check(
        "io.k8s.api.core.v1.ServicePort",
        json!({"port": 80, "targetPort": "http"}),
        expect!["0a0012001850220a080110001a04687474702800"],
    );
    check(
        "io.k8s.api.coordination.v1.LeaseSpec",
        json!({"renewTime": "2026-01-01T00:00:00.000001Z", "leaseTransitions": 0}),
        expect!["22090880f2d6ca0610e8072800"],
    );
    check(
        "io.k8s.apimachinery.pkg.apis.meta.v1.OwnerReference",
        json!({"kind": "a", "controller": false}),
        expect!["2a000a01611a0022003000"],
    );
    check(
        "io.k8s.api.authentication.v1.UserInfo",
        json!({"username": "u", "extra": {"k": ["v", "w"]}}),
        expect!["0a01751200220b0a016b12060a01760a0177"],
    );
    check(
        "io.k8s.api.admissionregistration.v1.NamedRuleWithOperations",
        json!({"resourceNames": ["a"], "operations": ["*"], "apiGroups": [""]}),
        expect!["0a016112070a012a12020a00"],
    );
    check(
        "io.k8s.api.core.v1.ConfigMap",
        json!({"data": {"a": "b"}, "binaryData": {"c": "AA=="}}),
        expect!["0a100a0012001a0022002a0032003800420012060a01611201621a060a0163120100"],
    );
}

#[test]
fn envelope_round_trips() {
    let body = encode_envelope("apps/v1", "Deployment", b"xyz");
    expect!["6b3873000a150a07617070732f7631120a4465706c6f796d656e74120378797a1a002200"]
        .assert_eq(&hex(&body));
    let expected = Envelope {
        api_version: "apps/v1",
        kind: "Deployment",
        raw: b"xyz",
        content_encoding: "",
        content_type: "",
    };
    assert_eq!(decode_envelope(&body), Ok(expected));
    assert_eq!(decode_envelope(b"{}"), Err(ProtoError::Magic));
    expect!["0000000f0a05414444454412060a046b387300"].assert_eq(&hex(&watch_frame("ADDED", b"k8s\0")));
}

#[test]
fn json_schema_round_trips() {
    let schema = json!({
        "items": [{"type": "string"}],
        "additionalProperties": {"items": {"pattern": "x"}},
        "additionalItems": false,
        "dependencies": {"a": ["b"], "c": {"maxLength": 0}},
        "enum": [null, 1],
        "default": {"a": [1.5]},
        "maximum": 0.5,
    });
    let table = kubernetes();
    let id = table.type_by_name("io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSONSchemaProps");
    let id = id.expect("a built-in type");
    let mut normalized = schema.clone();
    crate::normalize(table, id, &mut normalized).expect("a value that fits");
    assert_eq!(normalized, schema);
    assert_eq!(from_protobuf(table, id, &to_protobuf(table, id, &schema)), Ok(schema));
}

#[test]
fn lists_kinds_without_protobuf() {
    let table = kubernetes();
    let without_protobuf: Vec<&str> =
        table.types().filter(|(id, _)| !has_protobuf(table, *id)).map(|(_, ty)| ty.short_name()).collect();
    expect!["Table TableColumnDefinition TableRow TableRowCondition Info"]
        .assert_eq(&without_protobuf.join(" "));
}

#[test]
fn rejects_message_over_max_depth() {
    let table = kubernetes();
    let id = table.type_by_name("io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSONSchemaProps");
    let mut bytes = Vec::new();
    for _ in 0..10_000 {
        let mut writer = Writer::default();
        writer.bytes(28, &bytes);
        bytes = writer.bytes;
    }
    assert_eq!(from_protobuf(table, id.expect("a built-in type"), &bytes), Err(ProtoError::Depth));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn json_round_trips_through_protobuf((id, value) in arbitrary::any_kind()) {
        let table = kubernetes();
        let mut normalized = value;
        let unknown = crate::normalize(table, id, &mut normalized);
        prop_assert_eq!(unknown, Ok(Vec::new()));
        let mut twice = normalized.clone();
        prop_assert_eq!(crate::normalize(table, id, &mut twice), Ok(Vec::new()));
        prop_assert_eq!(&twice, &normalized);
        let bytes = to_protobuf(table, id, &normalized);
        prop_assert_eq!(from_protobuf(table, id, &bytes), Ok(normalized));
    }

    #[test]
    fn malformed_messages_never_panic((id, value) in arbitrary::any_kind(), cut in any::<prop::sample::Index>(), flip in any::<(prop::sample::Index, u8)>()) {
        let table = kubernetes();
        let mut bytes = to_protobuf(table, id, &value);
        bytes.truncate(cut.index(bytes.len() + 1));
        let _ = from_protobuf(table, id, &bytes);
        if !bytes.is_empty() {
            let at = flip.0.index(bytes.len());
            bytes[at] ^= flip.1;
        }
        let _ = from_protobuf(table, id, &bytes);
        let _ = decode_envelope(&bytes);
    }
}
