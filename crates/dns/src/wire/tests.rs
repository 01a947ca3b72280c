use proptest::prelude::*;

use super::*;
use crate::answer::{Answer, Data, Record};

/// A question for `name`, with EDNS if a size is given.
pub(crate) fn ask(name: &str, kind: u16, udp: Option<u16>) -> Vec<u8> {
    let mut bytes = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, u8::from(udp.is_some())];
    for label in name.split('.') {
        bytes.push(label.len() as u8);
        bytes.extend(label.as_bytes());
    }
    bytes.push(0);
    bytes.extend(kind.to_be_bytes());
    bytes.extend(INTERNET.to_be_bytes());
    if let Some(udp) = udp {
        bytes.extend([0, 0, 41]);
        bytes.extend(udp.to_be_bytes());
        bytes.extend([0, 0, 0x80, 0, 0, 0]);
    }
    bytes
}

fn address(number: u8) -> Record {
    Record { name: "web.default.svc.cluster.local".into(), ttl: 5, data: Data::A([10, 42, 0, number].into()) }
}

#[test]
fn a_question_is_read() {
    let bytes = ask("Web.Default.svc.CLUSTER.local", kind::A, Some(1400));
    let query = query(&bytes).unwrap();
    assert_eq!((query.id, query.kind, query.class), (0x1234, kind::A, INTERNET));
    assert_eq!(query.name, "web.default.svc.cluster.local");
    assert!(query.wants_recursion && query.wants_signatures);
    assert_eq!(query.limit(), 1400);
    let plain = ask("x", kind::A, None);
    assert_eq!(super::query(&plain).unwrap().limit(), LEAST_UDP);
}

#[test]
fn what_is_no_question() {
    let good = ask("x.y", kind::A, None);
    assert_eq!(query(&good[..11]), Err(None));
    let mut response = good.clone();
    response[2] |= 0x80;
    assert_eq!(query(&response), Err(None), "an answer is not answered");
    let mut update = good.clone();
    update[2] |= 5 << 3;
    assert_eq!(query(&update), Err(Some(Code::NotImplemented)));
    let mut two = good.clone();
    two[5] = 2;
    assert_eq!(query(&two), Err(Some(Code::Malformed)));
    let mut refers = good.clone();
    refers[12] = 0xc0;
    assert_eq!(query(&refers), Err(Some(Code::Malformed)));
    assert_eq!(query(&good[..good.len() - 1]), Err(Some(Code::Malformed)));
    assert_eq!(error(&good, Code::Malformed).unwrap()[..4], [0x12, 0x34, 0x81, 1]);
}

#[test]
fn an_answer_refers_to_the_question() {
    let bytes = ask("web.default.svc.cluster.local", kind::A, None);
    let answer = Answer { answers: vec![address(1), address(2)], ..Answer::empty(Code::Ok) };
    let reply = reply(&query(&bytes).unwrap(), &answer, 512);
    assert_eq!(reply.len(), bytes.len() + 2 * 16, "each record has a name of two bytes");
    assert_eq!(reply[..12], [0x12, 0x34, 0x85, 0x80, 0, 1, 0, 2, 0, 0, 0, 0]);
    assert_eq!(reply[bytes.len()..][..16], [0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 5, 0, 4, 10, 42, 0, 1]);
    assert_eq!(records(&reply).unwrap().len(), 2);
}

#[test]
fn what_does_not_fit_is_cut() {
    let bytes = ask("web.default.svc.cluster.local", kind::A, None);
    let answers: Vec<Record> = (0..=200).map(address).collect();
    let answer = Answer { answers, ..Answer::empty(Code::Ok) };
    let query = query(&bytes).unwrap();
    let short = reply(&query, &answer, LEAST_UDP);
    assert!(short.len() <= LEAST_UDP && short.len() > LEAST_UDP - 16);
    assert_eq!(short[2] & 2, 2, "and said to be");
    assert_eq!(records(&short).unwrap().len(), usize::from(number(&short, 6).unwrap()));
    let long = reply(&query, &answer, usize::from(u16::MAX));
    assert_eq!((long[2] & 2, number(&long, 6)), (0, Some(201)));
}

#[test]
fn edns_is_answered_with_edns() {
    let bytes = ask("x", kind::A, Some(4096));
    let reply = reply(&query(&bytes).unwrap(), &Answer::empty(Code::NoSuchName), 512);
    let found = records(&reply).unwrap();
    assert_eq!((found.len(), found[0].kind, found[0].class), (1, kind::OPT, 1232));
}

proptest! {
    #[test]
    fn garbage(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
        let _ = (query(&bytes), records(&bytes), error(&bytes, Code::Failed));
    }

    /// Questions that begin well and then go wrong somewhere.
    #[test]
    fn nearly_good(at in 0..60usize, byte in any::<u8>(), cut in 0..70usize) {
        let mut bytes = ask("web.default.svc.cluster.local", kind::SRV, Some(1232));
        if let Some(place) = bytes.get_mut(at) {
            *place = byte;
        }
        bytes.truncate(bytes.len().saturating_sub(cut / 2));
        if let Ok(query) = query(&bytes) {
            let answer = Answer { answers: vec![address(1)], ..Answer::empty(Code::Ok) };
            let reply = reply(&query, &answer, query.limit());
            prop_assert!(records(&reply).is_some());
        }
    }

    /// Whatever names there are, an answer can be read back.
    #[test]
    fn any_names(names in prop::collection::vec("[a-z]{1,8}(\\.[a-z]{1,8}){0,5}", 1..30), limit in 100..2000usize) {
        let bytes = ask(&names[0], kind::SRV, Some(1232));
        let answers = names.iter().map(|name| Record {
            name: name.clone(), ttl: 5, data: Data::Srv { weight: 1, port: 2, target: format!("x.{name}") },
        });
        let additional = names.iter().map(|name| Record {
            name: format!("x.{name}"), ttl: 5, data: Data::Cname(name.clone()),
        });
        let answer = Answer {
            answers: answers.collect(), additional: additional.collect(), ..Answer::empty(Code::Ok)
        };
        let reply = reply(&query(&bytes).unwrap(), &answer, limit);
        prop_assert!(reply.len() <= limit.max(bytes.len()));
        prop_assert!(records(&reply).is_some());
    }
}
