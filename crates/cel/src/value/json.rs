//! Converts JSON to values, one level at a time, and back.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value as Json;

use super::{Key, LibraryValue, List, Map, Text, Value};
use crate::decl::Decl;
use crate::time;
use crate::types::Type;

/// The maximum depth of a value that is converted to JSON. Requests are limited to less.
const MAX_JSON_DEPTH: u32 = 500;
/// The maximum number of values in JSON that an expression returns. An object in a request has fewer.
const MAX_JSON_VALUES: usize = 1_000_000;
/// The maximum number of values in JSON for a message.
const MAX_DEBUG_JSON_VALUES: usize = 1000;

pub(crate) fn from_json<'a>(json: &'a Json, decl: &'a Decl) -> Value<'a> {
    match json {
        Json::Null => Value::Null,
        Json::Bool(value) => Value::Bool(*value),
        Json::Number(number) => {
            let whole = number.as_i64().map(Value::Int);
            let value = whole.unwrap_or_else(|| Value::Double(number.as_f64().unwrap_or(f64::NAN)));
            match (&decl.ty, value) {
                (Type::Double, Value::Int(value)) => Value::Double(value as f64),
                (Type::Int, Value::Double(value)) if value == value.trunc() => Value::Int(value as i64),
                (_, value) => value,
            }
        }
        Json::String(text) => text_value(text, decl),
        Json::Array(items) => Value::List(List::Json(items, decl)),
        Json::Object(entries) => Value::Map(Map::Json(entries, decl)),
    }
}

/// A string that does not have the format of its schema stays a string. Schema validation reports the
/// error.
fn text_value<'a>(text: &'a str, decl: &Decl) -> Value<'a> {
    let read = match decl.ty {
        Type::Duration => time::parse_lenient_duration(text).map(Value::Duration),
        Type::Timestamp => {
            time::parse_timestamp(text).or_else(|| time::parse_date(text)).map(Value::Timestamp)
        }
        Type::Bytes => STANDARD.decode(text).ok().map(|bytes| Value::Bytes(bytes.into())),
        _ => None,
    };
    read.unwrap_or(Value::String(Text::Borrowed(text)))
}

impl Value<'_> {
    /// Converts the value to JSON, or returns why that is not possible.
    pub fn to_json(&self) -> Result<Json, String> {
        self.json(0, &mut MAX_JSON_VALUES.clone())
    }

    /// Converts a small value to JSON, for messages.
    pub(super) fn to_short_json(&self) -> Result<Json, String> {
        self.json(0, &mut MAX_DEBUG_JSON_VALUES.clone())
    }

    /// `remaining` is the number of values that may still be added. It is needed because a small value
    /// can contain the same part very often.
    fn json(&self, depth: u32, remaining: &mut usize) -> Result<Json, String> {
        if depth > MAX_JSON_DEPTH {
            return Err("value is nested too deeply".to_owned());
        }
        *remaining = remaining.checked_sub(1).ok_or("value is too large")?;
        Ok(match self {
            Value::Null | Value::Optional(None) => Json::Null,
            Value::Bool(value) => Json::Bool(*value),
            Value::Int(value) => Json::from(*value),
            Value::Uint(value) => Json::from(*value),
            Value::Double(value) if *value == value.trunc() && value.abs() < 9e15 => {
                Json::from(*value as i64)
            }
            Value::Double(value) => Json::from(*value),
            Value::String(text) => Json::from(&**text),
            Value::Bytes(bytes) => Json::from(STANDARD.encode(bytes)),
            Value::Duration(nanos) => Json::from(time::format_duration(*nanos)),
            Value::Timestamp(timestamp) => Json::from(timestamp.to_string()),
            Value::List(List::Json(items, _)) => Json::Array(items.to_vec()),
            Value::List(list) => Json::Array(
                list.iter().map(|item| item.json(depth + 1, remaining)).collect::<Result<_, _>>()?,
            ),
            Value::Map(Map::Json(entries, _)) => Json::Object((*entries).clone()),
            Value::Map(Map::Shared(entries) | Map::Message(_, entries) | Map::WithDefault(entries)) => {
                let mut object = serde_json::Map::new();
                for (key, value) in entries.iter() {
                    object.insert(key_text(key), value.json(depth + 1, remaining)?);
                }
                Json::Object(object)
            }
            Value::Optional(Some(value)) => value.json(depth + 1, remaining)?,
            Value::Type(ty) => Json::from(ty.name()),
            Value::Library(LibraryValue::Quantity(quantity)) => Json::from(quantity.to_string()),
            Value::Library(_) | Value::Fields(_) => {
                return Err(format!(
                    "type conversion error from '{}' to 'google.protobuf.Value'",
                    self.type_of()
                ));
            }
        })
    }
}

fn key_text(key: &Key<'_>) -> String {
    match key {
        Key::Bool(value) => value.to_string(),
        Key::Int(value) => value.to_string(),
        Key::Uint(value) => value.to_string(),
        Key::String(text) => text.to_string(),
    }
}
