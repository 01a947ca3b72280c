//! Reading an object by its type: one pass that parses, checks and normalises.
//!
//! The result is what upstream would write after reading the same input: unknown fields gone, nulls and
//! meaningless zeros gone, fields that are always written present, quantities, times and bytes in their
//! canonical form. Complaints come in upstream's words and order.

mod seed;
mod state;

use serde::de::{DeserializeSeed, Deserializer};
use serde_json::Value;

use crate::table::{Shape, Table, TypeId};
use crate::zero::{Target, zero};
use seed::Seed;
use state::State;

/// Nesting beyond this is refused, whether it comes as text or as a value.
pub const MAX_DEPTH: usize = 128;

/// Upstream stops collecting complaints here.
const MAX_UNKNOWN: usize = 100;

#[derive(Debug)]
pub struct Decoded {
    pub value: Value,
    /// What strict decoding complains about: `unknown field "spec.colour"`, `duplicate field "spec"`.
    pub unknown: Vec<String>,
}

/// Worded as upstream words it, without the kind it adds in front.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("{0}")]
    Syntax(String),
    /// A value that does not fit its field.
    #[error("{0}")]
    Type(String),
    #[error("exceeded max depth")]
    Depth,
}

/// Reads a JSON text as a value of type `ty`.
pub fn from_json(table: &Table, ty: TypeId, bytes: &[u8]) -> Result<Decoded, DecodeError> {
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let decoded = decode(table, ty, &mut deserializer, bytes)?;
    deserializer.end().map_err(|error| syntax(&error, bytes))?;
    Ok(decoded)
}

/// Does to a value what [`from_json`] does to a text; returns the complaints.
pub fn normalize(table: &Table, ty: TypeId, value: &mut Value) -> Result<Vec<String>, DecodeError> {
    let decoded = decode(table, ty, value.take(), b"")?;
    *value = decoded.value;
    Ok(decoded.unknown)
}

/// `text` is where a syntax error would be.
fn decode<'de, D>(table: &Table, ty: TypeId, deserializer: D, text: &[u8]) -> Result<Decoded, DecodeError>
where
    D: Deserializer<'de, Error = serde_json::Error>,
{
    let shape = Shape::Struct(ty);
    let mut state = State::new(table);
    let result = Seed { state: &mut state, target: Target::Shape(&shape) }.deserialize(deserializer);
    if state.too_deep {
        return Err(DecodeError::Depth);
    }
    // A text that is no JSON at all is reported before anything that is wrong with its contents.
    let value = result.map_err(|error| syntax(&error, text))?;
    match state.error.take() {
        Some(error) => Err(DecodeError::Type(error)),
        // Null reads as an empty object.
        None if value.is_null() => Ok(Decoded { value: zero(table, &shape), unknown: state.unknown }),
        None => Ok(Decoded { value, unknown: state.unknown }),
    }
}

fn syntax(error: &serde_json::Error, text: &[u8]) -> DecodeError {
    let message = error.to_string();
    if message.starts_with("recursion limit exceeded") {
        return DecodeError::Depth;
    }
    if error.is_eof() {
        return DecodeError::Syntax("unexpected end of JSON input".to_owned());
    }
    let place = GO_PLACES.iter().find(|(ours, _)| message.starts_with(ours)).map(|(_, place)| place);
    let line = text.split(|byte| *byte == b'\n').nth(error.line().saturating_sub(1)).unwrap_or_default();
    let byte = error.column().checked_sub(1).and_then(|at| line.get(at));
    match (place, byte) {
        (Some(place), Some(byte)) => {
            DecodeError::Syntax(format!("invalid character {} {place}", quoted(*byte)))
        }
        _ => DecodeError::Syntax(message),
    }
}

/// What the parser calls a mistake, and where Go says it is.
const GO_PLACES: &[(&str, &str)] = &[
    ("expected value", "looking for beginning of value"),
    ("trailing characters", "after top-level value"),
    ("key must be a string", "looking for beginning of object key string"),
    ("trailing comma", "looking for beginning of object key string"),
    ("expected `,` or `}`", "after object key:value pair"),
    ("expected `,` or `]`", "after array element"),
    ("expected `:`", "after object key"),
    ("control character", "in string literal"),
    ("invalid escape", "in string escape code"),
    ("invalid number", "in numeric literal"),
];

/// A byte as Go quotes it.
fn quoted(byte: u8) -> String {
    match byte {
        b'\'' => r"'\''".to_owned(),
        b'"' => "'\"'".to_owned(),
        byte => format!("'{}'", char::from(byte).escape_default()),
    }
}

#[cfg(test)]
mod tests;
