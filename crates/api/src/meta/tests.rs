use expect_test::{Expect, expect};
use serde_json::json;

use super::*;

#[track_caller]
fn check(meta: Value, namespaced: bool, rule: NameFormat, expected: Expect) {
    let mut errors = ErrorList::default();
    validate_object_meta(&meta, namespaced, rule, &Path::new("metadata"), &mut errors);
    expected.assert_eq(&lines(&errors));
}

fn lines(errors: &ErrorList) -> String {
    let lines: Vec<String> = errors.0.iter().map(|e| format!("{}: {}", e.path, e.message)).collect();
    lines.join("\n")
}

#[test]
fn validates_new_objects() {
    check(json!({"name": "a.b", "namespace": "n"}), true, NameFormat::Subdomain, expect![""]);
    check(json!({"name": "system:a b"}), false, NameFormat::PathSegment, expect![""]);
    check(
        json!({}),
        true,
        NameFormat::Label,
        expect![[r"
            metadata.name: Required value: name or generateName is required
            metadata.namespace: Required value"]],
    );
    check(
        json!({"name": "a.b", "namespace": "n", "generation": -1}),
        false,
        NameFormat::Label,
        expect![[r#"
            metadata.name: Invalid value: "a.b": must not contain dots
            metadata.namespace: Forbidden: not allowed on this type
            metadata.generation: Invalid value: -1: must be greater than or equal to 0"#]],
    );
    check(
        json!({
            "name": "a", "annotations": {"A/b": "", "example.com/Name": ""}, "finalizers": ["orphan", "foregroundDeletion"],
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u", "controller": true},
                {"apiVersion": "apps/", "kind": "Event", "name": "q", "uid": "", "controller": true},
            ],
            "managedFields": [{"operation": "Other", "fieldsType": "V2", "manager": "a\u{7}"}],
        }),
        false,
        NameFormat::Subdomain,
        expect![[r#"
            metadata.ownerReferences.apiVersion: Invalid value: "apps/": version must not be empty
            metadata.ownerReferences.uid: Invalid value: "": must not be empty
            metadata.ownerReferences: Invalid value: [{"apiVersion":"v1","controller":true,"kind":"Pod","name":"p","uid":"u"},{"apiVersion":"apps/","controller":true,"kind":"Event","name":"q","uid":""}]: Only one reference can have Controller set to true. Found "true" in references for Pod/p and Event/q
            metadata.finalizers: Invalid value: ["orphan","foregroundDeletion"]: finalizer orphan and foregroundDeletion cannot be both set
            metadata.managedFields[0].operation: Invalid value: "Other": must be `Apply` or `Update`
            metadata.managedFields[0].fieldsType: Invalid value: "V2": must be `FieldsV1`
            metadata.managedFields[0].manager: Invalid value: "a\a": invalid character U+0007 (at position 1)"#]],
    );
    check(
        json!({"name": "a", "annotations": {"a": "x".repeat(256 << 10)}}),
        false,
        NameFormat::Subdomain,
        expect!["metadata.annotations: Too long: may not be more than 262144 bytes"],
    );
}

#[test]
fn generate_name_may_end_with_dash() {
    for good in ["a-", "web-1-", "a"] {
        assert!(name_prefix_errors(good, NameFormat::Label).is_empty(), "{good}");
    }
    for bad in ["-", "AB-", "é-", "a bc-"] {
        assert!(!name_prefix_errors(bad, NameFormat::Label).is_empty(), "{bad}");
    }
    assert!(name_prefix_errors("..", NameFormat::PathSegment).is_empty());
}

#[test]
fn validates_updates() {
    let old =
        json!({"name": "a", "uid": "1", "generation": 2, "deletionTimestamp": "t", "finalizers": ["f/a"]});
    let new = json!({"name": "b", "uid": "", "generation": 1, "finalizers": ["f/a", "f/c", "f/b"]});
    let mut errors = ErrorList::default();
    validate_object_meta_update(&new, &old, &Path::new("metadata"), &mut errors);
    expect![[r#"
        metadata.finalizers: Forbidden: no new finalizers can be added if the object is being deleted, found new finalizers []string{"f/b", "f/c"}
        metadata.generation: Invalid value: 1: must not be decremented
        metadata.name: Invalid value: "b": field is immutable
        metadata.uid: Invalid value: "": field is immutable
        metadata.deletionTimestamp: Invalid value: null: field is immutable"#]]
    .assert_eq(&lines(&errors));
}

#[test]
fn validates_selectors() {
    let selector = json!({
        "matchLabels": {"a b": "c!"},
        "matchExpressions": [
            {"key": "a", "operator": "In"},
            {"key": "a", "operator": "Exists", "values": ["x"]},
            {"key": "a", "operator": "Is"},
            {"key": "a", "operator": "NotIn", "values": ["-"]},
        ],
    });
    let mut errors = ErrorList::default();
    validate_label_selector(&selector, &Path::new("selector"), SelectorOptions::default(), &mut errors);
    let truncated: Vec<String> =
        lines(&errors).lines().map(|line| line.chars().take(105).collect()).collect();
    expect![[r#"
        selector.matchLabels: Invalid value: "a b": name part must consist of alphanumeric characters, '-', '_' o
        selector.matchLabels: Invalid value: "c!": a valid label must be an empty string or consist of alphanumer
        selector.matchExpressions[0].values: Required value: must be specified when `operator` is 'In' or 'NotIn'
        selector.matchExpressions[1].values: Forbidden: may not be specified when `operator` is 'Exists' or 'Does
        selector.matchExpressions[2].operator: Invalid value: "Is": not a valid selector operator
        selector.matchExpressions[3].values[0]: Invalid value: "-": a valid label must be an empty string or cons"#]]
    .assert_eq(&truncated.join("\n"));
    assert!(selector_has_invalid_value(&selector));
}

#[test]
fn absent_and_empty_values_are_equal() {
    for (a, b, expected) in [
        (json!(null), json!([]), true),
        (json!({"a": []}), json!({}), true),
        (json!({"a": 1}), json!({"a": 1, "b": {}}), true),
        (json!({"a": 1}), json!({"b": 1}), false),
        (json!([1]), json!([1, 2]), false),
        (json!(""), json!(null), false),
    ] {
        assert_eq!(semantic_equal(&a, &b), expected, "{a} and {b}");
        assert_eq!(semantic_equal(&b, &a), expected, "{b} and {a}");
    }
}

#[test]
fn validates_conditions() {
    let list = json!([
        {"type": "A", "status": "True", "reason": "Ok", "lastTransitionTime": "t"},
        {"type": "A", "status": "Yes", "observedGeneration": -1},
    ]);
    let mut errors = ErrorList::default();
    validate_conditions(&list, &Path::new("c"), &mut errors);
    expect![[r#"
        c[1].type: Duplicate value: "A"
        c[1].status: Unsupported value: "Yes": supported values: "False", "True", "Unknown"
        c[1].observedGeneration: Invalid value: -1: must be greater than or equal to zero
        c[1].lastTransitionTime: Required value
        c[1].reason: Required value"#]]
    .assert_eq(&lines(&errors));
}

#[test]
fn long_lists_validation_is_fast() {
    let controller = json!({"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u", "controller": true});
    let meta = json!({
        "name": "a", "ownerReferences": vec![controller; 10_000],
        "managedFields": [{"operation": "Apply", "manager": "\u{7}".repeat(100_000)}],
    });
    let mut errors = ErrorList::default();
    validate_object_meta(&meta, false, NameFormat::Subdomain, &Path::new("metadata"), &mut errors);
    assert_eq!(errors.0.len(), MAX_REPORTED_CONTROLLERS + 1);
    let finalizers: Vec<String> = (0..100_000).map(|i| format!("example.com/{i}")).collect();
    let old = json!({"deletionTimestamp": "t", "finalizers": finalizers[1..]});
    let new = json!({"deletionTimestamp": "t", "finalizers": finalizers});
    let mut errors = ErrorList::default();
    validate_object_meta_update(&new, &old, &Path::new("metadata"), &mut errors);
    assert!(lines(&errors).ends_with(r#"found new finalizers []string{"example.com/0"}"#));
}
