use expect_test::{Expect, expect};
use serde_json::{Value, json};

use super::{check, check_status, check_update, check_valid, strategy, with_value};

const CRD: &str = "CustomResourceDefinition";

fn crd() -> Value {
    json!({
        "metadata": {"name": "boats.harbor.example.com"},
        "spec": {
            "group": "harbor.example.com",
            "scope": "Namespaced",
            "names": {"plural": "boats", "singular": "boat", "kind": "Boat", "listKind": "BoatList", "shortNames": ["bt"]},
            "conversion": {"strategy": "None"},
            "versions": [{
                "name": "v1",
                "served": true,
                "storage": true,
                "subresources": {"status": {}, "scale": {"specReplicasPath": ".spec.crew", "statusReplicasPath": ".status.aboard"}},
                "additionalPrinterColumns": [{"name": "Length", "type": "integer", "jsonPath": ".spec.length"}],
                "selectableFields": [{"jsonPath": ".spec.rig"}],
                "schema": {"openAPIV3Schema": {
                    "type": "object",
                    "properties": {
                        "metadata": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 10}}},
                        "spec": {
                            "type": "object",
                            "properties": {
                                "length": {"type": "integer", "minimum": 1},
                                "crew": {"type": "integer", "default": 2},
                                "rig": {"type": "string", "enum": ["sloop", "ketch"]},
                                "any": {"x-kubernetes-preserve-unknown-fields": true},
                                "port": {"x-kubernetes-int-or-string": true, "anyOf": [{"type": "integer"}, {"type": "string"}]},
                            },
                            "x-kubernetes-validations": [{"rule": "self.crew <= self.length", "fieldPath": ".crew"}],
                        },
                        "status": {"type": "object", "properties": {"aboard": {"type": "integer"}}},
                    },
                }},
            }],
        },
    })
}

/// Checks a CRD with this schema of `spec`.
#[track_caller]
fn check_schema(schema: Value, expected: Expect) {
    let at = "/spec/versions/0/schema/openAPIV3Schema/properties/spec";
    let obj = with_value(with_value(crd(), "/spec/versions/0/selectableFields", Value::Null), at, schema);
    check(CRD, obj, expected);
}

#[test]
fn validates_complete_definition() {
    check_valid(CRD, crd());
    let mut obj = crd();
    strategy(CRD).prepare_for_create(&mut obj);
    assert_eq!(obj["status"], json!({"storedVersions": ["v1"]}));
}

#[test]
fn validates_names_scope_and_group() {
    check(
        CRD,
        json!({"metadata": {"name": "x"}, "spec": {}}),
        expect![[r#"
        metadata.name: Invalid value: "x": must be spec.names.plural+"."+spec.group
        spec.group: Required value
        spec.scope: Required value
        spec.versions: Invalid value: null: must have exactly one version marked as storage version
        spec.names.plural: Required value
        spec.names.singular: Required value
        spec.names.kind: Required value
        spec.names.listKind: Required value
        status.storedVersions: Invalid value: null: must have at least one stored version
    "#]],
    );
    let names = json!({"plural": "Boats", "singular": "bo_at", "kind": "Bo-at.", "listKind": "Bo-at.", "shortNames": ["B"], "categories": ["c!"]});
    let obj = with_value(with_value(crd(), "/spec/names", names), "/spec/group", json!("harbor"));
    check(
        CRD,
        with_value(obj, "/spec/scope", json!("World")),
        expect![[r#"
        metadata.name: Invalid value: "boats.harbor.example.com": must be spec.names.plural+"."+spec.group
        spec.group: Invalid value: "harbor": should be a domain with at least one dot
        spec.scope: Unsupported value: "World": supported values: "Cluster", "Namespaced"
        spec.names.plural: Invalid value: "Boats": a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is '[a-z]([-a-z0-9]*[a-z0-9])?')
        spec.names.singular: Invalid value: "bo_at": a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is '[a-z]([-a-z0-9]*[a-z0-9])?')
        spec.names.kind: Invalid value: "Bo-at.": may have mixed case, but should otherwise match: a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is '[a-z]([-a-z0-9]*[a-z0-9])?')
        spec.names.listKind: Invalid value: "Bo-at.": may have mixed case, but should otherwise match: a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is '[a-z]([-a-z0-9]*[a-z0-9])?')
        spec.names.shortNames[0]: Invalid value: "B": a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is '[a-z]([-a-z0-9]*[a-z0-9])?')
        spec.names.listKind: Invalid value: "Bo-at.": kind and listKind may not be the same
        spec.names.categories[0]: Invalid value: "c!": a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is '[a-z]([-a-z0-9]*[a-z0-9])?')
    "#]],
    );
}

