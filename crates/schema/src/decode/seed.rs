//! The serde visitor behind [`super::from_json`]. One visitor handles all shapes, with the shape as
//! data, so the code is not monomorphized per type.

use std::fmt;

use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::state::{DecodeState, PathSegment};
use crate::quantity;
use crate::table::{Field, SchemaOr, Shape, Table, Type, TypeId};
use crate::time::Timestamp;
use crate::zero::{Target, add_always_present, omit_empty, zero_map_value, zero_value};

/// Like Go's `base64.StdEncoding`: requires padding, but accepts nonzero trailing bits.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_allow_trailing_bits(true)
        .with_decode_padding_mode(DecodePaddingMode::RequireCanonical),
);

const NOT_A_SCHEMA: &str = "boolean or JSON schema expected";

/// Decodes one value.
pub(super) struct ValueSeed<'s, 't> {
    pub state: &'s mut DecodeState<'t>,
    pub target: Target<'t>,
}

impl<'de> DeserializeSeed<'de> for ValueSeed<'_, '_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

/// Records the first value of the wrong type, decodes it as null and continues, because a later syntax
/// error takes precedence.
impl<'de, 't> Visitor<'de> for ValueSeed<'_, 't> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        match self.target {
            Target::Shape(Shape::Bool) | Target::SchemaOr(_, SchemaOr::Bool) => {
                return Ok(Value::Bool(value));
            }
            target if target.is_raw() => return Ok(Value::Bool(value)),
            Target::Shape(Shape::Quantity) => self.state.set_error(quantity::ParseError::Format),
            target => self.state.mismatch("bool", target),
        }
        Ok(Value::Null)
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(self.number(value.into()).unwrap_or_default())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(self.number(value.into()).unwrap_or_default())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).and_then(|number| self.number(number)).unwrap_or_default())
    }

    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        match self.target {
            Target::Shape(Shape::String) => Ok(Value::String(text.to_owned())),
            _ => Ok(self.text(text).unwrap_or_default()),
        }
    }

    fn visit_string<E>(self, text: String) -> Result<Value, E> {
        match self.target {
            Target::Shape(Shape::String) => Ok(Value::String(text)),
            _ => Ok(self.text(&text).unwrap_or_default()),
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let ValueSeed { state, target } = self;
        let lenient = !matches!(target, Target::Shape(Shape::List { .. }));
        let (item, fallback): (Target<'t>, Option<&'t Shape>) = match target {
            Target::Shape(Shape::List { item, .. }) => (Target::Shape(item), Some(item)),
            Target::SchemaOr(id, SchemaOr::Array) => (Target::SchemaOr(id, SchemaOr::Array), None),
            Target::SchemaOr(_, SchemaOr::StringArray) => {
                (Target::Shape(&Shape::String), Some(&Shape::String))
            }
            target if target.is_raw() => (target, None),
            target => {
                match target {
                    Target::Shape(Shape::Quantity) => state.set_error(quantity::ParseError::Format),
                    Target::SchemaOr(..) => state.set_error(NOT_A_SCHEMA),
                    target => state.mismatch("array", target),
                }
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                return Ok(Value::Null);
            }
        };
        state.enter::<A::Error>(lenient)?;
        let mut list = Vec::new();
        loop {
            state.path.push(PathSegment::Index(list.len()));
            let value = seq.next_element_seed(ValueSeed { state, target: item })?;
            state.path.pop();
            match (value, fallback) {
                (None, _) => break,
                (Some(Value::Null), Some(shape)) => list.push(zero_value(state.table, shape)),
                (Some(value), _) => list.push(value),
            }
        }
        state.leave(lenient);
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let ValueSeed { state, target } = self;
        let lenient = !matches!(
            target,
            Target::Shape(Shape::Struct(_) | Shape::Map { .. }) | Target::MapOfSchemaOr(..)
        );
        state.enter::<A::Error>(lenient)?;
        let value = match target {
            Target::Shape(&Shape::Struct(id)) | Target::SchemaOr(id, _) => visit_struct(state, id, map)?,
            Target::Shape(Shape::Map { value, .. }) => {
                visit_entries(state, Target::Shape(value), Some(value), map)?
            }
            Target::MapOfSchemaOr(id, schema_or) => {
                visit_entries(state, Target::SchemaOr(id, schema_or), None, map)?
            }
            target if target.is_raw() => visit_entries(state, target, None, map)?,
            target => {
                match target {
                    Target::Shape(Shape::Quantity) => state.set_error(quantity::ParseError::Format),
                    target => state.mismatch("object", target),
                }
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Value::Null
            }
        };
        state.leave(lenient);
        Ok(value)
    }
}

