//! Applying mutations: JSON Patch and ApplyConfiguration.

use std::fmt::Write as _;

use api::json::JsonExt as _;
use cel::Map;
use patch::JsonPatchError;
use schema::{Table, TypeId};
use serde_json::{Map as Json, Value};

/// Applies a JSON patch. If one of its `test` operations fails, the object is unchanged.
pub fn apply_json_patch(object: &Value, operations: &cel::Value<'_>) -> Result<Value, String> {
    let cel::Value::List(list) = operations else {
        return Err("type mismatch: JSONPatchType.expression should evaluate to array".to_owned());
    };
    let operations = list.iter().map(|operation| self::operation(&operation)).collect::<Result<_, _>>()?;
    let mut after = object.clone();
    match patch::json_patch(&mut after, &Value::Array(operations)) {
        Ok(()) => Ok(after),
        Err(JsonPatchError::TestFailed(_)) => Ok(object.clone()),
        Err(error) => Err(format!("JSON Patch: {error}")),
    }
}

fn operation(value: &cel::Value<'_>) -> Result<Value, String> {
    let cel::Value::Map(map @ Map::Message(..)) = value else {
        return Err(format!(
            "type mismatch: JSONPatchType.expression should evaluate to array of JSONPatch, got element of {}",
            value.type_of().name()
        ));
    };
    let mut out = Json::new();
    for field in ["op", "path", "from"] {
        if let Some(text) = map.field(field).as_ref().and_then(cel::Value::as_str) {
            out.insert(field.to_owned(), text.into());
        }
    }
    if let Some(value) = map.field("value") {
        check_types(&value)?;
        let value = value.to_json().map_err(|error| {
            format!("JSONPath valueExpression evaluated to a type that could not marshal to JSON: {error}")
        })?;
        out.insert("value".to_owned(), value);
    }
    Ok(out.into())
}

/// Merges an apply configuration into the object as server-side apply does.
pub fn apply_configuration(
    object: &Value,
    configuration: &cel::Value<'_>,
    (table, ty): (&Table, TypeId),
) -> Result<Value, String> {
    check_types(configuration)?;
    let mut configuration = configuration.to_json()?;
    for field in ["kind", "apiVersion"] {
        if let Some(fields) = configuration.as_object_mut() {
            fields.insert(field.to_owned(), object.at(field).clone());
        }
    }
    patch::apply::overlay(table, ty, object, &configuration)
        .map_err(|error| format!("error applying patch: {error}"))
}

/// Type names must match the field path: `Object.spec{}` is only valid in the field `spec` of
/// `Object{}`.
fn check_types(value: &cel::Value<'_>) -> Result<(), String> {
    let cel::Value::Map(Map::Message(name, _)) = value else { return Ok(()) };
    let mut errors = String::new();
    check_type_names(value, name, &mut errors);
    match errors.as_str() {
        "" => Ok(()),
        errors => Err(format!("type mismatch: {}", errors.trim_end())),
    }
}

fn check_type_names(value: &cel::Value<'_>, expected: &str, errors: &mut String) {
    match value {
        cel::Value::Map(Map::Message(name, entries)) => {
            if **name != *expected {
                let _ = writeln!(
                    errors,
                    "unexpected type name {name:?}, expected {expected:?}, which matches field name path from root Object type"
                );
            }
            for (key, value) in entries.iter() {
                if let cel::Key::String(field) = key {
                    check_type_names(value, &format!("{expected}.{}", &**field), errors);
                }
            }
        }
        cel::Value::List(list) => list.iter().for_each(|item| check_type_names(&item, expected, errors)),
        cel::Value::Map(Map::Shared(entries)) => {
            entries.values().for_each(|value| check_type_names(value, expected, errors));
        }
        _ => {}
    }
}
