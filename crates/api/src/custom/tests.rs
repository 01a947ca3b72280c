use expect_test::{Expect, expect};
use serde_json::{Value, json};

use super::*;
use crate::field::Errors;
use crate::json::Json as _;

fn boat() -> Value {
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

fn read(crd: &Value) -> Arc<Definition> {
    Arc::new(Definition::read(crd.to_string().into()).unwrap())
}

fn row() -> &'static Resource {
    let definition = read(&boat());
    RowKey::of(&definition)[0].row(definition)
}

fn object(spec: Value) -> Value {
    json!({"kind": "Boat", "apiVersion": "harbor.example.com/v1", "metadata": {"name": "tern"}, "spec": spec})
}

#[test]
fn a_definition_becomes_rows() {
    let definition = read(&boat());
    let keys = RowKey::of(&definition);
    assert_eq!(keys.iter().map(|key| key.version.as_str()).collect::<Vec<_>>(), ["v1", "v1beta1"]);
    let row = keys[0].row(definition.clone());
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
    let mut errors = Errors::default();
    row().rules.validate_create(&object, &mut errors);
    let lines: Vec<String> = errors.0.iter().map(|e| format!("{}: {}\n", e.path, e.message)).collect();
    expected.assert_eq(&lines.concat());
}

#[test]
fn objects_keep_to_the_schema() {
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
fn transitions_are_judged_and_old_faults_let_pass() {
    let check = |new: Value, old: Value| {
        let mut errors = Errors::default();
        row().rules.validate_update(&object(new), &object(old), &mut errors);
        errors.to_string()
    };
    let old = json!({"length": 3, "crew": 9, "rig": "sloop"});
    assert_eq!(
        check(json!({"length": 3, "crew": 3, "rig": "ketch"}), old.clone()),
        "spec.rig: Forbidden: still a sloop"
    );
    // It was wrong before, and is no worse now.
    assert_eq!(check(old.clone(), old.clone()), "");
    let word = "spec: Invalid value: crew must not exceed length";
    assert_eq!(check(json!({"length": 3, "crew": 8, "rig": "sloop"}), old), word);
}

#[test]
fn status_is_looked_at_alone() {
    let old = object(json!({"length": 0, "crew": 9}));
    let mut new = old.clone();
    new["status"] = json!({"aboard": 10});
    let mut errors = Errors::default();
    row().rules.validate_status(&new, &old, &mut errors);
    // Upstream's base path and the schema's own path are told apart like this.
    assert_eq!(
        errors.to_string(),
        "status.aboard: Invalid value: 10: aboard in body should be less than or equal to 9"
    );
}

#[test]
fn a_form_remembers_no_words() {
    let mut crd = boat();
    let at = "/spec/versions/0/schema/openAPIV3Schema/properties/spec";
    let spec = crd.pointer_mut(at).unwrap();
    spec.set("description", "said to people");
    spec["properties"].set("description", json!({"type": "string", "description": "a field of that name"}));
    let form = read(&crd).form("v1");
    let spec = form.schema.path("properties.spec");
    assert!(!spec.has("description"));
    assert_eq!(spec.path("properties.description"), &json!({"type": "string"}));
}

#[test]
fn scales_are_views() {
    let form = row().custom.unwrap().form();
    let scale = form.scale.as_ref().unwrap();
    let mut tern = object(json!({"length": 9, "crew": 3}));
    let view = scale.view(&tern).unwrap();
    assert_eq!((view.path("spec.replicas"), view.path("status.replicas")), (&json!(3), &json!(0)));
    scale.apply(&mut tern, &json!({"spec": {"replicas": 5}}));
    assert_eq!(tern.path("spec.crew"), &json!(5));
    assert_eq!(scale.view(&object(json!({}))), None);
}

#[test]
fn columns_and_fields() {
    let form = row().custom.unwrap().form();
    let tern = object(json!({"length": 9, "rig": "sloop"}));
    assert_eq!(form.cells(&tern, jiff::Timestamp::UNIX_EPOCH), [json!("tern"), json!(9)]);
    assert_eq!(form.field("spec.rig", &tern).as_deref(), Some("sloop"));
    assert_eq!(form.field("spec.rig", &object(json!({}))).as_deref(), Some(""));
    assert_eq!(form.field("spec.length", &tern), None);
}

#[test]
fn names_are_given_once() {
    let now = "2026-01-01T00:00:00Z";
    let definition = read(&boat());
    let shown = |taken: &Names| {
        let (naming, conditions) = accepted(&definition, taken, now);
        let conditions: Vec<String> = conditions
            .iter()
            .map(|c| {
                format!("{}={} {}: {}", c.text("type"), c.text("status"), c.text("reason"), c.text("message"))
            })
            .collect();
        format!("{:?}\n{}", naming.short_names, conditions.join("\n"))
    };
    let mut taken = Names::default();
    expect![[r#"
        ["bt"]
        NamesAccepted=True NoConflicts: no conflicts found
        Established=True InitialNamesAccepted: the initial names have been accepted"#]]
    .assert_eq(&shown(&taken));
    taken.take(&Naming { plural: "bottles".into(), short_names: vec!["bt".into()], ..Naming::default() });
    expect![[r#"
        []
        NamesAccepted=False ShortNamesConflict: "bt" is already in use
        Established=False NotAccepted: not all names are accepted"#]]
    .assert_eq(&shown(&taken));
}
