//! The encoding of log records. Does no I/O.
//!
//! ```text
//! len u32 | prev u32 | crc u32 | head u32 |  body: kind u8, synced u64, revision u64, expires u64,
//!                                                  key length u32, key, value, 0xA5
//! ```
//!
//! `len` is the length of the body. `crc` covers the body and is seeded with `prev`, the `crc` of
//! the previous record, so records form a chain. `head` covers the first twelve bytes, so the
//! length can be trusted before the body is read. Both checksums are salted per file: a value that
//! looks like a record (by accident or intent) is not accepted as one. A body neither starts nor
//! ends with a zero byte, and a single bit error does not change that. The preallocated space after
//! the log is zeros, so a truncated record can be distinguished from a corrupt one.

/// The length of a record before its body.
pub const RECORD_HEADER_BYTES: usize = 16;
/// The maximum length of a body. A larger value is not a record header.
pub const MAX_BODY_BYTES: usize = 64 << 20;
/// The length of a body without key and value.
pub const BODY_OVERHEAD_BYTES: usize = FIXED_BODY_BYTES + 1;

const FIXED_BODY_BYTES: usize = 1 + 8 + 8 + 8 + 4;
const BODY_END_MARKER: u8 = 0xA5;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RecordKind {
    Put = 0x33,
    Delete = 0x35,
    /// Revisions up to `revision` may have been assigned to writes that are not on disk.
    Reserve = 0x36,
    /// The last record of a snapshot. `expires` holds the number of records before it.
    End = 0x39,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    pub kind: RecordKind,
    /// All of the file before this offset was synced before this record was written. Unreadable
    /// data before it is corruption, not an interrupted write.
    pub synced: u64,
    pub revision: u64,
    /// Unix seconds. 0: never.
    pub expires: u64,
    pub key: &'a str,
    pub value: &'a [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordHeader {
    pub len: usize,
    pub prev: u32,
    pub crc: u32,
}

/// Appends the record to `out`. Returns its CRC, which is `prev` of the next record.
pub fn encode(out: &mut Vec<u8>, salt: u32, prev: u32, record: &Record) -> u32 {
    let start = out.len();
    let len = BODY_OVERHEAD_BYTES + record.key.len() + record.value.len();
    out.reserve(RECORD_HEADER_BYTES + len);
    out.extend_from_slice(&(len as u32).to_le_bytes());
    out.extend_from_slice(&prev.to_le_bytes());
    out.extend_from_slice(&[0; 8]);
    out.push(record.kind as u8);
    out.extend_from_slice(&record.synced.to_le_bytes());
    out.extend_from_slice(&record.revision.to_le_bytes());
    out.extend_from_slice(&record.expires.to_le_bytes());
    out.extend_from_slice(&(record.key.len() as u32).to_le_bytes());
    out.extend_from_slice(record.key.as_bytes());
    out.extend_from_slice(record.value);
    out.push(BODY_END_MARKER);
    let crc = crc32c::crc32c_append(prev ^ salt, &out[start + RECORD_HEADER_BYTES..]);
    out[start + 8..start + 12].copy_from_slice(&crc.to_le_bytes());
    let header_crc = crc32c::crc32c_append(salt, &out[start..start + 12]);
    out[start + 12..start + 16].copy_from_slice(&header_crc.to_le_bytes());
    crc
}

/// `None` if the bytes are not a valid record header.
pub fn decode_header(bytes: &[u8; RECORD_HEADER_BYTES], salt: u32) -> Option<RecordHeader> {
    let read_u32 = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let len = read_u32(0) as usize;
    let valid_len = (BODY_OVERHEAD_BYTES..=MAX_BODY_BYTES).contains(&len);
    (valid_len && crc32c::crc32c_append(salt, &bytes[..12]) == read_u32(12)).then(|| RecordHeader {
        len,
        prev: read_u32(4),
        crc: read_u32(8),
    })
}

/// `None` if the body does not match the header.
pub fn decode_body<'a>(header: &RecordHeader, body: &'a [u8], salt: u32) -> Option<Record<'a>> {
    if body.len() != header.len || crc32c::crc32c_append(header.prev ^ salt, body) != header.crc {
        return None;
    }
    let kind = match body[0] {
        0x33 => RecordKind::Put,
        0x35 => RecordKind::Delete,
        0x36 => RecordKind::Reserve,
        0x39 => RecordKind::End,
        _ => return None,
    };
    let read_u64 = |at: usize| body[at..at + 8].try_into().ok().map(u64::from_le_bytes);
    let key_len = u32::from_le_bytes(body[25..FIXED_BODY_BYTES].try_into().ok()?) as usize;
    let rest = &body[FIXED_BODY_BYTES..body.len() - 1];
    if key_len > rest.len() {
        return None;
    }
    let (key, value) = rest.split_at(key_len);
    Some(Record {
        kind,
        synced: read_u64(1)?,
        revision: read_u64(9)?,
        expires: read_u64(17)?,
        key: std::str::from_utf8(key).ok()?,
        value,
    })
}

/// Decodes a complete record at the start of `bytes`, without checking the chain.
pub fn decode_record(bytes: &[u8], salt: u32) -> Option<Record<'_>> {
    let header = decode_header(bytes.first_chunk()?, salt)?;
    decode_body(&header, bytes.get(RECORD_HEADER_BYTES..RECORD_HEADER_BYTES + header.len)?, salt)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn decode_round_trips_and_detects_changed_bits(
            key in "[a-z/]{0,20}", value: Vec<u8>, salt: u32, prev: u32, revision: u64, bit: prop::sample::Index,
        ) {
            let record =
                Record { kind: RecordKind::Put, synced: 7, revision, expires: 9, key: &key, value: &value };
            let mut bytes = Vec::new();
            encode(&mut bytes, salt, prev, &record);
            prop_assert_eq!(decode_record(&bytes, salt), Some(record));
            let bit = bit.index(bytes.len() * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(decode_record(&bytes, salt), None);
            prop_assert!(bytes[RECORD_HEADER_BYTES] != 0 && bytes[bytes.len() - 1] != 0);
        }
    }

    #[test]
    fn rejects_zero_bytes() {
        assert_eq!(decode_record(&[0; 4096], 0), None);
    }
}
