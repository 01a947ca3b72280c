//! JSON of built-in types with the members of structs in the order upstream declares them, which is the order of
//! its answers. A `Value` has them sorted, as upstream has those of custom resources and of maps.

use api::json::Json as _;
use schema::{Shape, TypeId};
use serde::ser::{Serialize, SerializeMap as _, SerializeSeq as _, Serializer};
use serde_json::{Map, Value};

const META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1";

/// A value to serialize.
pub struct InOrder<'a> {
    value: &'a Value,
    order: Order,
}

#[derive(Clone, Copy, Debug)]
enum Order {
    /// A struct of the schema table.
    Struct(TypeId),
    /// A shape of the schema table.
    Shape(&'static Shape),
    /// A struct that the schema table does not have.
    Fields(Fields),
    /// An object that says its kind.
    Object,
    Sorted,
}

/// The fields of a struct, each with those of the struct it holds.
type Fields = &'static [(&'static str, &'static Inner)];

#[derive(Debug)]
struct Inner(Fields);

const SCALAR: &Inner = &Inner(&[]);

const VERSION: Fields = &[
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

const KIND: &Inner = &Inner(&[("group", SCALAR), ("version", SCALAR), ("kind", SCALAR)]);

const AGGREGATED_RESOURCE: &Inner = &Inner(&[
    ("resource", SCALAR),
    ("responseKind", KIND),
    ("scope", SCALAR),
    ("singularResource", SCALAR),
    ("verbs", SCALAR),
    ("shortNames", SCALAR),
    ("categories", SCALAR),
    (
        "subresources",
        &Inner(&[
            ("subresource", SCALAR),
            ("responseKind", KIND),
            ("acceptedTypes", KIND),
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
        &Inner(&[
            ("metadata", SCALAR),
            (
                "versions",
                &Inner(&[("version", SCALAR), ("resources", AGGREGATED_RESOURCE), ("freshness", SCALAR)]),
            ),
        ]),
    ),
];

impl<'a> InOrder<'a> {
    /// An object that says its kind; all else is sorted.
    pub fn object(value: &'a Value) -> InOrder<'a> {
        InOrder { value, order: Order::Object }
    }

    /// An object of this kind, which it need not say.
    pub fn of_kind(value: &'a Value, group: &str, version: &str, kind: &str) -> InOrder<'a> {
        let order = schema::kubernetes().kind(group, version, kind).map_or(Order::Object, Order::Struct);
        InOrder { value, order }
    }

    /// A struct, or a list of structs, of `meta/v1`.
    pub fn meta(value: &'a Value, name: &str) -> InOrder<'a> {
        let order =
            schema::kubernetes().named(&format!("{META}.{name}")).map_or(Order::Sorted, Order::Struct);
        InOrder { value, order }
    }

    /// What `/version` answers.
    pub fn version(value: &'a Value) -> InOrder<'a> {
        InOrder { value, order: Order::Fields(VERSION) }
    }

    fn resolved(&self) -> Order {
        match self.order {
            Order::Object => kind_of(self.value),
            Order::Shape(Shape::Struct(id)) => Order::Struct(*id),
            Order::Shape(Shape::RawExtension) => kind_of(self.value),
            order => order,
        }
    }
}

fn kind_of(value: &Value) -> Order {
    let (api_version, kind) = (value.text("apiVersion"), value.text("kind"));
    let (group, version) = match api_version.split_once('/') {
        Some(parts) => parts,
        // Some answers about the core group leave its version out.
        None if api_version.is_empty() => ("", "v1"),
        None => ("", api_version),
    };
    if group == "apidiscovery.k8s.io" {
        return Order::Fields(AGGREGATED_DISCOVERY);
    }
    // Old clients ask for the kinds of tables and metadata by another version.
    let version = if group == "meta.k8s.io" { "v1" } else { version };
    schema::kubernetes().kind(group, version, kind).map_or(Order::Sorted, Order::Struct)
}

/// A member with its position and the order of its own members.
type Member<'a> = (usize, &'a String, InOrder<'a>);

fn members(members: &Map<String, Value>, order: Order) -> Vec<Member<'_>> {
    let members = members.iter().map(|(name, value)| {
        let (position, order) = position(order, name);
        (position, name, InOrder { value, order })
    });
    let mut members: Vec<Member<'_>> = members.collect();
    members.sort_by_key(|(position, ..)| *position);
    members
}

/// Where a member stands; those that nothing is known of come last, sorted.
fn position(order: Order, name: &str) -> (usize, Order) {
    const UNKNOWN: (usize, Order) = (usize::MAX, Order::Sorted);
    match order {
        Order::Struct(id) => {
            let ty = schema::kubernetes().get(id);
            match name {
                // What every kind embeds first.
                "kind" if !ty.kinds.is_empty() => (0, Order::Sorted),
                "apiVersion" if !ty.kinds.is_empty() => (1, Order::Sorted),
                _ => match ty.fields.iter().position(|field| *field.name == *name) {
                    Some(at) => (2 + at, Order::Shape(&ty.fields[at].shape)),
                    None => UNKNOWN,
                },
            }
        }
        Order::Shape(Shape::Map { value, .. }) => (0, Order::Shape(value)),
        Order::Fields(fields) => match fields.iter().position(|(field, _)| *field == name) {
            Some(at) => (at, Order::Fields(fields[at].1.0)),
            None => UNKNOWN,
        },
        _ => UNKNOWN,
    }
}

impl Serialize for InOrder<'_> {
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
                    Order::Shape(Shape::List { item, .. }) => Order::Shape(item),
                    order => order,
                };
                let mut list = serializer.serialize_seq(Some(items.len()))?;
                for value in items {
                    list.serialize_element(&InOrder { value, order })?;
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
        expected.assert_eq(&serde_json::to_string(&InOrder::object(&value)).unwrap());
    }

    #[test]
    fn structs_are_in_upstreams_order_and_maps_sorted() {
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
    fn what_is_no_object_is_in_upstreams_order() {
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