impl ValueSeed<'_, '_> {
    fn number(self, number: Number) -> Option<Value> {
        let integer = match self.target {
            Target::Shape(Shape::Int32 | Shape::IntOrString) => {
                number.as_i64().filter(|n| i32::try_from(*n).is_ok())
            }
            Target::Shape(Shape::Int64) => number.as_i64(),
            Target::Shape(Shape::Double) => return Some(json_number(number)),
            Target::Shape(Shape::Quantity) => return self.quantity(&decimal(&number)),
            target if target.is_raw() => return Some(Value::Number(number)),
            Target::SchemaOr(..) => {
                self.state.set_error(NOT_A_SCHEMA);
                return None;
            }
            target => {
                self.state.mismatch("number", target);
                return None;
            }
        };
        if integer.is_none() {
            self.state.mismatch(&format!("number {number}"), self.target);
        }
        integer.map(Value::from)
    }

    fn text(self, text: &str) -> Option<Value> {
        match self.target {
            Target::Shape(Shape::IntOrString | Shape::Duration) => Some(Value::from(text)),
            target if target.is_raw() => Some(Value::from(text)),
            Target::Shape(Shape::Time) => self.time(Timestamp::parse(text), Timestamp::to_seconds),
            Target::Shape(Shape::MicroTime) => self.time(Timestamp::parse_micro(text), Timestamp::to_micros),
            Target::Shape(Shape::Quantity) => self.quantity(text.trim()),
            Target::Shape(Shape::Bytes) => match canonical_base64(text) {
                Ok(text) => Some(Value::String(text)),
                Err(at) => {
                    self.state.set_error(format!("illegal base64 data at input byte {at}"));
                    None
                }
            },
            Target::SchemaOr(..) => {
                self.state.set_error(NOT_A_SCHEMA);
                None
            }
            target => {
                self.state.mismatch("string", target);
                None
            }
        }
    }

    fn time(self, read: Result<Timestamp, String>, write: fn(Timestamp) -> String) -> Option<Value> {
        match read {
            Ok(time) => (!time.is_zero()).then(|| Value::String(write(time))),
            Err(message) => {
                self.state.set_error(message);
                None
            }
        }
    }

    fn quantity(self, text: &str) -> Option<Value> {
        match quantity::canonicalize(text) {
            Ok(text) => Some(Value::String(text)),
            Err(error) => {
                self.state.set_error(error);
                None
            }
        }
    }
}

/// Go prints a float with an integral value without a decimal point.
fn json_number(number: Number) -> Value {
    match number.as_f64() {
        Some(value) if value.fract() == 0.0 && value.abs() < 9e15 => Value::from(value as i64),
        _ => Value::Number(number),
    }
}

/// Formats a number without an exponent, because a quantity with an exponent keeps the decimal exponent
/// format.
fn decimal(number: &Number) -> String {
    match number.as_f64().filter(|_| number.is_f64()) {
        Some(value) => value.to_string(),
        None => number.to_string(),
    }
}

