//! The expected type of a value, zero values, and the omission of empty ones.

use serde_json::{Map, Value};

use crate::table::{Field, SchemaOr, Shape, Table, Type, TypeId};

/// The expected type of a value.
#[derive(Clone, Copy)]
pub(crate) enum Target<'t> {
    Shape(&'t Shape),
    /// A struct of this type or its alternative.
    SchemaOr(TypeId, SchemaOr),
    MapOfSchemaOr(TypeId, SchemaOr),
}

/// The value that upstream encodes for an unset field.
pub(crate) fn zero_value(table: &Table, shape: &Shape) -> Value {
    match shape {
        Shape::String => Value::String(String::new()),
        Shape::Bool => Value::Bool(false),
        Shape::Int32 | Shape::Int64 | Shape::Double | Shape::IntOrString => Value::from(0),
        Shape::Quantity => Value::from("0"),
        Shape::Duration => Value::from("0s"),
        Shape::Struct(id) => {
            let mut map = Map::new();
            add_always_present(table, table.get(*id), &mut map);
            Value::Object(map)
        }
        _ => Value::Null,
    }
}

/// The zero value of a map entry. Bytes are empty there, not null.
pub(crate) fn zero_map_value(table: &Table, shape: &Shape) -> Value {
    match shape {
        Shape::Bytes => Value::String(String::new()),
        shape => zero_value(table, shape),
    }
}

/// Adds the fields without `omitempty`. This terminates, because recursive structs contain themselves
/// by pointer.
pub(crate) fn add_always_present(table: &Table, ty: &Type, map: &mut Map<String, Value>) {
    for field in ty.fields.iter().filter(|field| field.always_present) {
        if !map.contains_key(&*field.name) {
            let zero = if field.pointer { Value::Null } else { zero_value(table, &field.shape) };
            map.insert(field.name.to_string(), zero);
        }
    }
}

/// Applies `omitempty`: returns `None` if the value means the same as an absent field.
pub(crate) fn omit_empty(field: &Field, value: Value) -> Option<Value> {
    let empty = match &value {
        Value::Null => return None,
        Value::Array(list) => list.is_empty() && matches!(field.shape, Shape::List { .. }),
        Value::Object(map) => map.is_empty() && matches!(field.shape, Shape::Map { .. }),
        Value::String(text) => text.is_empty() && matches!(field.shape, Shape::String | Shape::Bytes),
        Value::Bool(flag) => !flag && field.shape == Shape::Bool,
        Value::Number(number) => {
            number.as_f64() == Some(0.0) && matches!(field.shape, Shape::Int32 | Shape::Int64 | Shape::Double)
        }
    };
    if !empty || field.pointer {
        return Some(value);
    }
    match value {
        // Upstream does not store empty lists and maps: even without `omitempty`, one is read back as null.
        Value::Array(_) | Value::Object(_) => None,
        value => field.always_present.then_some(value),
    }
}

impl<'t> Target<'t> {
    pub fn for_field(table: &Table, owner: TypeId, field: &'t Field) -> Target<'t> {
        let shape = &field.shape;
        match shape {
            Shape::Json => match table.schema_or(owner, &field.name) {
                Some(schema_or) => Target::SchemaOr(owner, schema_or),
                None => Target::Shape(shape),
            },
            Shape::Map { value, .. } if **value == Shape::Json => match table.schema_or(owner, &field.name) {
                Some(schema_or) => Target::MapOfSchemaOr(owner, schema_or),
                None => Target::Shape(shape),
            },
            shape => Target::Shape(shape),
        }
    }

    /// Whether upstream keeps the value as raw JSON.
    pub fn is_raw(self) -> bool {
        matches!(self, Target::Shape(Shape::RawExtension | Shape::Json | Shape::FieldsV1))
    }

    /// The name of the Go type in error messages.
    pub fn go_type(self, table: &Table) -> String {
        match self {
            Target::Shape(shape) => go_type(table, shape),
            Target::SchemaOr(..) => "v1.JSONSchemaProps".to_owned(),
            Target::MapOfSchemaOr(..) => "v1.JSONSchemaDependencies".to_owned(),
        }
    }
}

fn go_type(table: &Table, shape: &Shape) -> String {
    match shape {
        Shape::String | Shape::Time | Shape::MicroTime | Shape::Duration => "string".to_owned(),
        Shape::Bool => "bool".to_owned(),
        Shape::Int32 | Shape::IntOrString => "int32".to_owned(),
        Shape::Int64 => "int64".to_owned(),
        Shape::Double => "float64".to_owned(),
        Shape::Bytes => "[]uint8".to_owned(),
        Shape::Quantity => "resource.Quantity".to_owned(),
        Shape::RawExtension => "runtime.RawExtension".to_owned(),
        Shape::Json => "v1.JSON".to_owned(),
        Shape::FieldsV1 => "v1.FieldsV1".to_owned(),
        Shape::Struct(id) => {
            let mut parts = table.get(*id).name.rsplit('.');
            let name = parts.next().unwrap_or_default();
            format!("{}.{name}", parts.next().unwrap_or_default())
        }
        Shape::List { item, .. } => format!("[]{}", go_type(table, item)),
        Shape::Map { value, .. } => format!("map[string]{}", go_type(table, value)),
    }
}
