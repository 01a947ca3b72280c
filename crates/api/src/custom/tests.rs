use expect_test::{Expect, expect};
use serde_json::{Value, json};

use super::*;
use crate::field::ErrorList;
use crate::json::JsonExt as _;

fn crd() -> Value {
    json!({
        "kind": "CustomResourceDefinition", "apiVersion": "apiextensions.k8s.io/v1",
        "metadata": {"name": "boats.harbor.example.com", "uid": "u"},
        "spec": {
            "group": "harbor.example.com", "scope": "Namespaced",
            "names": {"plural": "boats", "singular": "boat", "kind": "Boat", "listKind": "BoatList", "shortNames": ["bt"]},
            "versions": [{
                "name": "v1", "served": true, "storage": true,
                "subresources": {"status": {}, "scale": {"specReplicasPath": ".spec.crew", "statusReplicasPath": ".status.aboard"}},
                "additionalPrinterColumns": [{"name": "Length", "type": "integer", "jsonPath": ".spec.length"}],
                "selectableFields": [{"jsonPath": ".spec.rig"}],
                "schema": {"openAPIV3Schema": {"type": "object", "required": ["spec"], "properties": {
                    "spec": {"type": "object", "required": ["length"], "x-kubernetes-validations": [
                        {"rule": "self.crew <= self.length", "message": "crew must not exceed length"},
                        {"rule": "!has(oldSelf.rig) || self.rig == oldSelf.rig", "messageExpression": "'still a ' + oldSelf.rig", "fieldPath": ".rig", "reason": "FieldValueForbidden"},
                    ], "properties": {
                        "length": {"type": "integer", "minimum": 1},
                        "crew": {"type": "integer", "default": 2},
                        "rig": {"type": "string", "enum": ["sloop", "ketch"]},
                        "tags": {"type": "array", "x-kubernetes-list-type": "set", "items": {"type": "string"}},
                        "part": {"type": "object", "x-kubernetes-embedded-resource": true, "x-kubernetes-preserve-unknown-fields": true},
                    }},
                    "status": {"type": "object", "properties": {"aboard": {"type": "integer", "maximum": 9}}},
                }}},
            }, {"name": "v1beta1", "served": true, "storage": false, "deprecated": true}],
        },
        "status": {"acceptedNames": {"plural": "boats", "singular": "boat", "kind": "Boat", "listKind": "BoatList"}},
    })
}

fn parse(crd: &Value) -> Arc<Definition> {
    Arc::new(Definition::parse(crd.to_string().into()).unwrap())
}

fn resource() -> &'static Resource {
    let definition = parse(&crd());
    CustomResourceKey::from_definition(&definition)[0].to_resource(definition)
}

fn object(spec: Value) -> Value {
    json!({"kind": "Boat", "apiVersion": "harbor.example.com/v1", "metadata": {"name": "tern"}, "spec": spec})
}

#[test]
fn definition_creates_resource_per_version() {
    let definition = parse(&crd());
    let keys = CustomResourceKey::from_definition(&definition);
    assert_eq!(keys.iter().map(|key| key.version.as_str()).collect::<Vec<_>>(), ["v1", "v1beta1"]);
    let row = keys[0].to_resource(definition.clone());
    assert_eq!(
        (row.kind, row.plural, row.singular(), row.list_kind()),
        ("Boat", "boats", "boat".into(), "BoatList".into())
    );
    assert!(row.has_status() && row.subresource("scale").is_some());
    assert_eq!(definition.storage_version(), "v1");
    let beta = definition.version("v1beta1").unwrap();
    let word = "harbor.example.com/v1beta1 Boat is deprecated; use harbor.example.com/v1 Boat";
    assert_eq!(beta.deprecation.as_deref(), Some(word));
}

#[track_caller]
fn check(object: Value, expected: Expect) {
    let mut errors = ErrorList::default();
    resource().strategy.validate_create(&object, &mut errors);
    let lines: Vec<String> = errors.0.iter().map(|e| format!("{}: {}\n", e.path, e.message)).collect();
    expected.assert_eq(&lines.concat());
}

