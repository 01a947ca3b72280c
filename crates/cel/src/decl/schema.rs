//! Creates declarations from OpenAPI schemas.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;

use super::{Decl, Field, ListType, MAX_REQUEST_SIZE_BYTES};
use crate::escape::escape;
use crate::types::Type;

/// The maximum depth of JSON. Deeper parts of a schema are not declared.
const MAX_SCHEMA_DEPTH: u32 = 128;

const MAX_DURATION_SIZE: u64 = 32;
const MAX_DATETIME_SIZE: u64 = 32;
const MAX_DATE_SIZE: u64 = 12;

pub(super) fn decl(schema: &Value, root: bool, depth: u32) -> Option<Decl> {
    if depth > MAX_SCHEMA_DEPTH {
        return None;
    }
    if schema.get("x-kubernetes-int-or-string").and_then(Value::as_bool) == Some(true)
        || schema.get("format").and_then(Value::as_str) == Some("int-or-string")
    {
        let max = text_length(schema).unwrap_or(MAX_REQUEST_SIZE_BYTES - 2);
        return Some(Decl { max, ..Decl::new(Type::Dyn) });
    }
    match schema.get("type").and_then(Value::as_str) {
        Some("array") => list(schema, depth),
        Some("object") => object(schema, root, depth),
        None if root => object(schema, root, depth),
        Some("string") => Some(string(schema)),
        Some("boolean") => Some(Decl { min_size: 4, max: 0, ..Decl::new(Type::Bool) }),
        Some("number") => Some(Decl { max: 0, ..Decl::new(Type::Double) }),
        Some("integer") => Some(Decl { max: 0, ..Decl::new(Type::Int) }),
        _ => None,
    }
}

fn list(schema: &Value, depth: u32) -> Option<Decl> {
    let items = schema.get("items")?;
    let item = decl(items, is_embedded_resource(items), depth + 1)?;
    let max = limit(schema, "maxItems").unwrap_or((MAX_REQUEST_SIZE_BYTES - 2) / (item.min_size + 1));
    let list_type = match schema.get("x-kubernetes-list-type").and_then(Value::as_str) {
        Some("set") => ListType::Set,
        Some("map") => {
            let keys = schema.get("x-kubernetes-list-map-keys").and_then(Value::as_array);
            let keys = keys.into_iter().flatten().filter_map(Value::as_str).map(str::to_owned);
            ListType::Map(keys.collect())
        }
        _ => ListType::Atomic,
    };
    Some(Decl { ty: Type::list(item.ty.clone()), max, min_size: 2, items: Some(Arc::new(item)), list_type })
}

fn object(schema: &Value, root: bool, depth: u32) -> Option<Decl> {
    if let Some(values) = schema.get("additionalProperties").filter(|values| values.is_object()) {
        let item = decl(values, is_embedded_resource(values), depth + 1)?;
        let max =
            limit(schema, "maxProperties").unwrap_or((MAX_REQUEST_SIZE_BYTES - 2) / (item.min_size + 6));
        let ty = Type::map(Type::String, item.ty.clone());
        let list_type = ListType::Atomic;
        return Some(Decl { ty, max, min_size: 2, items: Some(Arc::new(item)), list_type });
    }
    let required: Vec<&str> = schema
        .get("required")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let mut fields = BTreeMap::new();
    let mut min_size = 2;
    for (name, property) in schema.get("properties").and_then(Value::as_object).into_iter().flatten() {
        let Some(field) = decl(property, is_embedded_resource(property), depth + 1) else { continue };
        if required.contains(&name.as_str()) && property.get("default").is_none() {
            min_size += name.len() as u64 + field.min_size + 4;
        }
        if let Some(escaped) = escape(name) {
            fields.insert(escaped, Field { property: name.clone(), decl: field });
        }
    }
    if root {
        add_object_meta(&mut fields);
    }
    Some(Decl { max: 0, min_size, ..Decl::new(Type::object("object", fields)) })
}

/// Adds the fields that every resource has, even if its schema does not declare them.
fn add_object_meta(fields: &mut BTreeMap<String, Field>) {
    let text = || string(&Value::Null);
    let is_text = |field: Option<&Field>| field.is_some_and(|field| matches!(field.decl.ty, Type::String));
    let meta = fields.get("metadata").map(|field| &field.decl);
    let has_object_meta = is_text(fields.get("kind"))
        && is_text(fields.get("apiVersion"))
        && meta.is_some_and(|meta| is_text(meta.field("name")) && is_text(meta.field("generateName")));
    if has_object_meta {
        return;
    }
    let field = |name: &str, decl: Decl| (name.to_owned(), Field { property: name.to_owned(), decl });
    let names = BTreeMap::from([field("name", text()), field("generateName", text())]);
    fields.extend([
        field("kind", text()),
        field("apiVersion", text()),
        field("metadata", Decl { max: 0, min_size: 2, ..Decl::new(Type::object("object", names)) }),
    ]);
}

fn string(schema: &Value) -> Decl {
    let (ty, max, min_size) = match schema.get("format").and_then(Value::as_str) {
        Some("byte") => (Type::Bytes, limit(schema, "maxLength").unwrap_or(MAX_REQUEST_SIZE_BYTES - 2), 2),
        Some("duration") => (Type::Duration, MAX_DURATION_SIZE, 3),
        Some("date") => (Type::Timestamp, MAX_DATE_SIZE, 12),
        Some("date-time") => (Type::Timestamp, MAX_DATETIME_SIZE, 21),
        _ => {
            let allowed = schema.get("enum").and_then(Value::as_array).filter(|allowed| !allowed.is_empty());
            let max_enum_length = allowed.map(|allowed| {
                allowed.iter().filter_map(Value::as_str).map(|text| text.len() as u64).max().unwrap_or(0)
            });
            (Type::String, text_length(schema).or(max_enum_length).unwrap_or(MAX_REQUEST_SIZE_BYTES - 2), 2)
        }
    };
    Decl { max, min_size, ..Decl::new(ty) }
}

/// The maximum length in bytes. A character has up to four.
fn text_length(schema: &Value) -> Option<u64> {
    limit(schema, "maxLength").map(|length| length.saturating_mul(4))
}

fn limit(schema: &Value, name: &str) -> Option<u64> {
    let value = schema.get(name)?;
    value.as_u64().or_else(|| value.as_f64().map(|value| value.max(0.0) as u64))
}

fn is_embedded_resource(schema: &Value) -> bool {
    schema.get("x-kubernetes-embedded-resource").and_then(Value::as_bool) == Some(true)
}