/// Decodes and encodes again. The error is the offset of the first invalid byte.
fn canonical_base64(text: &str) -> Result<String, usize> {
    let without_newlines;
    let text = match text.contains(['\r', '\n']) {
        true => {
            without_newlines = text.replace(['\r', '\n'], "");
            &without_newlines
        }
        false => text,
    };
    match BASE64.decode(text) {
        Ok(bytes) => Ok(BASE64.encode(bytes)),
        Err(base64::DecodeError::InvalidByte(at, _) | base64::DecodeError::InvalidLastSymbol(at, _)) => {
            Err(at)
        }
        Err(_) => Err(text.len() / 4 * 4),
    }
}

fn visit_entries<'de, 't, A: MapAccess<'de>>(
    state: &mut DecodeState<'t>,
    target: Target<'t>,
    fallback: Option<&'t Shape>,
    mut map: A,
) -> Result<Value, A::Error> {
    let mut entries = Map::new();
    while let Some(key) = map.next_key::<String>()? {
        if entries.contains_key(&key) {
            state.add_strict_error("duplicate", &key);
        }
        state.path.push(PathSegment::Key(key));
        let value = map.next_value_seed(ValueSeed { state, target })?;
        // Moving the key into the path and back avoids a copy.
        let Some(PathSegment::Key(key)) = state.path.pop() else { break };
        let value = match (value, fallback) {
            (Value::Null, Some(shape)) => zero_map_value(state.table, shape),
            (value, _) => value,
        };
        entries.insert(key, value);
    }
    Ok(Value::Object(entries))
}

fn visit_struct<'de, 't, A: MapAccess<'de>>(
    state: &mut DecodeState<'t>,
    id: TypeId,
    mut map: A,
) -> Result<Value, A::Error> {
    let table: &'t Table = state.table;
    let ty = table.get(id);
    let mut object = Map::new();
    let mut seen = SeenFields::default();
    while let Some(key) = map.next_key_seed(FieldKey(ty))? {
        let (index, field) = match key {
            Ok(found) => found,
            Err(name) if ty.preserve_unknown => {
                let value = map.next_value_seed(ValueSeed { state, target: Target::Shape(&Shape::Json) })?;
                object.insert(name, value);
                continue;
            }
            Err(name) => {
                // `add_strict_error` builds the field path from `state.path`, which does not contain
                // this key.
                state.add_strict_error("unknown", &name);
                map.next_value::<IgnoredAny>()?;
                continue;
            }
        };
        if !seen.insert(index) {
            state.add_strict_error("duplicate", &field.name);
            object.remove(&*field.name);
        }
        state.path.push(PathSegment::Field(id, ty, field));
        let target = Target::for_field(table, id, field);
        let value = map.next_value_seed(ValueSeed { state, target })?;
        state.path.pop();
        if let Some(value) = omit_empty(field, value) {
            object.insert(field.name.to_string(), value);
        }
    }
    add_always_present(table, ty, &mut object);
    Ok(Value::Object(object))
}

/// The indexes of the fields decoded so far. The first 64 are kept as bits.
#[derive(Default)]
struct SeenFields {
    low: u64,
    high: Vec<usize>,
}

impl SeenFields {
    fn insert(&mut self, index: usize) -> bool {
        if index < 64 {
            let new = self.low & (1 << index) == 0;
            self.low |= 1 << index;
            return new;
        }
        let new = !self.high.contains(&index);
        self.high.push(index);
        new
    }
}

/// Looks up the field of a key without copying the key.
struct FieldKey<'t>(&'t Type);

impl<'de, 't> DeserializeSeed<'de> for FieldKey<'t> {
    type Value = Result<(usize, &'t Field), String>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'t> Visitor<'_> for FieldKey<'t> {
    type Value = Result<(usize, &'t Field), String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a field name")
    }

    fn visit_str<E>(self, name: &str) -> Result<Self::Value, E> {
        let found = self.0.fields.iter().enumerate().find(|(_, field)| &*field.name == name);
        Ok(found.ok_or_else(|| name.to_owned()))
    }
}
