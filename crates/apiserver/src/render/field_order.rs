//! Serializes JSON of built-in types with struct fields in upstream's declaration order, which is
//! the order in its responses. A `Value` sorts them, which is upstream's order for custom resources
//! and maps.

use api::json::JsonExt as _;
use schema::{Shape, TypeId};
use serde::ser::{Serialize, SerializeMap as _, SerializeSeq as _, Serializer};
use serde_json::{Map, Value};

const META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1";

/// A value with the field order to serialize it in.
pub struct OrderedJson<'a> {
    value: &'a Value,
    order: FieldOrder,
}

#[derive(Clone, Copy, Debug)]
enum FieldOrder {
    /// A struct of the schema table.
    Struct(TypeId),
    /// A shape of the schema table.
    Shape(&'static Shape),
    /// A struct that is not in the schema table.
    Fields(Fields),
    /// An object whose apiVersion and kind determine the order.
    Object,
    Sorted,
}

/// The fields of a struct, each with its own nested fields.
type Fields = &'static [(&'static str, &'static NestedFields)];

#[derive(Debug)]
struct NestedFields(Fields);

const SCALAR: &NestedFields = &NestedFields(&[]);

const VERSION_FIELDS: Fields = &[
    ("major", SCALAR),
    ("minor", SCALAR),
    ("emulationMajor", SCALAR),
    ("emulationMinor", SCALAR),
    ("minCompatibilityMajor", SCALAR),
    ("minCompatibilityMinor", SCALAR),
    ("gitVersion", SCALAR),
    ("gitCommit", SCALAR),
    ("gitTreeState", SCALAR),
    ("buildDate", SCALAR),
    ("goVersion", SCALAR),
    ("compiler", SCALAR),
    ("platform", SCALAR),
];

const GROUP_VERSION_KIND: &NestedFields =
    &NestedFields(&[("group", SCALAR), ("version", SCALAR), ("kind", SCALAR)]);

const AGGREGATED_RESOURCE: &NestedFields = &NestedFields(&[
    ("resource", SCALAR),
    ("responseKind", GROUP_VERSION_KIND),
    ("scope", SCALAR),
    ("singularResource", SCALAR),
    ("verbs", SCALAR),
    ("shortNames", SCALAR),
    ("categories", SCALAR),
    (
        "subresources",
        &NestedFields(&[
            ("subresource", SCALAR),
            ("responseKind", GROUP_VERSION_KIND),
            ("acceptedTypes", GROUP_VERSION_KIND),
            ("verbs", SCALAR),
        ]),
    ),
]);

const AGGREGATED_DISCOVERY: Fields = &[
    ("kind", SCALAR),
    ("apiVersion", SCALAR),
    ("metadata", SCALAR),
    (
        "items",
        &NestedFields(&[
            ("metadata", SCALAR),
            (
                "versions",
                &NestedFields(&[
                    ("version", SCALAR),
                    ("resources", AGGREGATED_RESOURCE),
                    ("freshness", SCALAR),
                ]),
            ),
        ]),
    ),
];

impl<'a> OrderedJson<'a> {
    /// An object ordered by its apiVersion and kind; unknown kinds are sorted.
    pub fn object(value: &'a Value) -> OrderedJson<'a> {
        OrderedJson { value, order: FieldOrder::Object }
    }

    /// An object of this kind; the value may omit kind and apiVersion.
    pub fn of_kind(value: &'a Value, group: &str, version: &str, kind: &str) -> OrderedJson<'a> {
        let order = schema::kubernetes()
            .type_by_kind(group, version, kind)
            .map_or(FieldOrder::Object, FieldOrder::Struct);
        OrderedJson { value, order }
    }

    /// A struct of `meta/v1`, or a list of them.
    pub fn meta(value: &'a Value, name: &str) -> OrderedJson<'a> {
        let order = schema::kubernetes()
            .type_by_name(&format!("{META}.{name}"))
            .map_or(FieldOrder::Sorted, FieldOrder::Struct);
        OrderedJson { value, order }
    }

    /// The `/version` response.
    pub fn version(value: &'a Value) -> OrderedJson<'a> {
        OrderedJson { value, order: FieldOrder::Fields(VERSION_FIELDS) }
    }

    fn resolved(&self) -> FieldOrder {
        match self.order {
            FieldOrder::Object => kind_of(self.value),
            FieldOrder::Shape(Shape::Struct(id)) => FieldOrder::Struct(*id),
            FieldOrder::Shape(Shape::RawExtension) => kind_of(self.value),
            order => order,
        }
    }
}

fn kind_of(value: &Value) -> FieldOrder {
    let (api_version, kind) = (value.text("apiVersion"), value.text("kind"));
    let (group, version) = match api_version.split_once('/') {
        Some(parts) => parts,
        // Discovery responses of the core group may omit the version.
        None if api_version.is_empty() => ("", "v1"),
        None => ("", api_version),
    };
    if group == "apidiscovery.k8s.io" {
        return FieldOrder::Fields(AGGREGATED_DISCOVERY);
    }
    // Old clients request tables and metadata as v1beta1, which has the same fields.
    let version = if group == "meta.k8s.io" { "v1" } else { version };
    schema::kubernetes().type_by_kind(group, version, kind).map_or(FieldOrder::Sorted, FieldOrder::Struct)
}

/// A member with its position and the field order of its value.
type Member<'a> = (usize, &'a String, OrderedJson<'a>);

fn members(members: &Map<String, Value>, order: FieldOrder) -> Vec<Member<'_>> {
    let members = members.iter().map(|(name, value)| {
        let (position, order) = position(order, name);
        (position, name, OrderedJson { value, order })
    });
    let mut members: Vec<Member<'_>> = members.collect();
    members.sort_by_key(|(position, ..)| *position);
    members
}

/// The position of a member; unknown members come last, sorted.
fn position(order: FieldOrder, name: &str) -> (usize, FieldOrder) {
    const UNKNOWN: (usize, FieldOrder) = (usize::MAX, FieldOrder::Sorted);
    match order {
        FieldOrder::Struct(id) => {
            let ty = schema::kubernetes().get(id);
            match name {
                // The embedded TypeMeta comes first.
                "kind" if !ty.kinds.is_empty() => (0, FieldOrder::Sorted),
                "apiVersion" if !ty.kinds.is_empty() => (1, FieldOrder::Sorted),
                _ => match ty.fields.iter().position(|field| *field.name == *name) {
                    Some(at) => (2 + at, FieldOrder::Shape(&ty.fields[at].shape)),
                    None => UNKNOWN,
                },
            }
        }
        FieldOrder::Shape(Shape::Map { value, .. }) => (0, FieldOrder::Shape(value)),
        FieldOrder::Fields(fields) => match fields.iter().position(|(field, _)| *field == name) {
            Some(at) => (at, FieldOrder::Fields(fields[at].1.0)),
            None => UNKNOWN,
        },
        _ => UNKNOWN,
    }
}

impl Serialize for OrderedJson<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let order = self.resolved();
        match self.value {
            Value::Object(object) => {
                let mut map = serializer.serialize_map(Some(object.len()))?;
                for (_, name, value) in members(object, order) {
                    map.serialize_entry(name, &value)?;
                }
                map.end()
            }
            Value::Array(items) => {
                let order = match order {
                    FieldOrder::Shape(Shape::List { item, .. }) => FieldOrder::Shape(item),
                    order => order,
                };
                let mut list = serializer.serialize_seq(Some(items.len()))?;
                for value in items {
                    list.serialize_element(&OrderedJson { value, order })?;
                }
                list.end()
            }
            scalar => scalar.serialize(serializer),
        }
    }
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn check(value: Value, expected: Expect) {
        expected.assert_eq(&serde_json::to_string(&OrderedJson::object(&value)).unwrap());
    }

    #[test]
    fn struct_fields_follow_upstream_and_maps_are_sorted() {
        check(
            json!({
                "apiVersion": "v1", "kind": "Pod", "status": {"phase": "Running"},
                "spec": {"containers": [{"image": "i", "name": "c", "env": [{"value": "v", "name": "n"}]}], "volumes": []},
                "metadata": {"uid": "u", "labels": {"b": "1", "a": "2"}, "namespace": "ns", "name": "x", "annotations": {}, "resourceVersion": "1"},
            }),
            expect![[
                r#"{"kind":"Pod","apiVersion":"v1","metadata":{"name":"x","namespace":"ns","uid":"u","resourceVersion":"1","labels":{"a":"2","b":"1"},"annotations":{}},"spec":{"volumes":[],"containers":[{"name":"c","image":"i","env":[{"name":"n","value":"v"}]}]},"status":{"phase":"Running"}}"#
            ]],
        );
        check(
            json!({"apiVersion": "example.com/v1", "kind": "Thing", "metadata": {"uid": "u", "name": "x"}, "a": {"c": 1, "b": 2}}),
            expect![[
                r#"{"a":{"b":2,"c":1},"apiVersion":"example.com/v1","kind":"Thing","metadata":{"name":"x","uid":"u"}}"#
            ]],
        );
    }

    #[test]
    fn meta_types_follow_upstream_order() {
        check(
            json!({
                "apiVersion": "meta.k8s.io/v1beta1", "kind": "Table", "columnDefinitions": [{"description": "d", "format": "", "name": "Name", "priority": 0, "type": "string"}],
                "metadata": {"continue": "c", "resourceVersion": "1"},
                "rows": [{"cells": [1], "object": {"apiVersion": "v1", "kind": "Pod", "metadata": {"uid": "u", "name": "x"}}}],
            }),
            expect![[
                r#"{"kind":"Table","apiVersion":"meta.k8s.io/v1beta1","metadata":{"resourceVersion":"1","continue":"c"},"columnDefinitions":[{"name":"Name","type":"string","format":"","description":"d","priority":0}],"rows":[{"cells":[1],"object":{"kind":"Pod","apiVersion":"v1","metadata":{"name":"x","uid":"u"}}}]}"#
            ]],
        );
        check(
            json!({"apiVersion": "v1", "code": 200, "details": {"uid": "u", "kind": "pods", "name": "x"}, "kind": "Status", "metadata": {}, "status": "Success"}),
            expect![[
                r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Success","details":{"name":"x","kind":"pods","uid":"u"},"code":200}"#
            ]],
        );
    }
}
