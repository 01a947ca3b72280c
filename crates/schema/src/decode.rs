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
use crate::zero::{Target, zero_value};
use seed::ValueSeed;
use state::DecodeState;

/// Nesting beyond this is refused, whether it comes as text or as a value.
pub const MAX_DEPTH: usize = 128;

/// Upstream stops collecting complaints here.
const MAX_STRICT_ERRORS: usize = 100;

#[derive(Debug)]
pub struct Decoded {
    pub value: Value,
    /// What strict decoding complains about: `unknown field "spec.colour"`, `duplicate field "spec"`.
    pub strict_errors: Vec<String>,
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
    deserializer.end().map_err(|error| syntax_error(&error, bytes))?;
    Ok(decoded)
}

/// Does to a value what [`from_json`] does to a text; returns the complaints.
pub fn normalize(table: &Table, ty: TypeId, value: &mut Value) -> Result<Vec<String>, DecodeError> {
    let decoded = decode(table, ty, value.take(), b"")?;
    *value = decoded.value;
    Ok(decoded.strict_errors)
}

/// `text` is where a syntax error would be.
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
    // A text that is no JSON at all is reported before anything that is wrong with its contents.
    let value = result.map_err(|error| syntax_error(&error, text))?;
    match state.error.take() {
        Some(error) => Err(DecodeError::Type(error)),
        // Null reads as an empty object.
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
