//! DNS messages (RFC 1035, RFC 6891): parses queries, encodes responses, and walks through upstream
//! responses without interpreting the record data. Hand-written because only this subset is needed;
//! see docs/adr/0011.

mod encode;

pub use encode::{encode_error, encode_question, encode_reply};

/// The size of the message header.
pub const HEADER_BYTES: usize = 12;
/// Record types.
pub mod record_type {
    pub const A: u16 = 1;
    pub const NS: u16 = 2;
    pub const CNAME: u16 = 5;
    pub const SOA: u16 = 6;
    pub const PTR: u16 = 12;
    pub const TXT: u16 = 16;
    pub const AAAA: u16 = 28;
    pub const SRV: u16 = 33;
    pub const OPT: u16 = 41;
    pub const ANY: u16 = 255;
}
pub const CLASS_INTERNET: u16 = 1;

/// Response codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rcode {
    Ok = 0,
    FormatError = 1,
    ServerFailure = 2,
    NoSuchName = 3,
    NotImplemented = 4,
    Refused = 5,
}

/// The minimum UDP size of clients, and the maximum size of UDP responses.
pub const MIN_UDP_BYTES: usize = 512;
pub const MAX_UDP_BYTES: usize = 4096;
/// The UDP size that this server advertises in EDNS.
const EDNS_UDP_BYTES: u16 = 1232;

/// A parsed query.
#[derive(Debug, PartialEq)]
pub struct Query<'a> {
    pub id: u16,
    pub recursion_desired: bool,
    /// In lower case, without trailing dot. Labels with special characters are replaced, so that
    /// they match no name.
    pub name: String,
    pub record_type: u16,
    pub class: u16,
    /// The raw question, which is copied into the response.
    pub question: &'a [u8],
    /// The client's UDP size, if it uses EDNS.
    pub udp_size: Option<u16>,
    /// The DNSSEC OK bit.
    pub dnssec_ok: bool,
}

impl Query<'_> {
    /// The maximum size of a UDP response.
    pub fn max_udp_reply_bytes(&self) -> usize {
        usize::from(self.udp_size.unwrap_or(0)).clamp(MIN_UDP_BYTES, MAX_UDP_BYTES)
    }
}

/// Parses a query. The error is the response code, or `None` if no response must be sent (a
/// truncated header, or a response).
pub fn parse_query(bytes: &[u8]) -> Result<Query<'_>, Option<Rcode>> {
    let id = read_u16(bytes, 0).ok_or(None)?;
    let flags = read_u16(bytes, 2).ok_or(None)?;
    if bytes.len() < HEADER_BYTES || flags & 0x8000 != 0 {
        return Err(None);
    }
    if flags & 0x7800 != 0 {
        return Err(Some(Rcode::NotImplemented));
    }
    let malformed = Some(Rcode::FormatError);
    if read_u16(bytes, 4) != Some(1) || read_u16(bytes, 6) != Some(0) {
        return Err(malformed);
    }
    let (name, end) = parse_question_name(bytes).ok_or(malformed)?;
    let mut query = Query {
        id,
        recursion_desired: flags & 0x100 != 0,
        name,
        record_type: read_u16(bytes, end).ok_or(malformed)?,
        class: read_u16(bytes, end + 2).ok_or(malformed)?,
        question: bytes.get(HEADER_BYTES..end + 4).ok_or(malformed)?,
        udp_size: None,
        dnssec_ok: false,
    };
    let record_count =
        usize::from(read_u16(bytes, 8).unwrap_or(0)) + usize::from(read_u16(bytes, 10).unwrap_or(0));
    let mut at = end + 4;
    for _ in 0..record_count {
        let record = parse_record(bytes, at).ok_or(malformed)?;
        if record.record_type == record_type::OPT {
            query.udp_size = Some(record.class);
            query.dnssec_ok = record.ttl & 0x8000 != 0;
        }
        at = record.end;
    }
    Ok(query)
}

/// The fixed fields of a record, without its data.
#[derive(Debug, PartialEq)]
pub struct DnsRecordHeader {
    pub record_type: u16,
    pub class: u16,
    pub ttl: u32,
    /// The offset of the TTL field.
    pub ttl_offset: usize,
    pub end: usize,
}

/// The records of a message. `None` if it is malformed.
pub fn parse_records(bytes: &[u8]) -> Option<Vec<DnsRecordHeader>> {
    let mut at = HEADER_BYTES;
    for _ in 0..read_u16(bytes, 4)? {
        at = skip_name(bytes, at)? + 4;
    }
    let count = [6, 8, 10].iter().map(|at| read_u16(bytes, *at).map(usize::from)).sum::<Option<usize>>()?;
    let mut records = Vec::new();
    for _ in 0..count {
        let record = parse_record(bytes, at)?;
        at = record.end;
        records.push(record);
    }
    Some(records)
}

fn parse_record(bytes: &[u8], at: usize) -> Option<DnsRecordHeader> {
    let at = skip_name(bytes, at)?;
    let ttl = u32::from(read_u16(bytes, at + 4)?) << 16 | u32::from(read_u16(bytes, at + 6)?);
    let end = at + 10 + usize::from(read_u16(bytes, at + 8)?);
    bytes.get(..end)?;
    Some(DnsRecordHeader {
        record_type: read_u16(bytes, at)?,
        class: read_u16(bytes, at + 2)?,
        ttl,
        ttl_offset: at + 4,
        end,
    })
}

/// The offset after a name.
fn skip_name(bytes: &[u8], mut at: usize) -> Option<usize> {
    loop {
        match *bytes.get(at)? {
            0 => return Some(at + 1),
            length if length < 64 => at += 1 + usize::from(length),
            // A compression pointer ends the name.
            length if length >= 192 => return Some(at + 2),
            _ => return None,
        }
    }
}

/// Parses the name of the question and returns its end. The question is the first name in a
/// message, so it cannot use compression.
fn parse_question_name(bytes: &[u8]) -> Option<(String, usize)> {
    let (mut name, mut at) = (String::new(), HEADER_BYTES);
    loop {
        let length = usize::from(*bytes.get(at)?);
        if length == 0 {
            return Some((name, at + 1));
        }
        if length > 63 || at - HEADER_BYTES > 253 {
            return None;
        }
        if !name.is_empty() {
            name.push('.');
        }
        for byte in bytes.get(at + 1..at + 1 + length)? {
            // Dots and other special characters inside a label become `?`, which matches no name.
            let is_plain = byte.is_ascii_graphic() && *byte != b'.';
            name.push(if is_plain { char::from(byte.to_ascii_lowercase()) } else { '?' });
        }
        at += 1 + length;
    }
}

/// Reads a 16-bit number at an offset.
pub fn read_u16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

#[cfg(test)]
pub(crate) mod tests;
