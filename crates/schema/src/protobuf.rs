//! The protobuf form of the built-in types, the envelope around it and the frames of a watch.
//!
//! Upstream's messages are made by gogo/protobuf for proto2: what is no pointer in Go is always written, zero
//! or not, and reads as absent when it is zero.

mod decode;
mod encode;
#[cfg(test)]
mod tests;
mod wire;

use serde_json::Value;

use crate::table::{Table, TypeId};
use crate::zero::{add_always_present, zero_value};
use wire::Reader;
pub use wire::Writer;

/// What every protobuf body starts with.
pub const MAGIC: [u8; 4] = *b"k8s\0";

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtoError {
    #[error("provided data does not appear to be a protobuf message, expected prefix [107 56 115 0]")]
    Magic,
    #[error("unexpected EOF")]
    Truncated,
    #[error("proto: integer overflow")]
    Overflow,
    #[error("proto: illegal wireType {0}")]
    WireType(u8),
    #[error("proto: wrong wireType = {wire} for field {field}")]
    WrongWireType { wire: u8, field: String },
    #[error("proto: illegal tag")]
    IllegalTag,
    #[error("proto: field {0} contains invalid UTF-8")]
    Utf8(String),
    #[error("exceeded max depth")]
    Depth,
    #[error("field {field}: {message}")]
    Value { field: String, message: String },
}

/// `runtime.Unknown`: a body with the name of its type.
#[derive(Debug, PartialEq, Eq)]
pub struct Envelope<'b> {
    pub api_version: &'b str,
    pub kind: &'b str,
    pub raw: &'b [u8],
    pub content_encoding: &'b str,
    pub content_type: &'b str,
}

/// Whether a type has a protobuf form: `Table` and discovery's documents do not.
pub fn has_protobuf(table: &Table, ty: TypeId) -> bool {
    let type_meta = |name: &str| name == "kind" || name == "apiVersion";
    table.get(ty).fields.iter().all(|field| field.tag != 0 || type_meta(&field.name))
}

/// The message for a value that was decoded or normalised as `ty`.
pub fn to_protobuf(table: &Table, ty: TypeId, value: &Value) -> Vec<u8> {
    let mut writer = Writer::default();
    encode::encode_struct(table, ty, value, &mut writer, 0);
    writer.bytes
}

/// The value of a message, normalised. `kind` and `apiVersion` are in the envelope and left out here.
pub fn from_protobuf(table: &Table, ty: TypeId, bytes: &[u8]) -> Result<Value, ProtoError> {
    decode::decode_struct(table, ty, bytes)
}

/// A body: the magic, the name of the type and the message.
pub fn encode_envelope(api_version: &str, kind: &str, raw: &[u8]) -> Vec<u8> {
    let mut writer = Writer { bytes: Vec::with_capacity(raw.len() + 64) };
    writer.bytes.extend(MAGIC);
    writer.message(1, |type_meta| {
        type_meta.bytes(1, api_version.as_bytes());
        type_meta.bytes(2, kind.as_bytes());
    });
    writer.bytes(2, raw);
    writer.bytes(3, b"");
    writer.bytes(4, b"");
    writer.bytes
}

/// Takes a body apart.
pub fn decode_envelope(bytes: &[u8]) -> Result<Envelope<'_>, ProtoError> {
    let rest = bytes.strip_prefix(&MAGIC).ok_or(ProtoError::Magic)?;
    let mut envelope =
        Envelope { api_version: "", kind: "", raw: &[], content_encoding: "", content_type: "" };
    let mut reader = Reader::new(rest);
    while let Some((field, value)) = reader.field()? {
        match field {
            1 => {
                let mut type_meta = Reader::new(value.bytes("typeMeta")?);
                while let Some((field, value)) = type_meta.field()? {
                    match field {
                        1 => envelope.api_version = value.text("apiVersion")?,
                        2 => envelope.kind = value.text("kind")?,
                        _ => {}
                    }
                }
            }
            2 => envelope.raw = value.bytes("raw")?,
            3 => envelope.content_encoding = value.text("contentEncoding")?,
            4 => envelope.content_type = value.text("contentType")?,
            _ => {}
        }
    }
    Ok(envelope)
}

/// One event of a watch: its length, its type and an object, which is a body of its own.
pub fn watch_frame(event: &str, object: &[u8]) -> Vec<u8> {
    let mut writer = Writer { bytes: Vec::with_capacity(object.len() + 32) };
    writer.bytes.extend([0; 4]);
    writer.bytes(1, event.as_bytes());
    writer.message(2, |raw| raw.bytes(1, object));
    let length = u32::try_from(writer.bytes.len() - 4).unwrap_or(u32::MAX);
    writer.bytes[..4].copy_from_slice(&length.to_be_bytes());
    writer.bytes
}
