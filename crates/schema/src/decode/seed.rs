//! The visitor behind [`super::from_json`]: one for all shapes, with the shape as data.

use std::fmt;

use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::state::{State, Step};
use crate::quantity;
use crate::table::{Alternative, Field, Shape, Table, Type, TypeId};
use crate::time::Timestamp;
use crate::zero::{Target, complete, kept, zero, zero_entry};

/// Go's standard encoding: padded, and careless about bits that mean nothing.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_allow_trailing_bits(true)
        .with_decode_padding_mode(DecodePaddingMode::RequireCanonical),
);

const NO_SCHEMA: &str = "boolean or JSON schema expected";

/// Reads one value.
pub(super) struct Seed<'s, 't> {
    pub state: &'s mut State<'t>,
    pub target: Target<'t>,
}

impl<'de> DeserializeSeed<'de> for Seed<'_, '_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

/// A value that does not fit is noted and reads as null, so that reading can go on.
impl<'de, 't> Visitor<'de> for Seed<'_, 't> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        match self.target {
            Target::Shape(Shape::Bool) | Target::Either(_, Alternative::Bool) => {
                return Ok(Value::Bool(value));
            }
            target if target.is_raw() => return Ok(Value::Bool(value)),
            Target::Shape(Shape::Quantity) => self.state.fail(quantity::ParseError::Format),
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
        let Seed { state, target } = self;
        let lenient = !matches!(target, Target::Shape(Shape::List { .. }));
        let (item, fallback): (Target<'t>, Option<&'t Shape>) = match target {
            Target::Shape(Shape::List { item, .. }) => (Target::Shape(item), Some(item)),
            Target::Either(id, Alternative::Array) => (Target::Either(id, Alternative::Array), None),
            Target::Either(_, Alternative::Strings) => (Target::Shape(&Shape::String), Some(&Shape::String)),
            target if target.is_raw() => (target, None),
            target => {
                match target {
                    Target::Shape(Shape::Quantity) => state.fail(quantity::ParseError::Format),
                    Target::Either(..) => state.fail(NO_SCHEMA),
                    target => state.mismatch("array", target),
                }
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                return Ok(Value::Null);
            }
        };
        state.enter::<A::Error>(lenient)?;
        let mut list = Vec::new();
        loop {
            state.path.push(Step::Index(list.len()));
            let value = seq.next_element_seed(Seed { state, target: item })?;
            state.path.pop();
            match (value, fallback) {
                (None, _) => break,
                (Some(Value::Null), Some(shape)) => list.push(zero(state.table, shape)),
                (Some(value), _) => list.push(value),
            }
        }
        state.leave(lenient);
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let Seed { state, target } = self;
        let lenient =
            !matches!(target, Target::Shape(Shape::Struct(_) | Shape::Map { .. }) | Target::MapOfEither(..));
        state.enter::<A::Error>(lenient)?;
        let value = match target {
            Target::Shape(&Shape::Struct(id)) | Target::Either(id, _) => visit_struct(state, id, map)?,
            Target::Shape(Shape::Map { value, .. }) => {
                entries(state, Target::Shape(value), Some(value), map)?
            }
            Target::MapOfEither(id, alternative) => {
                entries(state, Target::Either(id, alternative), None, map)?
            }
            target if target.is_raw() => entries(state, target, None, map)?,
            target => {
                match target {
                    Target::Shape(Shape::Quantity) => state.fail(quantity::ParseError::Format),
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

impl Seed<'_, '_> {
    fn number(self, number: Number) -> Option<Value> {
        let whole = match self.target {
            Target::Shape(Shape::Int32 | Shape::IntOrString) => {
                number.as_i64().filter(|n| i32::try_from(*n).is_ok())
            }
            Target::Shape(Shape::Int64) => number.as_i64(),
            Target::Shape(Shape::Double) => return Some(double(number)),
            Target::Shape(Shape::Quantity) => return self.quantity(&decimal(&number)),
            target if target.is_raw() => return Some(Value::Number(number)),
            Target::Either(..) => {
                self.state.fail(NO_SCHEMA);
                return None;
            }
            target => {
                self.state.mismatch("number", target);
                return None;
            }
        };
        if whole.is_none() {
            self.state.mismatch(&format!("number {number}"), self.target);
        }
        whole.map(Value::from)
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
                    self.state.fail(format!("illegal base64 data at input byte {at}"));
                    None
                }
            },
            Target::Either(..) => {
                self.state.fail(NO_SCHEMA);
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
                self.state.fail(message);
                None
            }
        }
    }

    fn quantity(self, text: &str) -> Option<Value> {
        match quantity::canonical(text) {
            Ok(text) => Some(Value::String(text)),
            Err(error) => {
                self.state.fail(error);
                None
            }
        }
    }
}

