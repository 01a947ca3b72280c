//! Writes answers.

use std::collections::HashMap;

use super::{Code, INTERNET, OWN_UDP, Query, kind};
use crate::answer::{Answer, Data, Record};

const RESPONSE: u16 = 0x8000;
const AUTHORITATIVE: u16 = 0x400;
const TRUNCATED: u16 = 0x200;
const RECURSION_WANTED: u16 = 0x100;
const RECURSION_HAD: u16 = 0x80;
/// The record that says what EDNS we speak.
const OPT_LENGTH: usize = 11;

/// The answer to a question in at most `limit` bytes; what does not fit is left out and said to be.
pub fn reply(query: &Query<'_>, answer: &Answer, limit: usize) -> Vec<u8> {
    let mut flags = RESPONSE | RECURSION_HAD | answer.code as u16;
    if answer.authoritative {
        flags |= AUTHORITATIVE;
    }
    if query.wants_recursion {
        flags |= RECURSION_WANTED;
    }
    let mut out = Writer { bytes: header(query.id, flags), names: HashMap::new() };
    out.bytes.extend(query.question);
    out.bytes[5] = 1;
    out.remember_question(&query.name);
    let room = limit.saturating_sub(if query.udp.is_some() { OPT_LENGTH } else { 0 });
    // What is beside the answer is a courtesy and is left out without a word.
    let sections =
        [(6, &answer.answers, true), (8, &answer.authority, true), (10, &answer.additional, false)];
    'sections: for (count_at, records, is_needed) in sections {
        for (record, count) in records.iter().zip(1u16..) {
            let before = out.bytes.len();
            out.record(record);
            if out.bytes.len() > room {
                // Nothing may follow: it could refer to names in what is cut off here.
                out.bytes.truncate(before);
                if is_needed {
                    out.bytes[2] |= (TRUNCATED >> 8) as u8;
                }
                break 'sections;
            }
            out.bytes[count_at..count_at + 2].copy_from_slice(&count.to_be_bytes());
        }
    }
    if query.udp.is_some() {
        out.opt();
    }
    out.bytes
}

/// An answer with only a code, to something that may not be a question.
pub fn error(query: &[u8], code: Code) -> Option<Vec<u8>> {
    let (id, flags) = (super::number(query, 0)?, super::number(query, 2)?);
    Some(header(id, RESPONSE | flags & (0x7800 | RECURSION_WANTED) | code as u16))
}

/// A question of our own, with EDNS.
pub fn question(id: u16, name: &str, wanted: u16) -> Vec<u8> {
    let mut out = Writer { bytes: header(id, RECURSION_WANTED), names: HashMap::new() };
    out.bytes[5] = 1;
    out.name(name, false);
    out.number(wanted);
    out.number(INTERNET);
    out.opt();
    out.bytes
}

fn header(id: u16, flags: u16) -> Vec<u8> {
    let mut bytes = vec![0; super::HEADER];
    bytes[..2].copy_from_slice(&id.to_be_bytes());
    bytes[2..4].copy_from_slice(&flags.to_be_bytes());
    bytes
}

struct Writer {
    bytes: Vec<u8>,
    /// Where names and their ends have been written already.
    names: HashMap<String, u16>,
}

impl Writer {
    /// The question's name may be referred to.
    fn remember_question(&mut self, name: &str) {
        let (mut rest, mut at) = (name, super::HEADER);
        while !rest.is_empty() {
            self.names.insert(rest.to_owned(), u16::try_from(at).unwrap_or(u16::MAX));
            let (label, end) = rest.split_once('.').unwrap_or((rest, ""));
            at += 1 + label.len();
            rest = end;
        }
    }

    fn record(&mut self, record: &Record) {
        self.name(&record.name, true);
        self.number(record.data.kind());
        self.number(INTERNET);
        self.bytes.extend(record.ttl.to_be_bytes());
        let length_at = self.bytes.len();
        self.number(0);
        self.data(&record.data);
        let length = u16::try_from(self.bytes.len() - length_at - 2).unwrap_or(u16::MAX);
        self.bytes[length_at..length_at + 2].copy_from_slice(&length.to_be_bytes());
    }

    fn data(&mut self, data: &Data) {
        match data {
            Data::A(address) => self.bytes.extend(address.octets()),
            Data::Aaaa(address) => self.bytes.extend(address.octets()),
            Data::Cname(name) | Data::Ptr(name) | Data::Ns(name) => self.name(name, true),
            Data::Srv { weight, port, target } => {
                self.number(0);
                self.number(*weight);
                self.number(*port);
                self.name(target, false);
            }
            Data::Txt(text) => {
                let text = &text.as_bytes()[..text.len().min(255)];
                self.bytes.push(u8::try_from(text.len()).unwrap_or(255));
                self.bytes.extend(text);
            }
            Data::Soa { server, person, serial, minimum } => {
                self.name(server, true);
                self.name(person, true);
                for number in [*serial, 7200, 1800, 86_400, *minimum] {
                    self.bytes.extend(number.to_be_bytes());
                }
            }
        }
    }

    /// A name, which may refer to one written before.
    fn name(&mut self, name: &str, may_refer: bool) {
        let mut rest = name.trim_end_matches('.');
        while !rest.is_empty() {
            if let Some(at) = self.names.get(rest).filter(|_| may_refer) {
                self.number(0xc000 | at);
                return;
            }
            // References have room for this much.
            if let Ok(at @ 0..0x4000) = u16::try_from(self.bytes.len()) {
                self.names.entry(rest.to_owned()).or_insert(at);
            }
            let (label, end) = rest.split_once('.').unwrap_or((rest, ""));
            let label = &label.as_bytes()[..label.len().min(63)];
            self.bytes.push(u8::try_from(label.len()).unwrap_or(63));
            self.bytes.extend(label);
            rest = end;
        }
        self.bytes.push(0);
    }

    fn number(&mut self, number: u16) {
        self.bytes.extend(number.to_be_bytes());
    }

    fn opt(&mut self) {
        self.bytes.push(0);
        self.number(kind::OPT);
        self.number(OWN_UDP);
        self.bytes.extend([0; 6]);
        let count = super::number(&self.bytes, 10).unwrap_or(0) + 1;
        self.bytes[10..12].copy_from_slice(&count.to_be_bytes());
    }
}