#[test]
fn kubernetes_groups_require_approval() {
    let obj = with_value(crd(), "/spec/group", json!("boats.k8s.io"));
    let obj = with_value(obj, "/metadata/name", json!("boats.boats.k8s.io"));
    check(
        CRD,
        obj.clone(),
        expect![[r#"
        metadata.annotations[api-approved.kubernetes.io]: Required value: protected groups must have approval annotation "api-approved.kubernetes.io", see https://github.com/kubernetes/enhancements/pull/1111
    "#]],
    );
    let with_annotation = |annotation: &str| {
        with_value(obj.clone(), "/metadata/annotations", json!({"api-approved.kubernetes.io": annotation}))
    };
    check(
        CRD,
        with_annotation("yes"),
        expect![[r#"
        metadata.annotations[api-approved.kubernetes.io]: Invalid value: "yes": protected groups must have approval annotation "api-approved.kubernetes.io" with either a URL or a reason starting with "unapproved", see https://github.com/kubernetes/enhancements/pull/1111
    "#]],
    );
    check_valid(CRD, with_annotation("https://github.com/kubernetes/kubernetes/pull/78458"));
    check_valid(CRD, with_annotation("unapproved, an experiment"));
    check_update(CRD, with_annotation("yes"), with_annotation("yes, really"), expect![[r#""#]]);
}

#[test]
fn validates_versions() {
    check(
        CRD,
        with_value(crd(), "/spec/versions/0/storage", json!(false)),
        expect![[r#"
        spec.versions: Invalid value: [{"Name":"v1","Served":true,"Storage":false,"Deprecated":false,"DeprecationWarning":null,"Schema":null,"Subresources":null,"AdditionalPrinterColumns":null,"SelectableFields":null}]: must have exactly one version marked as storage version
        status.storedVersions: Invalid value: null: must have at least one stored version
    "#]],
    );
    let mut obj = crd();
    let mut second = obj["spec"]["versions"][0].clone();
    second["deprecated"] = json!(false);
    second["deprecationWarning"] = json!("old");
    second["subresources"]["scale"]["specReplicasPath"] = json!("spec.crew");
    second["additionalPrinterColumns"] = json!([{"type": "color", "format": "hex", "jsonPath": "x"}]);
    obj["spec"]["versions"].as_array_mut().expect("a list").push(second);
    check(
        CRD,
        obj,
        expect![[r#"
        spec.versions[1].deprecationWarning: Invalid value: "old": can only be set for deprecated versions
        spec.versions[1].subresources.scale.specReplicasPath: Invalid value: "spec.crew": must be a simple json path starting with .
        spec.versions[1].additionalPrinterColumns[0].name: Required value
        spec.versions[1].additionalPrinterColumns[0].type: Invalid value: "color": must be one of boolean,date,integer,number,string
        spec.versions[1].additionalPrinterColumns[0].format: Invalid value: "hex": must be one of byte,date,date-time,double,float,int32,int64,password
        spec.versions[1].additionalPrinterColumns[0].JSONPath: Invalid value: "x": must be a simple json path starting with .
        spec.versions: Invalid value: [{"Name":"v1","Served":true,"Storage":true,"Deprecated":false,"DeprecationWarning":null,"Schema":null,"Subresources":{"Status":{},"Scale":{"SpecReplicasPath":".spec.crew","StatusReplicasPath":".status.aboard","LabelSelectorPath":null}},"AdditionalPrinterColumns":[{"Name":"Length","Type":"integer","Format":"","Description":"","Priority":0,"JSONPath":".spec.length"}],"SelectableFields":null},{"Name":"v1","Served":true,"Storage":true,"Deprecated":false,"DeprecationWarning":"old","Schema":null,"Subresources":{"Status":{},"Scale":{"SpecReplicasPath":"spec.crew","StatusReplicasPath":".status.aboard","LabelSelectorPath":null}},"AdditionalPrinterColumns":[{"Name":"","Type":"color","Format":"hex","Description":"","Priority":0,"JSONPath":"x"}],"SelectableFields":null}]: must contain unique version names
        spec.versions: Invalid value: [{"Name":"v1","Served":true,"Storage":true,"Deprecated":false,"DeprecationWarning":null,"Schema":null,"Subresources":{"Status":{},"Scale":{"SpecReplicasPath":".spec.crew","StatusReplicasPath":".status.aboard","LabelSelectorPath":null}},"AdditionalPrinterColumns":[{"Name":"Length","Type":"integer","Format":"","Description":"","Priority":0,"JSONPath":".spec.length"}],"SelectableFields":null},{"Name":"v1","Served":true,"Storage":true,"Deprecated":false,"DeprecationWarning":"old","Schema":null,"Subresources":{"Status":{},"Scale":{"SpecReplicasPath":"spec.crew","StatusReplicasPath":".status.aboard","LabelSelectorPath":null}},"AdditionalPrinterColumns":[{"Name":"","Type":"color","Format":"hex","Description":"","Priority":0,"JSONPath":"x"}],"SelectableFields":null}]: must have exactly one version marked as storage version
    "#]],
    );
    check(
        CRD,
        with_value(crd(), "/spec/versions/0/name", json!("V_1")),
        expect![[r#"
        spec.versions[0].name: Invalid value: "V_1": a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is '[a-z]([-a-z0-9]*[a-z0-9])?')
        spec.version: Invalid value: "V_1": a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is '[a-z]([-a-z0-9]*[a-z0-9])?')
    "#]],
    );
    check(
        CRD,
        with_value(crd(), "/spec/versions/0/schema", Value::Null),
        expect![[r#"
        spec.versions[0].schema.openAPIV3Schema: Required value
    "#]],
    );
    let with_warning = with_value(crd(), "/spec/versions/0/deprecationWarning", json!("a\u{7}"));
    check(
        CRD,
        with_value(with_warning, "/spec/versions/0/deprecated", json!(true)),
        expect![[r#"
        spec.versions[0].deprecationWarning: Invalid value: "a\a": must only contain printable UTF-8 characters; non-printable character found at index 1
    "#]],
    );
}

#[test]
fn validates_selectable_fields() {
    let fields = json!([
        {}, {"jsonPath": ".spec.rig"}, {"jsonPath": ".spec.rig"}, {"jsonPath": ".spec"}, {"jsonPath": ".spec.no"},
        {"jsonPath": "spec.rig"}, {"jsonPath": ".spec['rig']"}, {"jsonPath": ".metadata.name"}, {"jsonPath": "."},
    ]);
    check(
        CRD,
        with_value(crd(), "/spec/versions/0/selectableFields", fields),
        expect![[r#"
        spec.selectableFields[0].jsonPath: Required value
        spec.selectableFields[2].jsonPath: Duplicate value: ".spec.rig"
        spec.selectableFields[3].jsonPath: Invalid value: ".spec": must point to a field of type string, boolean or integer. Enum string fields and strings with formats are allowed.
        spec.selectableFields[4].jsonPath: Invalid value: ".spec.no": is an invalid path: does not refer to a valid field
        spec.selectableFields[5].jsonPath: Invalid value: "spec.rig": is an invalid path: expected [ or . but got: spec
        spec.selectableFields[6].jsonPath: Invalid value: ".spec['rig']": is an invalid path: array notation is not allowed
        spec.selectableFields[7].jsonPath: Invalid value: ".metadata.name": must not point to fields in metadata
        spec.selectableFields[8].jsonPath: Invalid value: ".": is an invalid path: unexpected end of JSON path
    "#]],
    );
}

#[test]
fn rejects_non_structural_schemas() {
    check_schema(
        json!({"properties": {"a": {}, "b": {"type": "array"}, "c": {"type": "array", "items": {}}}}),
        expect![[r#"
        spec.validation.openAPIV3Schema.properties[spec].properties[a].type: Required value: must not be empty for specified object fields
        spec.validation.openAPIV3Schema.properties[spec].properties[b].items: Required value: must be specified
        spec.validation.openAPIV3Schema.properties[spec].properties[c].items.type: Required value: must not be empty for specified array items
        spec.validation.openAPIV3Schema.properties[spec].type: Required value: must not be empty for specified object fields
    "#]],
    );
    check_schema(
        json!({"type": "object", "anyOf": [{"type": "object", "description": "x", "properties": {"a": {"nullable": true}}}], "not": {"default": 1, "properties": {"metadata": {}}}}),
        expect![[r#"
        spec.validation.openAPIV3Schema.properties[spec].anyOf[0].description: Forbidden: must be empty to be structural
        spec.validation.openAPIV3Schema.properties[spec].anyOf[0].properties[a].nullable: Forbidden: must be false to be structural
        spec.validation.openAPIV3Schema.properties[spec].anyOf[0].type: Forbidden: must be empty to be structural
        spec.validation.openAPIV3Schema.properties[spec].not.default: Forbidden: must be undefined to be structural
        spec.validation.openAPIV3Schema.properties[spec].not.properties[metadata]: Forbidden: must not be specified in a nested context
    "#]],
    );
    check_schema(
        json!({"type": "object", "x-kubernetes-embedded-resource": true, "additionalProperties": true}),
        expect![[r#"
        spec.validation.openAPIV3Schema.properties[spec].additionalProperties: Forbidden: must not be used if x-kubernetes-embedded-resource is set
        spec.validation.openAPIV3Schema.properties[spec].properties: Required value: must not be empty if x-kubernetes-embedded-resource is true without x-kubernetes-preserve-unknown-fields
    "#]],
    );
    check_schema(
        json!({"x-kubernetes-int-or-string": true, "x-kubernetes-preserve-unknown-fields": true}),
        expect![[r#"
        spec.validation.openAPIV3Schema.properties[spec].x-kubernetes-preserve-unknown-fields: Invalid value: true: must be false if x-kubernetes-int-or-string is true
    "#]],
    );
    let root = |schema: Value| {
        with_value(
            with_value(crd(), "/spec/versions/0/selectableFields", Value::Null),
            "/spec/versions/0/schema/openAPIV3Schema",
            schema,
        )
    };
    let root = |schema: Value| with_value(root(schema), "/spec/versions/0/subresources", Value::Null);
    check(
        CRD,
        root(json!({})),
        expect![[r#"
        spec.validation.openAPIV3Schema.type: Required value: must not be empty at the root
    "#]],
    );
    check(
        CRD,
        root(json!({"type": "string", "nullable": true, "additionalProperties": {"type": "string"}})),
        expect![[r#"
        spec.validation.openAPIV3Schema.nullable: Forbidden: nullable cannot be true at the root
        spec.validation.openAPIV3Schema.additionalProperties: Forbidden: must not be used at the root
        spec.validation.openAPIV3Schema.type: Invalid value: "string": must be object at the root
    "#]],
    );
    check(
        CRD,
        root(json!({"type": "object", "$schema": "x"})),
        expect![[r#"
        spec.validation.openAPIV3Schema: Invalid value: "": OpenAPIV3Schema 'schema' is not supported
    "#]],
    );
    let metadata = json!({"type": "object", "description": "mine", "default": {}, "properties": {"labels": {"type": "object", "additionalProperties": {"type": "string", "default": "x"}}}});
    check(
        CRD,
        root(
            json!({"type": "object", "properties": {"metadata": metadata, "kind": {"type": "integer"}}, "anyOf": [{"required": ["a"], "properties": {"a": {"minimum": 1}}}]}),
        ),
        expect![[r#"
        spec.validation.openAPIV3Schema.properties[a]: Required value: because it is defined in spec.validation.openAPIV3Schema.anyOf[0].properties[a]
        spec.validation.openAPIV3Schema.properties[kind].type: Invalid value: "integer": must be string
        spec.validation.openAPIV3Schema.properties[metadata]: Forbidden: must not specify anything other than name and generateName, but metadata is implicitly specified
        spec.validation.openAPIV3Schema.properties[metadata].default: Forbidden: must not be set in top-level metadata
        spec.validation.openAPIV3Schema.properties[metadata].properties[labels].additionalProperties.default: Forbidden: must not be set inside additionalProperties applying to object metadata
    "#]],
    );
}

#[test]
fn rejects_unsupported_schema_fields() {
    check_schema(
        json!({
            "type": "object",
            "id": "x", "$ref": "#/y", "definitions": {"a": {"type": "string"}}, "dependencies": {}, "additionalItems": false,
            "patternProperties": {"a": {"type": "null"}}, "uniqueItems": true,
            "additionalProperties": {"type": "text"}, "properties": {"a": {"type": "null"}, "b": {"type": "array", "items": [{"type": "string"}]}},
            "x-kubernetes-preserve-unknown-fields": false,
        }),
        expect![[r#"
            spec.validation.openAPIV3Schema.properties[spec].id: Forbidden: id is not supported
            spec.validation.openAPIV3Schema.properties[spec].additionalItems: Forbidden: additionalItems is not supported
            spec.validation.openAPIV3Schema.properties[spec].patternProperties: Forbidden: patternProperties is not supported
            spec.validation.openAPIV3Schema.properties[spec].definitions: Forbidden: definitions is not supported
            spec.validation.openAPIV3Schema.properties[spec].dependencies: Forbidden: dependencies is not supported
            spec.validation.openAPIV3Schema.properties[spec].$ref: Forbidden: $ref is not supported
            spec.validation.openAPIV3Schema.properties[spec].uniqueItems: Forbidden: uniqueItems cannot be set to true since the runtime complexity becomes quadratic
            spec.validation.openAPIV3Schema.properties[spec].additionalProperties: Forbidden: additionalProperties and properties are mutual exclusive
            spec.validation.openAPIV3Schema.properties[spec].additionalProperties.type: Unsupported value: "text": supported values: "array", "boolean", "integer", "number", "object", "string"
            spec.validation.openAPIV3Schema.properties[spec].properties[a].type: Unsupported value: "null": supported values: "array", "boolean", "integer", "number", "object", "string"
            spec.validation.openAPIV3Schema.properties[spec].properties[a].type: Forbidden: type cannot be set to null, use nullable as an alternative
            spec.validation.openAPIV3Schema.properties[spec].properties[b].items: Forbidden: items must be a schema object and not an array
            spec.validation.openAPIV3Schema.properties[spec].x-kubernetes-preserve-unknown-fields: Invalid value: false: must be true or undefined
        "#]],
    );
}

#[test]
fn validates_list_and_map_types() {
    check_schema(
        json!({"type": "string", "x-kubernetes-map-type": "loose", "x-kubernetes-list-type": "bag", "x-kubernetes-list-map-keys": ["a"]}),
        expect![[r#"
        spec.validation.openAPIV3Schema.properties[spec].type: Invalid value: "string": must be object if x-kubernetes-map-type is specified
        spec.validation.openAPIV3Schema.properties[spec].x-kubernetes-map-type: Unsupported value: "loose": supported values: "atomic", "granular"
        spec.validation.openAPIV3Schema.properties[spec].type: Invalid value: "string": must be array if x-kubernetes-list-type is specified
        spec.validation.openAPIV3Schema.properties[spec].x-kubernetes-list-type: Unsupported value: "bag": supported values: "atomic", "set", "map"
        spec.validation.openAPIV3Schema.properties[spec].x-kubernetes-list-type: Invalid value: "bag": must be map if x-kubernetes-list-map-keys is non-empty
    "#]],
    );
    check_schema(
        json!({"type": "object", "properties": {
            "set": {"type": "array", "x-kubernetes-list-type": "set", "items": {"type": "object", "nullable": true}},
            "map": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["a", "b", "b", "c"], "items": {
                "type": "object", "properties": {"a": {"type": "object"}, "b": {"type": "string", "nullable": true}}, "required": ["a"],
            }},
            "none": {"type": "array", "x-kubernetes-list-type": "map", "items": {"type": "string"}},
        }}),
        expect![[r#"
        spec.validation.openAPIV3Schema.properties[spec].properties[map].items.properties[a].type: Invalid value: "object": must be a scalar type if parent array's x-kubernetes-list-type is map
        spec.validation.openAPIV3Schema.properties[spec].properties[map].x-kubernetes-list-map-keys: Invalid value: ["a","b","b","c"]: must not contain duplicate entries
        spec.validation.openAPIV3Schema.properties[spec].properties[map].x-kubernetes-list-map-keys: Invalid value: ["a","b","b","c"]: entries must all be names of item properties
        spec.validation.openAPIV3Schema.properties[spec].properties[map].items.properties[b].default: Required value: this property is in x-kubernetes-list-map-keys, so it must have a default or be a required property
        spec.validation.openAPIV3Schema.properties[spec].properties[map].items.properties[b].nullable: Forbidden: this property is in x-kubernetes-list-map-keys, so it cannot be nullable
        spec.validation.openAPIV3Schema.properties[spec].properties[map].items.properties[b].default: Required value: this property is in x-kubernetes-list-map-keys, so it must have a default or be a required property
        spec.validation.openAPIV3Schema.properties[spec].properties[map].items.properties[b].nullable: Forbidden: this property is in x-kubernetes-list-map-keys, so it cannot be nullable
        spec.validation.openAPIV3Schema.properties[spec].properties[none].x-kubernetes-list-map-keys: Required value: must not be empty if x-kubernetes-list-type is map
        spec.validation.openAPIV3Schema.properties[spec].properties[none].items.type: Invalid value: "string": must be object if parent array's x-kubernetes-list-type is map
        spec.validation.openAPIV3Schema.properties[spec].properties[set].items.x-kubernetes-map-type: Invalid value: null: must be atomic as item of a list with x-kubernetes-list-type=set
        spec.validation.openAPIV3Schema.properties[spec].properties[set].items.nullable: Forbidden: cannot be nullable when x-kubernetes-list-type is set
    "#]],
    );
}

#[test]
fn validates_rule_fields() {
    check_schema(
        json!({"type": "object", "properties": {"m": {"type": "object", "additionalProperties": {"type": "string"}}}, "x-kubernetes-validations": [
            {"rule": " "},
            {"rule": "true", "message": " ", "messageExpression": " ", "reason": "Whim", "fieldPath": " "},
            {"rule": "true", "message": "a\nb", "fieldPath": ".nope"},
            {"rule": "true &&\ntrue", "fieldPath": ".m['a.b']"},
            {"rule": "true", "fieldPath": ".m[a]"},
            {"rule": "true", "fieldPath": ".m['a"},
        ]}),
        expect![[r#"
            spec.validation.openAPIV3Schema.properties[spec].x-kubernetes-validations[0].rule: Required value: rule is not specified
            spec.validation.openAPIV3Schema.properties[spec].x-kubernetes-validations[1].message: Invalid value: " ": must be non-empty if specified
            spec.validation.openAPIV3Schema.properties[spec].x-kubernetes-validations[1].messageExpression: Required value: messageExpression must be non-empty if specified
            spec.validation.openAPIV3Schema.properties[spec].x-kubernetes-validations[1].reason: Unsupported value: "Whim": supported values: "FieldValueDuplicate", "FieldValueForbidden", "FieldValueInvalid", "FieldValueRequired"
            spec.validation.openAPIV3Schema.properties[spec].x-kubernetes-validations[1].fieldPath: Invalid value: " ": must be non-empty if specified
            spec.validation.openAPIV3Schema.properties[spec].x-kubernetes-validations[1].fieldPath: Invalid value: " ": must be a valid path
            spec.validation.openAPIV3Schema.properties[spec].x-kubernetes-validations[2].message: Invalid value: "a\nb": must not contain line breaks
            spec.validation.openAPIV3Schema.properties[spec].x-kubernetes-validations[2].fieldPath: Invalid value: ".nope": must be a valid path
            spec.validation.openAPIV3Schema.properties[spec].x-kubernetes-validations[3].message: Required value: message must be specified if rule contains line breaks
            spec.validation.openAPIV3Schema.properties[spec].x-kubernetes-validations[4].fieldPath: Invalid value: ".m[a]": must be a valid path
            spec.validation.openAPIV3Schema.properties[spec].x-kubernetes-validations[5].fieldPath: Invalid value: ".m['a": must be a valid path
        "#]],
    );
}

#[test]
fn status_subresource_limits_root_schema() {
    let obj = with_value(crd(), "/spec/versions/0/schema/openAPIV3Schema/allOf", json!([]));
    check_valid(CRD, obj);
    let obj = with_value(
        crd(),
        "/spec/versions/0/schema/openAPIV3Schema",
        json!({"type": "object", "maxProperties": 3}),
    );
    check(
        CRD,
        with_value(obj, "/spec/versions/0/selectableFields", Value::Null),
        expect![[r#"
        spec.validation.openAPIV3Schema: Invalid value: {"ID":"","Schema":"","Ref":null,"Description":"","Type":"object","Nullable":false,"Format":"","Title":"","Default":null,"Maximum":null,"ExclusiveMaximum":false,"Minimum":null,"ExclusiveMinimum":false,"MaxLength":null,"MinLength":null,"Pattern":"","MaxItems":null,"MinItems":null,"UniqueItems":false,"MultipleOf":null,"Enum":null,"MaxProperties":3,"MinProperties":null,"Required":null,"Items":null,"AllOf":null,"OneOf":null,"AnyOf":null,"Not":null,"Properties":null,"AdditionalProperties":null,"PatternProperties":null,"Dependencies":null,"AdditionalItems":null,"Definitions":null,"ExternalDocs":null,"Example":null,"XPreserveUnknownFields":null,"XEmbeddedResource":false,"XIntOrString":false,"XListMapKeys":null,"XListType":null,"XMapType":null,"XValidations":null}: only [Description Type Format Title Maximum ExclusiveMaximum Minimum ExclusiveMinimum MaxLength MinLength Pattern MaxItems MinItems UniqueItems MultipleOf Required Items Properties ExternalDocs Example XPreserveUnknownFields XValidations] fields are allowed at the root of the schema if the status subresource is enabled
    "#]],
    );
}

#[test]
fn validates_conversion() {
    let converted = |conversion: Value| with_value(crd(), "/spec/conversion", conversion);
    check(
        CRD,
        converted(json!({})),
        expect![[r#"
        spec.conversion.strategy: Required value
    "#]],
    );
    check(
        CRD,
        converted(json!({"strategy": "Webhook"})),
        expect![[r#"
        spec.conversion.webhookClientConfig: Required value: required when strategy is set to Webhook
        spec.conversion.conversionReviewVersions: Required value
    "#]],
    );
    check(
        CRD,
        converted(
            json!({"strategy": "None", "webhook": {"clientConfig": {}, "conversionReviewVersions": ["v1"]}}),
        ),
        expect![[r#"
        spec.conversion.webhookClientConfig: Forbidden: should not be set when strategy is not set to Webhook
        spec.conversion.conversionReviewVersions: Forbidden: should not be set when strategy is not set to Webhook
    "#]],
    );
    let webhook = json!({"clientConfig": {"url": "https://convert.example.com/x", "caBundle": "eHl6"}, "conversionReviewVersions": ["v2", "v2"]});
    check(
        CRD,
        converted(json!({"strategy": "Webhook", "webhook": webhook})),
        expect![[r#"
        spec.conversion.conversionReviewVersions[1]: Invalid value: "v2": duplicate version
        spec.conversion.conversionReviewVersions: Invalid value: ["v2","v2"]: must include at least one of v1, v1beta1
    "#]],
    );
    check(
        CRD,
        with_value(crd(), "/spec/preserveUnknownFields", json!(true)),
        expect![[r#"
        spec.preserveUnknownFields: Invalid value: true: must be false in order to use defaults in the schema
        spec.preserveUnknownFields: Invalid value: true: cannot set to true, set x-kubernetes-preserve-unknown-fields to true in spec.versions[*].schema instead
    "#]],
    );
}

#[test]
fn validates_updates() {
    let renamed =
        with_value(with_value(crd(), "/spec/names/plural", json!("ships")), "/spec/scope", json!("Cluster"));
    check_update(
        CRD,
        crd(),
        renamed,
        expect![[r#"
        spec.names.plural: Invalid value: "ships": field is immutable
    "#]],
    );
    let moved = with_value(crd(), "/spec/versions/0/name", json!("v2"));
    check_update(
        CRD,
        crd(),
        moved,
        expect![[r#"
        status.storedVersions[0]: Invalid value: "v1": missing from spec.versions; v1 was previously a storage version, and must remain in spec.versions until a storage migration ensures no data remains persisted in v1 and removes v1 from status.storedVersions
    "#]],
    );
    check_status(
        CRD,
        json!({"status": {"acceptedNames": {"plural": "X"}}}),
        expect![[r#"
        status.acceptedNames.plural: Invalid value: "X": a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is '[a-z]([-a-z0-9]*[a-z0-9])?')
    "#]],
    );
}

#[test]
fn unknown_formats_cause_warnings() {
    let unknown_format = with_value(
        crd(),
        "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/rig/format",
        json!("rig"),
    );
    assert_eq!(strategy(CRD).warnings(&unknown_format, None), ["unrecognized format \"rig\""]);
    assert!(strategy(CRD).warnings(&unknown_format, Some(&unknown_format)).is_empty());
    let known = with_value(
        crd(),
        "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/rig/format",
        json!("date-time"),
    );
    assert!(strategy(CRD).warnings(&known, None).is_empty());
}

#[test]
fn validates_defaults_with_schema() {
    check_schema(
        json!({"type": "object", "default": {"crew": "two", "cook": 1}, "properties": {
            "crew": {"type": "integer", "minimum": 1, "default": 0},
            "rigs": {"type": "array", "items": {"type": "string"}, "default": ["a", 1]},
        }}),
        expect![[r#"
            spec.validation.openAPIV3Schema.properties[spec].default: Invalid value: {"cook":1,"crew":"two"}: must not have unknown fields
            spec.validation.openAPIV3Schema.properties[spec].default.crew: Invalid value: "string": crew in body must be of type integer: "string"
            spec.validation.openAPIV3Schema.properties[spec].properties[crew].default: Invalid value: 0:  in body should be greater than or equal to 1
            spec.validation.openAPIV3Schema.properties[spec].properties[rigs].default.[1]: Invalid value: "integer": [1] in body must be of type string: "integer"
        "#]],
    );
}

#[test]
fn validates_rule_expressions() {
    check_schema(
        json!({
            "type": "object",
            "properties": {"n": {"type": "integer"}},
            "x-kubernetes-validations": [
                {"rule": "self.m > 1"},
                {"rule": "self.n"},
                {"rule": "self.n > 1", "messageExpression": "self.n"},
                {"rule": "self.n > 1", "optionalOldSelf": true},
                {"rule": "self.n > oldSelf.n"},
            ],
        }),
        expect![[r#"
            spec.validation.openAPIV3Schema.properties[spec].x-kubernetes-validations[0].rule: Invalid value: {"Rule":"self.m \u003e 1","Message":"","MessageExpression":"","Reason":null,"FieldPath":"","OptionalOldSelf":null}: compilation failed: ERROR: <input>:1:5: undefined field 'm'
             | self.m > 1
             | ....^
            spec.validation.openAPIV3Schema.properties[spec].x-kubernetes-validations[1].rule: Invalid value: {"Rule":"self.n","Message":"","MessageExpression":"","Reason":null,"FieldPath":"","OptionalOldSelf":null}: cel expression must evaluate to a bool
            spec.validation.openAPIV3Schema.properties[spec].x-kubernetes-validations[2].messageExpression: Invalid value: {"Rule":"self.n \u003e 1","Message":"","MessageExpression":"self.n","Reason":null,"FieldPath":"","OptionalOldSelf":null}: messageExpression must evaluate to a string
            spec.validation.openAPIV3Schema.properties[spec].x-kubernetes-validations[3].optionalOldSelf: Invalid value: true: may not be set if oldSelf is not used in rule
        "#]],
    );
}

#[test]
fn rejects_rules_over_cost_limit() {
    let list = |limit: Value| {
        let mut list = json!({"type": "array", "items": {"type": "string", "maxLength": 100}, "x-kubernetes-validations": [
            {"rule": "self.all(a, self.exists(b, a != b))"},
        ]});
        list["maxItems"] = limit;
        json!({"type": "object", "properties": {"list": list}})
    };
    check_schema(list(json!(10)), expect![""]);
    check_schema(
        list(Value::Null),
        expect![[r#"
        spec.validation.openAPIV3Schema.properties[spec].properties[list].x-kubernetes-validations[0].rule: Forbidden: estimated rule cost exceeds budget by factor of more than 100x (try simplifying the rule, or adding maxItems, maxProperties, and maxLength where arrays, maps, and strings are declared)
        spec.validation.openAPIV3Schema.properties[spec].properties[list].x-kubernetes-validations[0].rule: Forbidden: contributed to estimated rule cost total exceeding cost limit for entire OpenAPIv3 schema
        spec.validation.openAPIV3Schema: Forbidden: x-kubernetes-validations estimated rule cost total for entire OpenAPIv3 schema exceeds budget by factor of more than 100x (try simplifying the rule, or adding maxItems, maxProperties, and maxLength where arrays, maps, and strings are declared)
    "#]],
    );
    // A cheap rule on items of an unbounded list.
    let expensive_list = json!({"type": "object", "properties": {"list": {"type": "array", "items": {
        "type": "string", "x-kubernetes-validations": [{"rule": "self != 'a' && oldSelf != 'b'"}],
    }}}});
    check_schema(
        expensive_list,
        expect![[r#"
        spec.validation.openAPIV3Schema.properties[spec].properties[list].items.x-kubernetes-validations[0].rule: Invalid value: "self != 'a' && oldSelf != 'b'": oldSelf cannot be used on the uncorrelatable portion of the schema within spec.validation.openAPIV3Schema.properties[spec].properties[list]
    "#]],
    );
}

#[test]
fn patterns_use_go_regex_syntax() {
    let pattern = |pattern: &str| json!({"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}});
    check_schema(
        pattern("((a{1000}){1000})"),
        expect![[r#"
            spec.validation.openAPIV3Schema.properties[spec].properties[a].pattern: Invalid value: "((a{1000}){1000})": must be a valid regular expression, but isn't: error parsing regexp: invalid repeat count: `{1000}`
        "#]],
    );
    check_schema(pattern(r"^[\p{L}]{1000}[+--]{2}\<\012$"), expect![[""]]);
}