/// Go writes a whole float without a point.
fn double(number: Number) -> Value {
    match number.as_f64() {
        Some(value) if value.fract() == 0.0 && value.abs() < 9e15 => Value::from(value as i64),
        _ => Value::Number(number),
    }
}

/// Without an exponent, which would choose another family of suffixes.
fn decimal(number: &Number) -> String {
    match number.as_f64().filter(|_| number.is_f64()) {
        Some(value) => value.to_string(),
        None => number.to_string(),
    }
}

/// Decodes and encodes again; the error is the offset of the first byte that is wrong.
fn canonical_base64(text: &str) -> Result<String, usize> {
    let joined;
    let text = match text.contains(['\r', '\n']) {
        true => {
            joined = text.replace(['\r', '\n'], "");
            &joined
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

fn entries<'de, 't, A: MapAccess<'de>>(
    state: &mut State<'t>,
    target: Target<'t>,
    fallback: Option<&'t Shape>,
    mut map: A,
) -> Result<Value, A::Error> {
    let mut entries = Map::new();
    while let Some(key) = map.next_key::<String>()? {
        if entries.contains_key(&key) {
            state.complain("duplicate", &key);
        }
        state.path.push(Step::Key(key));
        let value = map.next_value_seed(Seed { state, target })?;
        // The key travels on the path and back, which spares a copy.
        let Some(Step::Key(key)) = state.path.pop() else { break };
        let value = match (value, fallback) {
            (Value::Null, Some(shape)) => zero_entry(state.table, shape),
            (value, _) => value,
        };
        entries.insert(key, value);
    }
    Ok(Value::Object(entries))
}

fn visit_struct<'de, 't, A: MapAccess<'de>>(
    state: &mut State<'t>,
    id: TypeId,
    mut map: A,
) -> Result<Value, A::Error> {
    let table: &'t Table = state.table;
    let ty = table.get(id);
    let mut object = Map::new();
    let mut seen = Seen::default();
    while let Some(key) = map.next_key_seed(Key(ty))? {
        let (index, field) = match key {
            Ok(found) => found,
            Err(name) if ty.preserve_unknown => {
                let value = map.next_value_seed(Seed { state, target: Target::Shape(&Shape::Json) })?;
                object.insert(name, value);
                continue;
            }
            Err(name) => {
                state.complain("unknown", &name);
                map.next_value::<IgnoredAny>()?;
                continue;
            }
        };
        if !seen.insert(index) {
            state.complain("duplicate", &field.name);
            object.remove(&*field.name);
        }
        state.path.push(Step::Field(id, ty, field));
        let target = Target::of(table, id, field);
        let value = map.next_value_seed(Seed { state, target })?;
        state.path.pop();
        if let Some(value) = kept(field, value) {
            object.insert(field.name.to_string(), value);
        }
    }
    complete(table, ty, &mut object);
    Ok(Value::Object(object))
}

/// The fields met so far.
#[derive(Default)]
struct Seen {
    low: u64,
    high: Vec<usize>,
}

impl Seen {
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

/// Finds the field a key names, sparing the copy of the key.
struct Key<'t>(&'t Type);

impl<'de, 't> DeserializeSeed<'de> for Key<'t> {
    type Value = Result<(usize, &'t Field), String>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'t> Visitor<'_> for Key<'t> {
    type Value = Result<(usize, &'t Field), String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a field name")
    }

    fn visit_str<E>(self, name: &str) -> Result<Self::Value, E> {
        let found = self.0.fields.iter().enumerate().find(|(_, field)| &*field.name == name);
        Ok(found.ok_or_else(|| name.to_owned()))
    }
}
