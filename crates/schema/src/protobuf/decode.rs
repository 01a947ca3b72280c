//! Decodes protobuf into normalized JSON values.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Number, Value};

use super::encode::{tag_levels, tag_prefix};
use super::wire::{Reader, WireValue};
use super::{ProtoError, add_always_present, zero_value};
use crate::decode::MAX_DEPTH;
use crate::quantity;
use crate::table::{Field, SchemaOr, Shape, Table, TypeId};
use crate::time::Timestamp;
use crate::zero::{Target, omit_empty, zero_map_value};

pub(super) fn decode_struct(table: &Table, id: TypeId, bytes: &[u8]) -> Result<Value, ProtoError> {
    Decoder { table, depth: 0 }.decode_struct(id, bytes)
}

/// The decoded value of each field, by the index of the field in its type.
type FieldValues = Vec<Option<Value>>;

#[derive(Clone, Copy)]
struct Decoder<'t> {
    table: &'t Table,
    depth: usize,
}

impl<'t> Decoder<'t> {
    fn enter(self) -> Result<Decoder<'t>, ProtoError> {
        match self.depth < MAX_DEPTH {
            true => Ok(Decoder { depth: self.depth + 1, ..self }),
            false => Err(ProtoError::Depth),
        }
    }

    fn decode_struct(self, id: TypeId, bytes: &[u8]) -> Result<Value, ProtoError> {
        let ty = self.table.get(id);
        let mut slots: FieldValues = vec![None; ty.fields.len()];
        self.enter()?.decode_fields(id, bytes, (0, 0), &mut slots)?;
        let mut object = Map::new();
        for (field, value) in ty.fields.iter().zip(slots) {
            if let Some(value) = value.and_then(|value| omit_empty(field, value)) {
                object.insert(field.name.to_string(), value);
            }
        }
        add_always_present(self.table, ty, &mut object);
        Ok(Value::Object(object))
    }

    /// Decodes the fields whose tags start with `prefix`, which are those of the embedded message at
    /// this level. Unknown fields come from newer clients and are skipped.
    fn decode_fields(
        self,
        id: TypeId,
        bytes: &[u8],
        (prefix, level): (u32, usize),
        slots: &mut FieldValues,
    ) -> Result<(), ProtoError> {
        let ty = self.table.get(id);
        let mut reader = Reader::new(bytes);
        while let Some((number, wire)) = reader.field()? {
            let Ok(number) = u8::try_from(number) else { continue };
            let tag = prefix << 8 | u32::from(number);
            let found = ty.fields.iter().position(|field| tag_prefix(field.tag, level) == Some(tag));
            let Some(index) = found else { continue };
            let field = &ty.fields[index];
            if tag_levels(field.tag) > level + 1 {
                self.decode_fields(id, wire.bytes(&field.name)?, (tag, level + 1), slots)?;
            } else {
                let target = Target::for_field(self.table, id, field);
                self.decode_field(field, target, wire, &mut slots[index])?;
            }
        }
        Ok(())
    }

    /// Appends to a list or map; replaces any other value.
    fn decode_field(
        self,
        field: &Field,
        target: Target<'_>,
        wire: WireValue<'_>,
        slot: &mut Option<Value>,
    ) -> Result<(), ProtoError> {
        match target {
            Target::Shape(Shape::List { item, .. }) => {
                let list = slot.get_or_insert_with(|| Value::Array(Vec::new()));
                let Value::Array(list) = list else { return Ok(()) };
                // A repeated number may be packed into one length-delimited field.
                if let (Shape::Int32 | Shape::Int64 | Shape::Bool, WireValue::Bytes(packed)) = (&**item, wire)
                {
                    let mut reader = Reader::new(packed);
                    while !reader.is_empty() {
                        list.push(self.decode_value(field, item, WireValue::Varint(reader.varint()?))?);
                    }
                } else {
                    list.push(self.decode_value(field, item, wire)?);
                }
            }
            Target::Shape(Shape::Map { value: inner, .. }) => {
                let (key, value) = decode_entry(field, wire)?;
                let value = match (&**inner, value) {
                    (inner, None) => zero_map_value(self.table, inner),
                    (Shape::List { item, .. }, Some(wire)) => self.decode_items(field, item, wire)?,
                    (inner, Some(wire)) => self.decode_value(field, inner, wire)?,
                };
                insert_entry(slot, key, value);
            }
            Target::MapOfSchemaOr(id, schema_or) => {
                let (key, value) = decode_entry(field, wire)?;
                let value = match value {
                    Some(wire) => self.decode_schema_or(field, id, schema_or, wire)?,
                    None => Value::Null,
                };
                insert_entry(slot, key, value);
            }
            Target::SchemaOr(id, schema_or) => {
                *slot = Some(self.decode_schema_or(field, id, schema_or, wire)?)
            }
            Target::Shape(shape) => *slot = Some(self.decode_value(field, shape, wire)?),
        }
        Ok(())
    }

    /// Decodes a list that is a map value: a message whose field 1 holds the items.
    fn decode_items(self, field: &Field, item: &Shape, wire: WireValue<'_>) -> Result<Value, ProtoError> {
        let mut reader = Reader::new(wire.bytes(&field.name)?);
        let mut items = Vec::new();
        while let Some((number, wire)) = reader.field()? {
            if number == 1 {
                items.push(self.decode_value(field, item, wire)?);
            }
        }
        Ok(Value::Array(items))
    }

    fn decode_schema_or(
        self,
        field: &Field,
        id: TypeId,
        schema_or: SchemaOr,
        wire: WireValue<'_>,
    ) -> Result<Value, ProtoError> {
        let this = self.enter()?;
        let mut reader = Reader::new(wire.bytes(&field.name)?);
        let mut value = match schema_or {
            SchemaOr::Bool => Value::Bool(false),
            SchemaOr::Array | SchemaOr::StringArray => Value::Null,
        };
        while let Some((number, wire)) = reader.field()? {
            match (schema_or, number) {
                (SchemaOr::Bool, 1) if value.is_boolean() => {
                    value = Value::Bool(wire.integer(&field.name)? != 0)
                }
                (SchemaOr::Bool, 2) | (SchemaOr::Array | SchemaOr::StringArray, 1) => {
                    value = this.decode_struct(id, wire.bytes(&field.name)?)?;
                }
                (SchemaOr::Array | SchemaOr::StringArray, 2) => {
                    let item = match schema_or {
                        SchemaOr::StringArray => Value::from(wire.text(&field.name)?),
                        _ => this.decode_struct(id, wire.bytes(&field.name)?)?,
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

    fn decode_value(self, field: &Field, shape: &Shape, wire: WireValue<'_>) -> Result<Value, ProtoError> {
        let name = &*field.name;
        Ok(match shape {
            Shape::String | Shape::Duration => Value::from(wire.text(name)?),
            Shape::Bool => Value::Bool(wire.integer(name)? != 0),
            // Go truncates to the lower 32 bits, too.
            Shape::Int32 => Value::from(wire.integer(name)? as i32),
            Shape::Int64 => Value::from(wire.integer(name)?),
            Shape::Double => json_number(wire.double(name)?),
            Shape::Bytes => Value::String(STANDARD.encode(wire.bytes(name)?)),
            Shape::Time => decode_time(field, wire.bytes(name)?, false)?,
            Shape::MicroTime => decode_time(field, wire.bytes(name)?, true)?,
            Shape::Quantity => {
                let text = first_field(wire.bytes(name)?)?.map_or(Ok("0"), |wire| wire.text(name))?;
                let text = quantity::canonicalize(text).map_err(|error| invalid(field, error))?;
                Value::String(text)
            }
            Shape::IntOrString => decode_int_or_string(field, wire.bytes(name)?)?,
            Shape::RawExtension | Shape::Json | Shape::FieldsV1 => match first_field(wire.bytes(name)?)? {
                None => Value::Null,
                Some(raw) => match raw.bytes(name)? {
                    [] => Value::Null,
                    raw => serde_json::from_slice(raw).map_err(|error| invalid(field, error))?,
                },
            },
            Shape::Struct(id) => self.decode_struct(*id, wire.bytes(name)?)?,
            // A list or map nested in another value only occurs as a list in a map, which
            // `decode_items` handles.
            Shape::List { .. } | Shape::Map { .. } => zero_value(self.table, shape),
        })
    }
}

fn invalid(field: &Field, error: impl ToString) -> ProtoError {
    ProtoError::Value { field: field.name.to_string(), message: error.to_string() }
}

/// The last value of field 1.
fn first_field(bytes: &[u8]) -> Result<Option<WireValue<'_>>, ProtoError> {
    let mut reader = Reader::new(bytes);
    let mut found = None;
    while let Some((number, wire)) = reader.field()? {
        if number == 1 {
            found = Some(wire);
        }
    }
    Ok(found)
}

/// The key and value of a map entry.
fn decode_entry<'b>(
    field: &Field,
    wire: WireValue<'b>,
) -> Result<(String, Option<WireValue<'b>>), ProtoError> {
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

fn insert_entry(slot: &mut Option<Value>, key: String, value: Value) {
    if let Value::Object(map) = slot.get_or_insert_with(|| Value::Object(Map::new())) {
        map.insert(key, value);
    }
}

/// Go prints a float with an integral value without a decimal point. JSON has no infinity.
fn json_number(value: f64) -> Value {
    match value {
        value if value.fract() == 0.0 && value.abs() < 9e15 => Value::from(value as i64),
        value => Number::from_f64(value).map_or(Value::Null, Value::Number),
    }
}

fn decode_time(field: &Field, bytes: &[u8], micros: bool) -> Result<Value, ProtoError> {
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

fn decode_int_or_string(field: &Field, bytes: &[u8]) -> Result<Value, ProtoError> {
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
