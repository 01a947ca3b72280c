//! From protobuf to JSON, normalised on the way.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Number, Value};

use super::encode::{leading, levels};
use super::wire::{Reader, Wire};
use super::{ProtoError, complete, zero};
use crate::decode::MAX_DEPTH;
use crate::quantity;
use crate::table::{Alternative, Field, Shape, Table, TypeId};
use crate::time::Timestamp;
use crate::zero::{Target, kept, zero_entry};

pub(super) fn object(table: &Table, id: TypeId, bytes: &[u8]) -> Result<Value, ProtoError> {
    Decoder { table, depth: 0 }.object(id, bytes)
}

/// What one field's values have come to so far, by the field's place in its type.
type Slots = Vec<Option<Value>>;

#[derive(Clone, Copy)]
struct Decoder<'t> {
    table: &'t Table,
    depth: usize,
}

impl<'t> Decoder<'t> {
    fn deeper(self) -> Result<Decoder<'t>, ProtoError> {
        match self.depth < MAX_DEPTH {
            true => Ok(Decoder { depth: self.depth + 1, ..self }),
            false => Err(ProtoError::Depth),
        }
    }

    fn object(self, id: TypeId, bytes: &[u8]) -> Result<Value, ProtoError> {
        let ty = self.table.get(id);
        let mut slots: Slots = vec![None; ty.fields.len()];
        self.deeper()?.fields(id, bytes, (0, 0), &mut slots)?;
        let mut object = Map::new();
        for (field, value) in ty.fields.iter().zip(slots) {
            if let Some(value) = value.and_then(|value| kept(field, value)) {
                object.insert(field.name.to_string(), value);
            }
        }
        complete(self.table, ty, &mut object);
        Ok(Value::Object(object))
    }

    /// Reads the fields whose tags start with `prefix`, those of the message embedded at this level. Unknown
    /// ones are from a newer client and skipped.
    fn fields(
        self,
        id: TypeId,
        bytes: &[u8],
        (prefix, level): (u32, usize),
        slots: &mut Slots,
    ) -> Result<(), ProtoError> {
        let ty = self.table.get(id);
        let mut reader = Reader::new(bytes);
        while let Some((number, wire)) = reader.field()? {
            let Ok(number) = u8::try_from(number) else { continue };
            let tag = prefix << 8 | u32::from(number);
            let found = ty.fields.iter().position(|field| leading(field.tag, level) == Some(tag));
            let Some(index) = found else { continue };
            let field = &ty.fields[index];
            if levels(field.tag) > level + 1 {
                self.fields(id, wire.bytes(&field.name)?, (tag, level + 1), slots)?;
            } else {
                let target = Target::of(self.table, id, field);
                self.field(field, target, wire, &mut slots[index])?;
            }
        }
        Ok(())
    }

    /// Adds to a list or map; takes the place of anything else.
    fn field(
        self,
        field: &Field,
        target: Target<'_>,
        wire: Wire<'_>,
        slot: &mut Option<Value>,
    ) -> Result<(), ProtoError> {
        match target {
            Target::Shape(Shape::List { item, .. }) => {
                let list = slot.get_or_insert_with(|| Value::Array(Vec::new()));
                let Value::Array(list) = list else { return Ok(()) };
                // Numbers may come packed into one field.
                if let (Shape::Int32 | Shape::Int64 | Shape::Bool, Wire::Bytes(packed)) = (&**item, wire) {
                    let mut reader = Reader::new(packed);
                    while !reader.is_empty() {
                        list.push(self.value(field, item, Wire::Varint(reader.varint()?))?);
                    }
                } else {
                    list.push(self.value(field, item, wire)?);
                }
            }
            Target::Shape(Shape::Map { value: inner, .. }) => {
                let (key, value) = entry(field, wire)?;
                let value = match (&**inner, value) {
                    (inner, None) => zero_entry(self.table, inner),
                    (Shape::List { item, .. }, Some(wire)) => self.items(field, item, wire)?,
                    (inner, Some(wire)) => self.value(field, inner, wire)?,
                };
                insert(slot, key, value);
            }
            Target::MapOfEither(id, alternative) => {
                let (key, value) = entry(field, wire)?;
                let value = match value {
                    Some(wire) => self.either(field, id, alternative, wire)?,
                    None => Value::Null,
                };
                insert(slot, key, value);
            }
            Target::Either(id, alternative) => *slot = Some(self.either(field, id, alternative, wire)?),
            Target::Shape(shape) => *slot = Some(self.value(field, shape, wire)?),
        }
        Ok(())
    }

    /// A list inside of a map: a message with the items as field 1.
    fn items(self, field: &Field, item: &Shape, wire: Wire<'_>) -> Result<Value, ProtoError> {
        let mut reader = Reader::new(wire.bytes(&field.name)?);
        let mut items = Vec::new();
        while let Some((number, wire)) = reader.field()? {
            if number == 1 {
                items.push(self.value(field, item, wire)?);
            }
        }
        Ok(Value::Array(items))
    }

    fn either(
        self,
        field: &Field,
        id: TypeId,
        alternative: Alternative,
        wire: Wire<'_>,
    ) -> Result<Value, ProtoError> {
        let this = self.deeper()?;
        let mut reader = Reader::new(wire.bytes(&field.name)?);
        let mut value = match alternative {
            Alternative::Bool => Value::Bool(false),
            Alternative::Array | Alternative::Strings => Value::Null,
        };
        while let Some((number, wire)) = reader.field()? {
            match (alternative, number) {
                (Alternative::Bool, 1) if value.is_boolean() => {
                    value = Value::Bool(wire.integer(&field.name)? != 0)
                }
                (Alternative::Bool, 2) | (Alternative::Array | Alternative::Strings, 1) => {
                    value = this.object(id, wire.bytes(&field.name)?)?;
                }
                (Alternative::Array | Alternative::Strings, 2) => {
                    let item = match alternative {
                        Alternative::Strings => Value::from(wire.text(&field.name)?),
                        _ => this.object(id, wire.bytes(&field.name)?)?,
                    };
                    match &mut value {
                        Value::Array(list) => list.push(item),
                        other => *other = Value::Array(vec![item]),
                    }
                }
                _ => {}
            }
        }
        Ok(value)
    }

    fn value(self, field: &Field, shape: &Shape, wire: Wire<'_>) -> Result<Value, ProtoError> {
        let name = &*field.name;
        Ok(match shape {
            Shape::String | Shape::Duration => Value::from(wire.text(name)?),
            Shape::Bool => Value::Bool(wire.integer(name)? != 0),
            // As Go does, the upper half is dropped.
            Shape::Int32 => Value::from(wire.integer(name)? as i32),
            Shape::Int64 => Value::from(wire.integer(name)?),
            Shape::Double => double(wire.double(name)?),
            Shape::Bytes => Value::String(STANDARD.encode(wire.bytes(name)?)),
            Shape::Time => time(field, wire.bytes(name)?, false)?,
            Shape::MicroTime => time(field, wire.bytes(name)?, true)?,
            Shape::Quantity => {
                let text = one(wire.bytes(name)?)?.map_or(Ok("0"), |wire| wire.text(name))?;
                let text = quantity::canonical(text).map_err(|error| invalid(field, error))?;
                Value::String(text)
            }
            Shape::IntOrString => int_or_string(field, wire.bytes(name)?)?,
            Shape::RawExtension | Shape::Json | Shape::FieldsV1 => match one(wire.bytes(name)?)? {
                None => Value::Null,
                Some(raw) => match raw.bytes(name)? {
                    [] => Value::Null,
                    raw => serde_json::from_slice(raw).map_err(|error| invalid(field, error))?,
                },
            },
            Shape::Struct(id) => self.object(*id, wire.bytes(name)?)?,
            // Nothing nests these except a map's lists, which are read elsewhere.
            Shape::List { .. } | Shape::Map { .. } => zero(self.table, shape),
        })
    }
}

