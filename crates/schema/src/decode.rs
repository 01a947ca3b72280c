//! Decodes an object by its type: parses, checks and normalizes in one pass.
//!
//! The result is what upstream writes after decoding the same input: unknown fields, nulls and empty
//! values of `omitempty` fields are dropped, fields without `omitempty` are added, and quantities,
//! times and base64 are in canonical form. Strict decoding errors have upstream's text and order.

mod seed;
mod state;

use serde::de::{DeserializeSeed, Deserializer};
use serde_json::Value;

use crate::table::{Shape, Table, TypeId};
use crate::zero::{Target, zero_value};
use seed::ValueSeed;
use state::DecodeState;

/// The maximum nesting depth of both JSON text and values. Deeper input is rejected.
pub const MAX_DEPTH: usize = 128;

/// The maximum number of strict decoding errors reported, as upstream.
const MAX_STRICT_ERRORS: usize = 100;

#[derive(Debug)]
pub struct Decoded {
    pub value: Value,
    /// Strict decoding errors: `unknown field "spec.colour"`, `duplicate field "spec"`.
    pub strict_errors: Vec<String>,
}

/// The text is upstream's, without the kind that upstream puts in front.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("{0}")]
    Syntax(String),
    /// A value that does not match the type of its field.
    #[error("{0}")]
    Type(String),
    #[error("exceeded max depth")]
    Depth,
}

/// Decodes JSON text as a value of type `ty`.
pub fn from_json(table: &Table, ty: TypeId, bytes: &[u8]) -> Result<Decoded, DecodeError> {
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let decoded = decode(table, ty, &mut deserializer, bytes)?;
    deserializer.end().map_err(|error| syntax_error(&error, bytes))?;
    Ok(decoded)
}

/// Normalizes a value as [`from_json`] does with text. Returns the strict decoding errors.
pub fn normalize(table: &Table, ty: TypeId, value: &mut Value) -> Result<Vec<String>, DecodeError> {
    let decoded = decode(table, ty, value.take(), b"")?;
    *value = decoded.value;
    Ok(decoded.strict_errors)
}

/// `text` is only used to produce the message of a syntax error.
fn decode<'de, D>(table: &Table, ty: TypeId, deserializer: D, text: &[u8]) -> Result<Decoded, DecodeError>
where
    D: Deserializer<'de, Error = serde_json::Error>,
{
    let shape = Shape::Struct(ty);
    let mut state = DecodeState::new(table);
    let result = ValueSeed { state: &mut state, target: Target::Shape(&shape) }.deserialize(deserializer);
    if state.too_deep {
        return Err(DecodeError::Depth);
    }
    // A syntax error takes precedence over type errors, even if a type error comes first in the text.
    let value = result.map_err(|error| syntax_error(&error, text))?;
    match state.error.take() {
        Some(error) => Err(DecodeError::Type(error)),
        // `null` decodes as an empty object.
        None if value.is_null() => {
            Ok(Decoded { value: zero_value(table, &shape), strict_errors: state.strict_errors })
        }
        None => Ok(Decoded { value, strict_errors: state.strict_errors }),
    }
}

fn syntax_error(error: &serde_json::Error, text: &[u8]) -> DecodeError {
    let message = error.to_string();
    if message.starts_with("recursion limit exceeded") {
        return DecodeError::Depth;
    }
    DecodeError::Syntax(crate::syntax::syntax_error(text).unwrap_or(message))
}

#[cfg(test)]
mod tests;
