//! The protobuf wire format: varints, tags and lengths.

use super::ProtoError;

/// Appends fields. Also used for messages that are not in the schema table.
#[derive(Default)]
pub struct Writer {
    pub bytes: Vec<u8>,
}

impl Writer {
    fn raw_varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.bytes.push((value & 0x7f) as u8 | 0x80);
            value >>= 7;
        }
        self.bytes.push(value as u8);
    }

    fn tag(&mut self, field: u32, wire: u8) {
        self.raw_varint(u64::from(field) << 3 | u64::from(wire));
    }

    /// Negative numbers take ten bytes, as all proto2 integers.
    pub fn varint(&mut self, field: u32, value: i64) {
        self.tag(field, 0);
        self.raw_varint(value as u64);
    }

    pub fn double(&mut self, field: u32, value: f64) {
        self.tag(field, 1);
        self.bytes.extend(value.to_le_bytes());
    }

    pub fn bytes(&mut self, field: u32, bytes: &[u8]) {
        self.tag(field, 2);
        self.raw_varint(bytes.len() as u64);
        self.bytes.extend_from_slice(bytes);
    }

    /// Encodes the message in place with one byte reserved for the length, and shifts it only if the
    /// length needs more bytes.
    pub fn message(&mut self, field: u32, write: impl FnOnce(&mut Writer)) {
        self.tag(field, 2);
        let start = self.bytes.len();
        self.bytes.push(0);
        write(self);
        let length = self.bytes.len() - start - 1;
        if length < 0x80 {
            self.bytes[start] = length as u8;
            return;
        }
        let mut prefix = Writer::default();
        prefix.raw_varint(length as u64);
        self.bytes.splice(start..=start, prefix.bytes);
    }
}

pub(super) struct Reader<'b> {
    rest: &'b [u8],
}

/// The undecoded value of a field.
#[derive(Clone, Copy)]
pub(super) enum WireValue<'b> {
    Varint(u64),
    Fixed64(u64),
    Bytes(&'b [u8]),
    Fixed32,
}

impl<'b> Reader<'b> {
    pub fn new(rest: &'b [u8]) -> Reader<'b> {
        Reader { rest }
    }

    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// The number and value of the next field, or `None` at the end.
    pub fn field(&mut self) -> Result<Option<(u32, WireValue<'b>)>, ProtoError> {
        if self.rest.is_empty() {
            return Ok(None);
        }
        let tag = self.varint()?;
        let field = u32::try_from(tag >> 3).ok().filter(|field| *field > 0).ok_or(ProtoError::IllegalTag)?;
        let value = match (tag & 7) as u8 {
            0 => WireValue::Varint(self.varint()?),
            1 => {
                let bytes = self.read_bytes(8)?;
                WireValue::Fixed64(u64::from_le_bytes(bytes.try_into().map_err(|_| ProtoError::Truncated)?))
            }
            2 => {
                let length = usize::try_from(self.varint()?).map_err(|_| ProtoError::Truncated)?;
                WireValue::Bytes(self.read_bytes(length)?)
            }
            5 => {
                self.read_bytes(4)?;
                WireValue::Fixed32
            }
            // Groups (wire types 3 and 4), which upstream never writes.
            wire => return Err(ProtoError::WireType(wire)),
        };
        Ok(Some((field, value)))
    }

    pub fn varint(&mut self) -> Result<u64, ProtoError> {
        let mut value = 0;
        for (at, byte) in self.rest.iter().enumerate().take(10) {
            value |= u64::from(byte & 0x7f) << (7 * at);
            if byte & 0x80 == 0 {
                self.rest = &self.rest[at + 1..];
                return Ok(value);
            }
        }
        Err(if self.rest.len() < 10 { ProtoError::Truncated } else { ProtoError::Overflow })
    }

    fn read_bytes(&mut self, length: usize) -> Result<&'b [u8], ProtoError> {
        let (bytes, rest) = self.rest.split_at_checked(length).ok_or(ProtoError::Truncated)?;
        self.rest = rest;
        Ok(bytes)
    }
}

impl<'b> WireValue<'b> {
    fn wrong_wire_type<T>(self, field: &str) -> Result<T, ProtoError> {
        let wire = match self {
            WireValue::Varint(_) => 0,
            WireValue::Fixed64(_) => 1,
            WireValue::Bytes(_) => 2,
            WireValue::Fixed32 => 5,
        };
        Err(ProtoError::WrongWireType { wire, field: field.to_owned() })
    }

    pub fn bytes(self, field: &str) -> Result<&'b [u8], ProtoError> {
        match self {
            WireValue::Bytes(bytes) => Ok(bytes),
            other => other.wrong_wire_type(field),
        }
    }

    pub fn text(self, field: &str) -> Result<&'b str, ProtoError> {
        str::from_utf8(self.bytes(field)?).map_err(|_| ProtoError::Utf8(field.to_owned()))
    }

    pub fn integer(self, field: &str) -> Result<i64, ProtoError> {
        match self {
            WireValue::Varint(value) => Ok(value as i64),
            other => other.wrong_wire_type(field),
        }
    }

    pub fn double(self, field: &str) -> Result<f64, ProtoError> {
        match self {
            WireValue::Fixed64(bits) => Ok(f64::from_bits(bits)),
            other => other.wrong_wire_type(field),
        }
    }
}
