//! Encodes messages.

use std::collections::HashMap;

use super::{CLASS_INTERNET, EDNS_UDP_BYTES, Query, Rcode, record_type};
use crate::answer::{Answer, Record, RecordData};

const RESPONSE: u16 = 0x8000;
const AUTHORITATIVE: u16 = 0x400;
const TRUNCATED: u16 = 0x200;
const RECURSION_DESIRED: u16 = 0x100;
const RECURSION_AVAILABLE: u16 = 0x80;
/// The size of the OPT record for EDNS.
const OPT_LENGTH: usize = 11;

/// Encodes a response of up to `limit` bytes. Records that do not fit are omitted, and the TC bit
/// is set.
pub fn encode_reply(query: &Query<'_>, answer: &Answer, limit: usize) -> Vec<u8> {
    let mut flags = RESPONSE | RECURSION_AVAILABLE | answer.code as u16;
    if answer.authoritative {
        flags |= AUTHORITATIVE;
    }
    if query.recursion_desired {
        flags |= RECURSION_DESIRED;
    }
    let mut out = Writer { bytes: header(query.id, flags), name_offsets: HashMap::new() };
    out.bytes.extend(query.question);
    out.bytes[5] = 1;
    out.index_question_name(&query.name);
    let max_bytes = limit.saturating_sub(if query.udp_size.is_some() { OPT_LENGTH } else { 0 });
    // The additional section is optional, so omitting it does not set the TC bit.
    let sections =
        [(6, &answer.answers, true), (8, &answer.authority, true), (10, &answer.additional, false)];
    'sections: for (count_at, records, is_required) in sections {
        for (record, count) in records.iter().zip(1u16..) {
            let start = out.bytes.len();
            out.write_record(record);
            if out.bytes.len() > max_bytes {
                // Nothing may follow: later records could refer to names in the removed part.
                out.bytes.truncate(start);
                if is_required {
                    out.bytes[2] |= (TRUNCATED >> 8) as u8;
                }
                break 'sections;
            }
            out.bytes[count_at..count_at + 2].copy_from_slice(&count.to_be_bytes());
        }
    }
    if query.udp_size.is_some() {
        out.write_opt();
    }
    out.bytes
}

/// An error response to a message that may not be a valid query.
pub fn encode_error(query: &[u8], code: Rcode) -> Option<Vec<u8>> {
    let (id, flags) = (super::read_u16(query, 0)?, super::read_u16(query, 2)?);
    Some(header(id, RESPONSE | flags & (0x7800 | RECURSION_DESIRED) | code as u16))
}

/// Encodes a query with EDNS.
pub fn encode_question(id: u16, name: &str, record_type: u16) -> Vec<u8> {
    let mut out = Writer { bytes: header(id, RECURSION_DESIRED), name_offsets: HashMap::new() };
    out.bytes[5] = 1;
    out.write_name(name, false);
    out.write_u16(record_type);
    out.write_u16(CLASS_INTERNET);
    out.write_opt();
    out.bytes
}

fn header(id: u16, flags: u16) -> Vec<u8> {
    let mut bytes = vec![0; super::HEADER_BYTES];
    bytes[..2].copy_from_slice(&id.to_be_bytes());
    bytes[2..4].copy_from_slice(&flags.to_be_bytes());
    bytes
}

struct Writer {
    bytes: Vec<u8>,
    /// The offsets of names and their suffixes, for compression.
    name_offsets: HashMap<String, u16>,
}

impl Writer {
    /// Registers the name of the question for compression.
    fn index_question_name(&mut self, name: &str) {
        let (mut rest, mut at) = (name, super::HEADER_BYTES);
        while !rest.is_empty() {
            self.name_offsets.insert(rest.to_owned(), u16::try_from(at).unwrap_or(u16::MAX));
            let (label, end) = rest.split_once('.').unwrap_or((rest, ""));
            at += 1 + label.len();
            rest = end;
        }
    }

    fn write_record(&mut self, record: &Record) {
        self.write_name(&record.name, true);
        self.write_u16(record.data.record_type());
        self.write_u16(CLASS_INTERNET);
        self.bytes.extend(record.ttl.to_be_bytes());
        let length_at = self.bytes.len();
        self.write_u16(0);
        self.write_record_data(&record.data);
        let length = u16::try_from(self.bytes.len() - length_at - 2).unwrap_or(u16::MAX);
        self.bytes[length_at..length_at + 2].copy_from_slice(&length.to_be_bytes());
    }

    fn write_record_data(&mut self, data: &RecordData) {
        match data {
            RecordData::A(address) => self.bytes.extend(address.octets()),
            RecordData::Aaaa(address) => self.bytes.extend(address.octets()),
            RecordData::Cname(name) | RecordData::Ptr(name) | RecordData::Ns(name) => {
                self.write_name(name, true)
            }
            RecordData::Srv { weight, port, target } => {
                self.write_u16(0);
                self.write_u16(*weight);
                self.write_u16(*port);
                self.write_name(target, false);
            }
            RecordData::Txt(text) => {
                let text = &text.as_bytes()[..text.len().min(255)];
                self.bytes.push(u8::try_from(text.len()).unwrap_or(255));
                self.bytes.extend(text);
            }
            RecordData::Soa { server, person, serial, minimum } => {
                self.write_name(server, true);
                self.write_name(person, true);
                for number in [*serial, 7200, 1800, 86_400, *minimum] {
                    self.bytes.extend(number.to_be_bytes());
                }
            }
        }
    }

    /// Writes a name, compressed if `may_refer` is set.
    fn write_name(&mut self, name: &str, compress: bool) {
        let mut rest = name.trim_end_matches('.');
        while !rest.is_empty() {
            if let Some(at) = self.name_offsets.get(rest).filter(|_| compress) {
                self.write_u16(0xc000 | at);
                return;
            }
            // Compression pointers have 14 bits.
            if let Ok(at @ 0..0x4000) = u16::try_from(self.bytes.len()) {
                self.name_offsets.entry(rest.to_owned()).or_insert(at);
            }
            let (label, end) = rest.split_once('.').unwrap_or((rest, ""));
            let label = &label.as_bytes()[..label.len().min(63)];
            self.bytes.push(u8::try_from(label.len()).unwrap_or(63));
            self.bytes.extend(label);
            rest = end;
        }
        self.bytes.push(0);
    }

    fn write_u16(&mut self, number: u16) {
        self.bytes.extend(number.to_be_bytes());
    }

    fn write_opt(&mut self) {
        self.bytes.push(0);
        self.write_u16(record_type::OPT);
        self.write_u16(EDNS_UDP_BYTES);
        self.bytes.extend([0; 6]);
        let count = super::read_u16(&self.bytes, 10).unwrap_or(0) + 1;
        self.bytes[10..12].copy_from_slice(&count.to_be_bytes());
    }
}
