//! Encodes JSON values as protobuf. A value that does not match its shape is omitted; decoded values
//! always match.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use super::wire::Writer;
use crate::decode::MAX_DEPTH;
use crate::table::{Field, SchemaOr, Shape, Table, TypeId};
use crate::time::Timestamp;
use crate::zero::Target;

static NULL: Value = Value::Null;

/// Encodes the fields of a struct. Structs below [`MAX_DEPTH`] are omitted; decoding rejects them.
pub(super) fn encode_struct(table: &Table, id: TypeId, value: &Value, writer: &mut Writer, depth: usize) {
    if depth > MAX_DEPTH {
        return;
    }
    encode_fields(&Encoder { table, id, depth }, &table.get(id).fields, value, writer, 0);
}

struct Encoder<'t> {
    table: &'t Table,
    id: TypeId,
    depth: usize,
}

/// `level` is the number of embedded messages around these fields. Fields of the same embedded message
/// are adjacent.
fn encode_fields(encoder: &Encoder<'_>, fields_: &[Field], value: &Value, writer: &mut Writer, level: usize) {
    let embedded_tag = |field: &Field| tag_prefix(field.tag, level).unwrap_or(0) & 0xff;
    for group in fields_.chunk_by(|a, b| embedded_tag(a) == embedded_tag(b)) {
        let tag = embedded_tag(&group[0]);
        if tag == 0 {
            continue;
        }
        if tag_levels(group[0].tag) > level + 1 {
            writer.message(tag, |inner| encode_fields(encoder, group, value, inner, level + 1));
            continue;
        }
        for field in group {
            let value = value.get(&*field.name).unwrap_or(&NULL);
            if value.is_null() && field.pointer {
                continue;
            }
            encoder.encode_target(tag, Target::for_field(encoder.table, encoder.id, field), value, writer);
        }
    }
}

/// The number of field numbers in a tag: one per byte, the outermost message in the highest byte.
pub(super) fn tag_levels(tag: u32) -> usize {
    4 - tag.leading_zeros() as usize / 8
}

/// The field numbers of a tag down to this level.
pub(super) fn tag_prefix(tag: u32, level: usize) -> Option<u32> {
    let levels_below = tag_levels(tag).checked_sub(level + 1)?;
    Some(tag >> (8 * levels_below))
}

impl Encoder<'_> {
    fn encode_target(&self, tag: u32, target: Target<'_>, value: &Value, writer: &mut Writer) {
        match target {
            Target::Shape(shape) => self.encode_value(tag, shape, value, writer),
            Target::SchemaOr(id, schema_or) if !value.is_null() => {
                writer.message(tag, |writer| self.encode_schema_or(id, schema_or, value, writer));
            }
            Target::SchemaOr(..) => {}
            Target::MapOfSchemaOr(id, schema_or) => {
                for (key, value) in value.as_object().into_iter().flatten() {
                    writer.message(tag, |entry| {
                        entry.bytes(1, key.as_bytes());
                        entry.message(2, |writer| self.encode_schema_or(id, schema_or, value, writer));
                    });
                }
            }
        }
    }

    /// The struct is field 1 and the alternative is field 2, except for [`SchemaOr::Bool`], where the
    /// bool is field 1.
    fn encode_schema_or(&self, id: TypeId, schema_or: SchemaOr, value: &Value, writer: &mut Writer) {
        let depth = self.depth + 1;
        let schema = |tag, value: &Value, writer: &mut Writer| {
            writer.message(tag, |writer| encode_struct(self.table, id, value, writer, depth));
        };
        match (schema_or, value) {
            (SchemaOr::Bool, Value::Object(_)) => {
                writer.varint(1, 1);
                schema(2, value, writer);
            }
            (SchemaOr::Bool, _) => writer.varint(1, i64::from(value.as_bool().unwrap_or(false))),
            (_, Value::Object(_)) => schema(1, value, writer),
            (SchemaOr::Array, _) => {
                value.as_array().into_iter().flatten().for_each(|value| schema(2, value, writer));
            }
            (SchemaOr::StringArray, _) => {
                for text in value.as_array().into_iter().flatten().filter_map(Value::as_str) {
                    writer.bytes(2, text.as_bytes());
                }
            }
        }
    }

    fn encode_value(&self, tag: u32, shape: &Shape, value: &Value, writer: &mut Writer) {
        match shape {
            Shape::String => writer.bytes(tag, value.as_str().unwrap_or_default().as_bytes()),
            Shape::Bool => writer.varint(tag, i64::from(value.as_bool().unwrap_or(false))),
            Shape::Int32 | Shape::Int64 => writer.varint(tag, value.as_i64().unwrap_or(0)),
            Shape::Double => writer.double(tag, value.as_f64().unwrap_or(0.0)),
            Shape::Bytes => {
                if let Some(bytes) = value.as_str().and_then(|text| STANDARD.decode(text).ok()) {
                    writer.bytes(tag, &bytes);
                }
            }
            Shape::Time => writer.message(tag, |writer| {
                if let Some(time) = value.as_str().and_then(|text| Timestamp::parse(text).ok()) {
                    encode_timestamp(time.seconds, 0, writer);
                }
            }),
            Shape::MicroTime => writer.message(tag, |writer| {
                if let Some(time) = value.as_str().and_then(|text| Timestamp::parse_micro(text).ok()) {
                    encode_timestamp(time.seconds, time.nanos, writer);
                }
            }),
            // No built-in type with a protobuf encoding has a duration.
            Shape::Duration => {}
            Shape::Quantity => {
                writer.message(tag, |writer| writer.bytes(1, value.as_str().unwrap_or("0").as_bytes()));
            }
            Shape::IntOrString => writer.message(tag, |writer| {
                writer.varint(1, i64::from(value.is_string()));
                writer.varint(2, value.as_i64().unwrap_or(0));
                writer.bytes(3, value.as_str().unwrap_or_default().as_bytes());
            }),
            Shape::RawExtension | Shape::Json | Shape::FieldsV1 => writer.message(tag, |writer| {
                if !value.is_null() {
                    writer.bytes(1, value.to_string().as_bytes());
                }
            }),
            Shape::Struct(id) => {
                writer.message(tag, |writer| encode_struct(self.table, *id, value, writer, self.depth + 1));
            }
            Shape::List { item, .. } => {
                for value in value.as_array().into_iter().flatten() {
                    self.encode_value(tag, item, value, writer);
                }
            }
            Shape::Map { value: inner, .. } => {
                for (key, value) in value.as_object().into_iter().flatten() {
                    writer.message(tag, |entry| {
                        entry.bytes(1, key.as_bytes());
                        match &**inner {
                            // A list that is a map value is a message of its own.
                            list @ Shape::List { .. } => {
                                entry.message(2, |items| self.encode_value(1, list, value, items))
                            }
                            inner => self.encode_value(2, inner, value, entry),
                        }
                    });
                }
            }
        }
    }
}

fn encode_timestamp(seconds: i64, nanos: u32, writer: &mut Writer) {
    writer.varint(1, seconds);
    writer.varint(2, i64::from(nanos));
}
