//! Messages of DNS (RFC 1035, 6891): reads questions, writes answers, and finds its way in answers of others without
//! understanding them. Written by hand since this is all that is needed of it; see docs/adr/0011.

mod write;

pub use write::{error, question, reply};

/// How long the header is.
pub const HEADER: usize = 12;
/// Types of records.
pub mod kind {
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
pub const INTERNET: u16 = 1;

/// How an answer went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Code {
    Ok = 0,
    Malformed = 1,
    Failed = 2,
    NoSuchName = 3,
    NotImplemented = 4,
    Refused = 5,
}

/// The least a client takes over UDP, and the most we send it.
pub const LEAST_UDP: usize = 512;
pub const MOST_UDP: usize = 4096;
/// What we say that we take.
const OWN_UDP: u16 = 1232;

/// A question as it came.
#[derive(Debug, PartialEq)]
pub struct Query<'a> {
    pub id: u16,
    pub wants_recursion: bool,
    /// In lower case, without the dot at its end. Labels that are no plain words make a name that is nobody's.
    pub name: String,
    pub kind: u16,
    pub class: u16,
    /// The question's bytes, to be sent back as they are.
    pub question: &'a [u8],
    /// How many bytes the client takes over UDP, where it speaks EDNS.
    pub udp: Option<u16>,
    /// Whether the client wants signatures.
    pub wants_signatures: bool,
}

impl Query<'_> {
    /// How long an answer over UDP may be.
    pub fn limit(&self) -> usize {
        usize::from(self.udp.unwrap_or(0)).clamp(LEAST_UDP, MOST_UDP)
    }
}

/// Reads a question. What is not even a header gets no answer; the rest at least a code.
pub fn query(bytes: &[u8]) -> Result<Query<'_>, Option<Code>> {
    let id = number(bytes, 0).ok_or(None)?;
    let flags = number(bytes, 2).ok_or(None)?;
    if bytes.len() < HEADER || flags & 0x8000 != 0 {
        return Err(None);
    }
    if flags & 0x7800 != 0 {
        return Err(Some(Code::NotImplemented));
    }
    let malformed = Some(Code::Malformed);
    if number(bytes, 4) != Some(1) || number(bytes, 6) != Some(0) {
        return Err(malformed);
    }
    let (name, end) = question_name(bytes).ok_or(malformed)?;
    let mut query = Query {
        id,
        wants_recursion: flags & 0x100 != 0,
        name,
        kind: number(bytes, end).ok_or(malformed)?,
        class: number(bytes, end + 2).ok_or(malformed)?,
        question: bytes.get(HEADER..end + 4).ok_or(malformed)?,
        udp: None,
        wants_signatures: false,
    };
    let more = usize::from(number(bytes, 8).unwrap_or(0)) + usize::from(number(bytes, 10).unwrap_or(0));
    let mut at = end + 4;
    for _ in 0..more {
        let record = record(bytes, at).ok_or(malformed)?;
        if record.kind == kind::OPT {
            query.udp = Some(record.class);
            query.wants_signatures = record.ttl & 0x8000 != 0;
        }
        at = record.end;
    }
    Ok(query)
}

/// A record of some message, only as far as one must know it to step over it.
#[derive(Debug, PartialEq)]
pub struct Stepped {
    pub kind: u16,
    pub class: u16,
    pub ttl: u32,
    /// Where the time to live stands.
    pub ttl_at: usize,
    pub end: usize,
}

/// The records of an answer; `None` where it is broken.
pub fn records(bytes: &[u8]) -> Option<Vec<Stepped>> {
    let mut at = HEADER;
    for _ in 0..number(bytes, 4)? {
        at = skip_name(bytes, at)? + 4;
    }
    let count = [6, 8, 10].iter().map(|at| number(bytes, *at).map(usize::from)).sum::<Option<usize>>()?;
    let mut records = Vec::new();
    for _ in 0..count {
        let record = record(bytes, at)?;
        at = record.end;
        records.push(record);
    }
    Some(records)
}

fn record(bytes: &[u8], at: usize) -> Option<Stepped> {
    let at = skip_name(bytes, at)?;
    let ttl = u32::from(number(bytes, at + 4)?) << 16 | u32::from(number(bytes, at + 6)?);
    let end = at + 10 + usize::from(number(bytes, at + 8)?);
    bytes.get(..end)?;
    Some(Stepped { kind: number(bytes, at)?, class: number(bytes, at + 2)?, ttl, ttl_at: at + 4, end })
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
fn question_name(bytes: &[u8]) -> Option<(String, usize)> {
    let (mut name, mut at) = (String::new(), HEADER);
    loop {
        let length = usize::from(*bytes.get(at)?);
        if length == 0 {
            return Some((name, at + 1));
        }
        if length > 63 || at - HEADER > 253 {
            return None;
        }
        if !name.is_empty() {
            name.push('.');
        }
        for byte in bytes.get(at + 1..at + 1 + length)? {
            // A dot or a blank inside a label is none of ours: it becomes something no name has.
            let plain = byte.is_ascii_graphic() && *byte != b'.';
            name.push(if plain { char::from(byte.to_ascii_lowercase()) } else { '?' });
        }
        at += 1 + length;
    }
}

/// The number of two bytes at a place.
pub fn number(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

#[cfg(test)]
pub(crate) mod tests;
