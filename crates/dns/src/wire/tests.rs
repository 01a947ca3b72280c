use proptest::prelude::*;

use super::*;
use crate::answer::{Answer, Record, RecordData};

/// A query for `name`, with EDNS if a size is given.
pub(crate) fn test_question(name: &str, record_type: u16, udp_size: Option<u16>) -> Vec<u8> {
    let mut bytes = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, u8::from(udp_size.is_some())];
    for label in name.split('.') {
        bytes.push(label.len() as u8);
        bytes.extend(label.as_bytes());
    }
    bytes.push(0);
    bytes.extend(record_type.to_be_bytes());
    bytes.extend(CLASS_INTERNET.to_be_bytes());
    if let Some(udp_size) = udp_size {
        bytes.extend([0, 0, 41]);
        bytes.extend(udp_size.to_be_bytes());
        bytes.extend([0, 0, 0x80, 0, 0, 0]);
    }
    bytes
}

fn address(number: u8) -> Record {
    Record {
        name: "web.default.svc.cluster.local".into(),
        ttl: 5,
        data: RecordData::A([10, 42, 0, number].into()),
    }
}

#[test]
fn parse_query_returns_question_and_edns_fields() {
    let bytes = test_question("Web.Default.svc.CLUSTER.local", record_type::A, Some(1400));
    let query = parse_query(&bytes).unwrap();
    assert_eq!((query.id, query.record_type, query.class), (0x1234, record_type::A, CLASS_INTERNET));
    assert_eq!(query.name, "web.default.svc.cluster.local");
    assert!(query.recursion_desired && query.dnssec_ok);
    assert_eq!(query.max_udp_reply_bytes(), 1400);
    let plain = test_question("x", record_type::A, None);
    assert_eq!(super::parse_query(&plain).unwrap().max_udp_reply_bytes(), MIN_UDP_BYTES);
}

#[test]
fn rejects_invalid_question() {
    let good = test_question("x.y", record_type::A, None);
    assert_eq!(parse_query(&good[..11]), Err(None));
    let mut response = good.clone();
    response[2] |= 0x80;
    assert_eq!(parse_query(&response), Err(None), "a response gets no response");
    let mut update = good.clone();
    update[2] |= 5 << 3;
    assert_eq!(parse_query(&update), Err(Some(Rcode::NotImplemented)));
    let mut two = good.clone();
    two[5] = 2;
    assert_eq!(parse_query(&two), Err(Some(Rcode::FormatError)));
    let mut pointer = good.clone();
    pointer[12] = 0xc0;
    assert_eq!(parse_query(&pointer), Err(Some(Rcode::FormatError)));
    assert_eq!(parse_query(&good[..good.len() - 1]), Err(Some(Rcode::FormatError)));
    assert_eq!(encode_error(&good, Rcode::FormatError).unwrap()[..4], [0x12, 0x34, 0x81, 1]);
}

#[test]
fn reply_uses_compressed_names() {
    let bytes = test_question("web.default.svc.cluster.local", record_type::A, None);
    let answer = Answer { answers: vec![address(1), address(2)], ..Answer::empty(Rcode::Ok) };
    let reply = encode_reply(&parse_query(&bytes).unwrap(), &answer, 512);
    assert_eq!(reply.len(), bytes.len() + 2 * 16, "names are compressed to two bytes");
    assert_eq!(reply[..12], [0x12, 0x34, 0x85, 0x80, 0, 1, 0, 2, 0, 0, 0, 0]);
    assert_eq!(reply[bytes.len()..][..16], [0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 5, 0, 4, 10, 42, 0, 1]);
    assert_eq!(parse_records(&reply).unwrap().len(), 2);
}

#[test]
fn reply_is_truncated_at_limit() {
    let bytes = test_question("web.default.svc.cluster.local", record_type::A, None);
    let answers: Vec<Record> = (0..=200).map(address).collect();
    let answer = Answer { answers, ..Answer::empty(Rcode::Ok) };
    let query = parse_query(&bytes).unwrap();
    let short = encode_reply(&query, &answer, MIN_UDP_BYTES);
    assert!(short.len() <= MIN_UDP_BYTES && short.len() > MIN_UDP_BYTES - 16);
    assert_eq!(short[2] & 2, 2, "TC bit is set");
    assert_eq!(parse_records(&short).unwrap().len(), usize::from(read_u16(&short, 6).unwrap()));
    let long = encode_reply(&query, &answer, usize::from(u16::MAX));
    assert_eq!((long[2] & 2, read_u16(&long, 6)), (0, Some(201)));
}

#[test]
fn reply_to_edns_query_has_opt_record() {
    let bytes = test_question("x", record_type::A, Some(4096));
    let reply = encode_reply(&parse_query(&bytes).unwrap(), &Answer::empty(Rcode::NoSuchName), 512);
    let found = parse_records(&reply).unwrap();
    assert_eq!((found.len(), found[0].record_type, found[0].class), (1, record_type::OPT, 1232));
}

proptest! {
    #[test]
    fn parsers_do_not_panic_on_garbage(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
        let _ = (parse_query(&bytes), parse_records(&bytes), encode_error(&bytes, Rcode::ServerFailure));
    }

    /// A valid query with a corrupted byte or a truncated end.
    #[test]
    fn reply_to_corrupted_question_can_be_parsed(at in 0..60usize, byte in any::<u8>(), removed_bytes in 0..70usize) {
        let mut bytes = test_question("web.default.svc.cluster.local", record_type::SRV, Some(1232));
        if let Some(target) = bytes.get_mut(at) {
            *target = byte;
        }
        bytes.truncate(bytes.len().saturating_sub(removed_bytes / 2));
        if let Ok(query) = parse_query(&bytes) {
            let answer = Answer { answers: vec![address(1)], ..Answer::empty(Rcode::Ok) };
            let reply = encode_reply(&query, &answer, query.max_udp_reply_bytes());
            prop_assert!(parse_records(&reply).is_some());
        }
    }

    /// Responses with arbitrary names can be parsed.
    #[test]
    fn reply_with_arbitrary_names_can_be_parsed(names in prop::collection::vec("[a-z]{1,8}(\\.[a-z]{1,8}){0,5}", 1..30), limit in 100..2000usize) {
        let bytes = test_question(&names[0], record_type::SRV, Some(1232));
        let answers = names.iter().map(|name| Record {
            name: name.clone(), ttl: 5, data: RecordData::Srv { weight: 1, port: 2, target: format!("x.{name}") },
        });
        let additional = names.iter().map(|name| Record {
            name: format!("x.{name}"), ttl: 5, data: RecordData::Cname(name.clone()),
        });
        let answer = Answer {
            answers: answers.collect(), additional: additional.collect(), ..Answer::empty(Rcode::Ok)
        };
        let reply = encode_reply(&parse_query(&bytes).unwrap(), &answer, limit);
        prop_assert!(reply.len() <= limit.max(bytes.len()));
        prop_assert!(parse_records(&reply).is_some());
    }
}