fn invalid(field: &Field, error: impl ToString) -> ProtoError {
    ProtoError::Value { field: field.name.to_string(), message: error.to_string() }
}

/// The last value of field 1.
fn one(bytes: &[u8]) -> Result<Option<Wire<'_>>, ProtoError> {
    let mut reader = Reader::new(bytes);
    let mut found = None;
    while let Some((number, wire)) = reader.field()? {
        if number == 1 {
            found = Some(wire);
        }
    }
    Ok(found)
}

/// The key and value of a map's entry.
fn entry<'b>(field: &Field, wire: Wire<'b>) -> Result<(String, Option<Wire<'b>>), ProtoError> {
    let mut reader = Reader::new(wire.bytes(&field.name)?);
    let (mut key, mut value) = ("", None);
    while let Some((number, wire)) = reader.field()? {
        match number {
            1 => key = wire.text(&field.name)?,
            2 => value = Some(wire),
            _ => {}
        }
    }
    Ok((key.to_owned(), value))
}

fn insert(slot: &mut Option<Value>, key: String, value: Value) {
    if let Value::Object(map) = slot.get_or_insert_with(|| Value::Object(Map::new())) {
        map.insert(key, value);
    }
}

/// Go writes a whole float without a point, and JSON cannot say infinity.
fn double(value: f64) -> Value {
    match value {
        value if value.fract() == 0.0 && value.abs() < 9e15 => Value::from(value as i64),
        value => Number::from_f64(value).map_or(Value::Null, Value::Number),
    }
}

fn time(field: &Field, bytes: &[u8], micros: bool) -> Result<Value, ProtoError> {
    if bytes.is_empty() {
        return Ok(Value::Null);
    }
    let mut reader = Reader::new(bytes);
    let (mut seconds, mut nanos) = (0, 0);
    while let Some((number, wire)) = reader.field()? {
        match number {
            1 => seconds = wire.integer(&field.name)?,
            2 => nanos = wire.integer(&field.name)?,
            _ => {}
        }
    }
    let time = u32::try_from(nanos).ok().and_then(|nanos| Timestamp::new(seconds, nanos));
    let time = time.ok_or_else(|| invalid(field, "time out of range"))?;
    Ok(match (time.is_zero(), micros) {
        (true, _) => Value::Null,
        (false, false) => Value::String(time.to_seconds()),
        (false, true) => Value::String(time.to_micros()),
    })
}

fn int_or_string(field: &Field, bytes: &[u8]) -> Result<Value, ProtoError> {
    let mut reader = Reader::new(bytes);
    let (mut is_text, mut number, mut text) = (false, 0, "");
    while let Some((tag, wire)) = reader.field()? {
        match tag {
            1 => is_text = wire.integer(&field.name)? != 0,
            2 => number = wire.integer(&field.name)? as i32,
            3 => text = wire.text(&field.name)?,
            _ => {}
        }
    }
    Ok(if is_text { Value::from(text) } else { Value::from(number) })
}
