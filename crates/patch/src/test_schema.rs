//! A small schema for tests.

use std::sync::LazyLock;

use schema::{Field, Gvk, ListType, PatchStrategy, Shape, Table, Type, TypeId};
use serde_json::Value;

pub(crate) fn field(name: &str, shape: Shape) -> Field {
    Field {
        name: name.into(),
        tag: 1,
        shape,
        required: false,
        pointer: false,
        always_present: false,
        default: None,
        patch_strategy: PatchStrategy::default(),
        merge_key: "".into(),
    }
}

/// A list field that is merged by `key` in strategic merge patch and by `keys` in apply.
fn merge_list_field(name: &str, item: Shape, key: &str, keys: &[&str]) -> Field {
    let kind = ListType::Map(keys.iter().map(|key| (*key).into()).collect());
    Field {
        patch_strategy: PatchStrategy { merge: true, retain_keys: false },
        merge_key: key.into(),
        ..field(name, Shape::List { item: Box::new(item), kind })
    }
}

fn string_map(name: &str) -> Field {
    field(name, Shape::Map { value: Box::new(Shape::String), atomic: false })
}

fn list(item: Shape, kind: ListType) -> Shape {
    Shape::List { item: Box::new(item), kind }
}

pub(crate) fn thing() -> TypeId {
    TypeId(0)
}

/// A schema with one kind, `Thing`, that has a field of every type.
pub(crate) fn table() -> &'static Table {
    static TABLE: LazyLock<Table> = LazyLock::new(build);
    &TABLE
}

fn build() -> Table {
    let ty = |name: &str, fields: Vec<Field>| Type {
        name: format!("test.{name}").into(),
        fields,
        ..Type::default()
    };
    let default = |field: Field, value: &str| Field { default: Some(Value::from(value)), ..field };
    let pointer = |field: Field| Field { pointer: true, ..field };
    let merged =
        |field: Field| Field { patch_strategy: PatchStrategy { merge: true, retain_keys: false }, ..field };
    let thing = Type {
        kinds: vec![Gvk { group: "".into(), version: "v1".into(), kind: "Thing".into() }],
        ..ty(
            "Thing",
            vec![
                field("apiVersion", Shape::String),
                field("kind", Shape::String),
                field("metadata", Shape::Struct(TypeId(1))),
                field("spec", Shape::Struct(TypeId(2))),
                field("status", Shape::Struct(TypeId(5))),
                string_map("data"),
            ],
        )
    };
    let meta = ty(
        "ObjectMeta",
        vec![
            field("name", Shape::String),
            field("namespace", Shape::String),
            field("uid", Shape::String),
            field("resourceVersion", Shape::String),
            field("generation", Shape::Int64),
            field("creationTimestamp", Shape::Time),
            string_map("labels"),
            string_map("annotations"),
            merged(field("finalizers", list(Shape::String, ListType::Set))),
            field("managedFields", list(Shape::Json, ListType::Atomic)),
        ],
    );
    let spec = ty(
        "ThingSpec",
        vec![
            field("replicas", Shape::Int32),
            merge_list_field("containers", Shape::Struct(TypeId(3)), "name", &["name"]),
            field("strategy", Shape::Struct(TypeId(6))),
            field("args", list(Shape::String, ListType::Atomic)),
            merge_list_field("ports", Shape::Struct(TypeId(4)), "port", &["port", "protocol"]),
            field("selector", Shape::Map { value: Box::new(Shape::String), atomic: true }),
            field("raw", Shape::RawExtension),
            field("target", Shape::IntOrString),
            pointer(field("nested", Shape::Struct(TypeId(2)))),
        ],
    );
    let container = ty(
        "Container",
        vec![
            field("name", Shape::String),
            field("image", Shape::String),
            merge_list_field("env", Shape::Struct(TypeId(7)), "name", &["name"]),
            field("args", list(Shape::String, ListType::Atomic)),
        ],
    );
    let port = ty(
        "Port",
        vec![
            field("name", Shape::String),
            field("port", Shape::Int32),
            default(field("protocol", Shape::String), "TCP"),
        ],
    );
    let status = ty("ThingStatus", vec![field("ready", Shape::Bool), string_map("seen")]);
    let strategy = ty(
        "ThingStrategy",
        vec![field("type", Shape::String), pointer(field("rollingUpdate", Shape::Struct(TypeId(7))))],
    );
    let pair = ty("Pair", vec![field("name", Shape::String), field("value", Shape::String)]);
    Table::new(vec![thing, meta, spec, container, port, status, strategy, pair])
}