#[test]
fn validates_objects_with_schema() {
    check(object(json!({"length": 9, "crew": 2})), expect![""]);
    check(
        object(json!({"length": 3, "crew": 9})),
        expect![[r#"
            spec: Invalid value: crew must not exceed length
        "#]],
    );
    check(
        object(json!({"length": 3})),
        expect![[r#"
            spec: Invalid value: "object": no such key: crew evaluating rule: crew must not exceed length
        "#]],
    );
    check(
        object(json!({"length": 0, "crew": 0})),
        expect![[r#"
            spec.length: Invalid value: 0: spec.length in body should be greater than or equal to 1
        "#]],
    );
    check(
        object(json!({"rig": "raft", "crew": -1, "tags": ["a", "a"], "part": {"kind": "K"}})),
        expect![[r#"
            spec.rig: Unsupported value: "raft": supported values: "sloop", "ketch"
            spec.length: Required value
            .spec.crew: Invalid value: -1: should be a non-negative integer
            spec.part.apiVersion: Required value
            spec.tags[1]: Duplicate value: "a"
            <nil>: Invalid value: null: some validation rules were not checked because the object was invalid; correct the existing errors to complete validation
        "#]],
    );
    let mut other = object(json!({"length": 1}));
    other["kind"] = json!("Ship");
    check(
        other,
        expect![[r#"
            kind: Invalid value: "Ship": must be Boat
        "#]],
    );
}

#[test]
fn validates_transition_rules_and_allows_unchanged_errors() {
    let check = |new: Value, old: Value| {
        let mut errors = ErrorList::default();
        resource().strategy.validate_update(&object(new), &object(old), &mut errors);
        errors.to_string()
    };
    let old = json!({"length": 3, "crew": 9, "rig": "sloop"});
    assert_eq!(
        check(json!({"length": 3, "crew": 3, "rig": "ketch"}), old.clone()),
        "spec.rig: Forbidden: still a sloop"
    );
    // Ratcheting: an existing violation is allowed if the value has not changed.
    assert_eq!(check(old.clone(), old.clone()), "");
    let word = "spec: Invalid value: crew must not exceed length";
    assert_eq!(check(json!({"length": 3, "crew": 8, "rig": "sloop"}), old), word);
}

#[test]
fn status_update_validates_status_only() {
    let old = object(json!({"length": 0, "crew": 9}));
    let mut new = old.clone();
    new["status"] = json!({"aboard": 10});
    let mut errors = ErrorList::default();
    resource().strategy.validate_status_update(&new, &old, &mut errors);
    // Upstream's message contains the field path twice: as the path of the error and in the schema
    // validator's text.
    assert_eq!(
        errors.to_string(),
        "status.aboard: Invalid value: 10: aboard in body should be less than or equal to 9"
    );
}

#[test]
fn version_schema_drops_descriptions() {
    let mut crd = crd();
    let at = "/spec/versions/0/schema/openAPIV3Schema/properties/spec";
    let spec = crd.pointer_mut(at).unwrap();
    spec.set("description", "said to people");
    spec["properties"].set("description", json!({"type": "string", "description": "a field of that name"}));
    let version_schema = parse(&crd).version_schema("v1");
    let spec = version_schema.schema.path("properties.spec");
    assert!(!spec.has("description"));
    assert_eq!(spec.path("properties.description"), &json!({"type": "string"}));
}

#[test]
fn scale_subresource_maps_fields() {
    let version_schema = resource().custom.unwrap().version_schema();
    let scale = version_schema.scale.as_ref().unwrap();
    let mut instance = object(json!({"length": 9, "crew": 3}));
    let view = scale.to_scale(&instance).unwrap();
    assert_eq!((view.path("spec.replicas"), view.path("status.replicas")), (&json!(3), &json!(0)));
    scale.apply(&mut instance, &json!({"spec": {"replicas": 5}}));
    assert_eq!(instance.path("spec.crew"), &json!(5));
    assert_eq!(scale.to_scale(&object(json!({}))), None);
}

#[test]
fn returns_printer_columns_and_selectable_fields() {
    let version_schema = resource().custom.unwrap().version_schema();
    let instance = object(json!({"length": 9, "rig": "sloop"}));
    assert_eq!(version_schema.cells(&instance, jiff::Timestamp::UNIX_EPOCH), [json!("tern"), json!(9)]);
    assert_eq!(version_schema.field_value("spec.rig", &instance).as_deref(), Some("sloop"));
    assert_eq!(version_schema.field_value("spec.rig", &object(json!({}))).as_deref(), Some(""));
    assert_eq!(version_schema.field_value("spec.length", &instance), None);
}

#[test]
fn rejects_names_in_use() {
    let now = "2026-01-01T00:00:00Z";
    let definition = parse(&crd());
    let rendered = |used: &UsedNames| {
        let (naming, conditions) = accept_names(&definition, used, now);
        let conditions: Vec<String> = conditions
            .iter()
            .map(|c| {
                format!("{}={} {}: {}", c.text("type"), c.text("status"), c.text("reason"), c.text("message"))
            })
            .collect();
        format!("{:?}\n{}", naming.short_names, conditions.join("\n"))
    };
    let mut used = UsedNames::default();
    expect![[r#"
        ["bt"]
        NamesAccepted=True NoConflicts: no conflicts found
        Established=True InitialNamesAccepted: the initial names have been accepted"#]]
    .assert_eq(&rendered(&used));
    used.add(&CrdNames { plural: "bottles".into(), short_names: vec!["bt".into()], ..CrdNames::default() });
    expect![[r#"
        []
        NamesAccepted=False ShortNamesConflict: "bt" is already in use
        Established=False NotAccepted: not all names are accepted"#]]
    .assert_eq(&rendered(&used));
}
