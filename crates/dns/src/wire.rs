//! Messages of DNS (RFC 1035, 6891): reads questions, writes answers, and finds its way in answers of others without
//! understanding them. Written by hand since this is all that is needed of it; see docs/adr/0011.

mod encode;

pub use encode::{encode_error, encode_question, encode_reply};

/// How long the header is.
pub const HEADER_BYTES: usize = 12;
/// Types of records.
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

/// How an answer went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rcode {
    Ok = 0,
    FormatError = 1,
    ServerFailure = 2,
    NoSuchName = 3,
    NotImplemented = 4,
    Refused = 5,
}

/// The least a client takes over UDP, and the most we send it.
pub const MIN_UDP_BYTES: usize = 512;
pub const MAX_UDP_BYTES: usize = 4096;
/// What we say that we take.
const EDNS_UDP_BYTES: u16 = 1232;

/// A question as it came.
#[derive(Debug, PartialEq)]
pub struct Query<'a> {
    pub id: u16,
    pub recursion_desired: bool,
    /// In lower case, without the dot at its end. Labels that are no plain words make a name that is nobody's.
    pub name: String,
    pub record_type: u16,
    pub class: u16,
    /// The question's bytes, to be sent back as they are.
    pub question: &'a [u8],
    /// How many bytes the client takes over UDP, where it speaks EDNS.
    pub udp_size: Option<u16>,
    /// Whether the client wants signatures.
    pub dnssec_ok: bool,
}

impl Query<'_> {
    /// How long an answer over UDP may be.
    pub fn max_udp_reply_bytes(&self) -> usize {
        usize::from(self.udp_size.unwrap_or(0)).clamp(MIN_UDP_BYTES, MAX_UDP_BYTES)
    }
}

/// Reads a question. What is not even a header gets no answer; the rest at least a code.
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

/// A record of some message, only as far as one must know it to step over it.
#[derive(Debug, PartialEq)]
pub struct DnsRecordHeader {
    pub record_type: u16,
    pub class: u16,
    pub ttl: u32,
    /// Where the time to live stands.
    pub ttl_offset: usize,
    pub end: usize,
}

/// The records of an answer; `None` where it is broken.
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

/// Where what follows a name begins.
fn skip_name(bytes: &[u8], mut at: usize) -> Option<usize> {
    loop {
        match *bytes.get(at)? {
            0 => return Some(at + 1),
            length if length < 64 => at += 1 + usize::from(length),
            // The rest of the name is elsewhere.
            length if length >= 192 => return Some(at + 2),
            _ => return None,
        }
    }
}

/// The name of the only question, and where it ends. Nothing comes before it that it could refer to.
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
            // A dot or a blank inside a label is none of ours: it becomes something no name has.
            let is_plain = byte.is_ascii_graphic() && *byte != b'.';
            name.push(if is_plain { char::from(byte.to_ascii_lowercase()) } else { '?' });
        }
        at += 1 + length;
    }
}

/// The number of two bytes at a place.
pub fn read_u16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

#[cfg(test)]
pub(crate) mod tests;
