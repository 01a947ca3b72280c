//! A few answers of others, kept for as long as they may be.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use crate::wire::{self, HEADER, Query, kind};

/// No answer is kept for longer, whatever it says; nor one that says no for longer than that.
const LONGEST: Duration = Duration::from_secs(30);
const MOST: usize = 10_000;

/// Answers by what was asked.
#[derive(Default)]
pub struct Cache {
    kept: HashMap<Asked, Kept>,
    /// In the order they were put in.
    order: VecDeque<Asked>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Asked {
    name: String,
    kind: u16,
    edns: bool,
    signatures: bool,
}

struct Kept {
    bytes: Vec<u8>,
    at: Instant,
    until: Instant,
}

fn asked(query: &Query<'_>) -> Asked {
    Asked {
        name: query.name.clone(),
        kind: query.kind,
        edns: query.udp.is_some(),
        signatures: query.wants_signatures,
    }
}

impl Cache {
    /// The answer to this very question, made to look as if it had just come.
    pub fn get(&self, query: &Query<'_>, now: Instant) -> Option<Vec<u8>> {
        let kept = self.kept.get(&asked(query)).filter(|kept| now < kept.until)?;
        let mut bytes = kept.bytes.clone();
        bytes.get_mut(..2)?.copy_from_slice(&query.id.to_be_bytes());
        // The client may have written the name in other letters, and looks for them.
        bytes.get_mut(HEADER..HEADER + query.question.len())?.copy_from_slice(query.question);
        let age = u32::try_from(now.saturating_duration_since(kept.at).as_secs()).unwrap_or(u32::MAX);
        for record in wire::records(&bytes)?.iter().filter(|record| record.kind != kind::OPT) {
            let ttl = record.ttl.saturating_sub(age);
            bytes.get_mut(record.ttl_at..record.ttl_at + 4)?.copy_from_slice(&ttl.to_be_bytes());
        }
        Some(bytes)
    }

    /// Keeps an answer, unless it is broken, cut off, a failure or not to be kept.
    pub fn put(&mut self, query: &Query<'_>, bytes: &[u8], now: Instant) {
        let Some(flags) = wire::number(bytes, 2) else { return };
        let (is_cut, code) = (flags & 0x200 != 0, flags & 0xf);
        if is_cut || (code != 0 && code != 3) || query.name.contains('?') {
            return;
        }
        let Some(records) = wire::records(bytes) else { return };
        let ttl = records.iter().filter(|record| record.kind != kind::OPT).map(|record| record.ttl).min();
        let lasts = Duration::from_secs(u64::from(ttl.unwrap_or(0))).min(LONGEST);
        if lasts.is_zero() {
            return;
        }
        let asked = asked(query);
        if self
            .kept
            .insert(asked.clone(), Kept { bytes: bytes.to_vec(), at: now, until: now + lasts })
            .is_none()
        {
            self.order.push_back(asked);
        }
        while self.kept.len() > MOST {
            let Some(oldest) = self.order.pop_front() else { break };
            self.kept.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answer::{Answer, Data, Record};
    use crate::wire::tests::ask;
    use crate::wire::{Code, query, reply};

    fn answer(bytes: &[u8], ttl: u32, code: Code) -> Vec<u8> {
        let data = Data::A([192, 0, 2, 1].into());
        let answers = vec![Record { name: "example.com".into(), ttl, data }];
        reply(&query(bytes).unwrap(), &Answer { answers, ..Answer::empty(code) }, 512)
    }

    #[test]
    fn an_answer_ages_and_goes() {
        let (mut cache, now) = (Cache::default(), Instant::now());
        let first = ask("example.com", kind::A, None);
        cache.put(&query(&first).unwrap(), &answer(&first, 20, Code::Ok), now);
        let mut second = ask("EXAMPLE.com", kind::A, None);
        second[0] = 0xff;
        let again = query(&second).unwrap();
        let bytes = cache.get(&again, now + Duration::from_secs(5)).unwrap();
        assert_eq!(bytes[0], 0xff);
        assert_eq!(&bytes[13..20], b"EXAMPLE");
        assert_eq!(wire::records(&bytes).unwrap()[0].ttl, 15);
        assert_eq!(cache.get(&again, now + Duration::from_secs(20)), None);
        let other = ask("example.com", kind::AAAA, None);
        assert_eq!(cache.get(&query(&other).unwrap(), now), None);
    }

    #[test]
    fn what_is_not_kept() {
        let (mut cache, now) = (Cache::default(), Instant::now());
        let bytes = ask("example.com", kind::A, None);
        let asked = query(&bytes).unwrap();
        cache.put(&asked, &answer(&bytes, 0, Code::Ok), now);
        cache.put(&asked, &answer(&bytes, 20, Code::Failed), now);
        let mut cut = answer(&bytes, 20, Code::Ok);
        cut[2] |= 2;
        cache.put(&asked, &cut, now);
        let good = answer(&bytes, 20, Code::Ok);
        cache.put(&asked, &good[..good.len() - 1], now);
        assert_eq!(cache.get(&asked, now), None);
        cache.put(&asked, &answer(&bytes, 3600, Code::NoSuchName), now);
        assert!(cache.get(&asked, now + Duration::from_secs(29)).is_some());
        assert!(cache.get(&asked, now + Duration::from_secs(31)).is_none(), "not longer than half a minute");
    }

    #[test]
    fn there_is_an_end() {
        let (mut cache, now) = (Cache::default(), Instant::now());
        for number in 0..MOST + 10 {
            let bytes = ask(&format!("n{number}.example.com"), kind::A, None);
            cache.put(&query(&bytes).unwrap(), &answer(&bytes, 20, Code::Ok), now);
        }
        assert_eq!((cache.kept.len(), cache.order.len()), (MOST, MOST));
    }
}
