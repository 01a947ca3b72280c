//! Caches upstream responses.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use crate::wire::{self, HEADER_BYTES, Query, record_type};

/// The upper limit for the TTL of positive and negative responses.
const MAX_CACHE_TTL: Duration = Duration::from_secs(30);
const MAX_ENTRIES: usize = 10_000;

/// Responses by query.
#[derive(Default)]
pub struct Cache {
    entries: HashMap<CacheKey, CacheEntry>,
    /// In insertion order, for eviction.
    order: VecDeque<CacheKey>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct CacheKey {
    name: String,
    record_type: u16,
    edns: bool,
    dnssec_ok: bool,
}

struct CacheEntry {
    bytes: Vec<u8>,
    stored_at: Instant,
    expires_at: Instant,
}

fn cache_key(query: &Query<'_>) -> CacheKey {
    CacheKey {
        name: query.name.clone(),
        record_type: query.record_type,
        edns: query.udp_size.is_some(),
        dnssec_ok: query.dnssec_ok,
    }
}

impl Cache {
    /// Returns the cached response with the ID and question of this query, and with decremented
    /// TTLs.
    pub fn get(&self, query: &Query<'_>, now: Instant) -> Option<Vec<u8>> {
        let entry = self.entries.get(&cache_key(query)).filter(|entry| now < entry.expires_at)?;
        let mut bytes = entry.bytes.clone();
        bytes.get_mut(..2)?.copy_from_slice(&query.id.to_be_bytes());
        // Clients may randomize the case of the name (0x20 encoding) and verify it in the response.
        bytes.get_mut(HEADER_BYTES..HEADER_BYTES + query.question.len())?.copy_from_slice(query.question);
        let age = u32::try_from(now.saturating_duration_since(entry.stored_at).as_secs()).unwrap_or(u32::MAX);
        for record in
            wire::parse_records(&bytes)?.iter().filter(|record| record.record_type != record_type::OPT)
        {
            let ttl = record.ttl.saturating_sub(age);
            bytes.get_mut(record.ttl_offset..record.ttl_offset + 4)?.copy_from_slice(&ttl.to_be_bytes());
        }
        Some(bytes)
    }

    /// Caches a response, unless it is malformed, truncated, an error or has a TTL of 0.
    pub fn insert(&mut self, query: &Query<'_>, bytes: &[u8], now: Instant) {
        let Some(flags) = wire::read_u16(bytes, 2) else { return };
        let (is_truncated, code) = (flags & 0x200 != 0, flags & 0xf);
        if is_truncated || (code != 0 && code != 3) || query.name.contains('?') {
            return;
        }
        let Some(records) = wire::parse_records(bytes) else { return };
        let ttl = records
            .iter()
            .filter(|record| record.record_type != record_type::OPT)
            .map(|record| record.ttl)
            .min();
        let lifetime = Duration::from_secs(u64::from(ttl.unwrap_or(0))).min(MAX_CACHE_TTL);
        if lifetime.is_zero() {
            return;
        }
        let key = cache_key(query);
        if self
            .entries
            .insert(
                key.clone(),
                CacheEntry { bytes: bytes.to_vec(), stored_at: now, expires_at: now + lifetime },
            )
            .is_none()
        {
            self.order.push_back(key);
        }
        while self.entries.len() > MAX_ENTRIES {
            let Some(oldest) = self.order.pop_front() else { break };
            self.entries.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answer::{Answer, Record, RecordData};
    use crate::wire::tests::test_question;
    use crate::wire::{Rcode, encode_reply, parse_query};

    fn encoded_answer(bytes: &[u8], ttl: u32, code: Rcode) -> Vec<u8> {
        let data = RecordData::A([192, 0, 2, 1].into());
        let answers = vec![Record { name: "example.com".into(), ttl, data }];
        encode_reply(&parse_query(bytes).unwrap(), &Answer { answers, ..Answer::empty(code) }, 512)
    }

    #[test]
    fn cached_answer_is_returned_with_remaining_ttl_until_expired() {
        let (mut cache, now) = (Cache::default(), Instant::now());
        let first = test_question("example.com", record_type::A, None);
        cache.insert(&parse_query(&first).unwrap(), &encoded_answer(&first, 20, Rcode::Ok), now);
        let mut second = test_question("EXAMPLE.com", record_type::A, None);
        second[0] = 0xff;
        let second_query = parse_query(&second).unwrap();
        let bytes = cache.get(&second_query, now + Duration::from_secs(5)).unwrap();
        assert_eq!(bytes[0], 0xff);
        assert_eq!(&bytes[13..20], b"EXAMPLE");
        assert_eq!(wire::parse_records(&bytes).unwrap()[0].ttl, 15);
        assert_eq!(cache.get(&second_query, now + Duration::from_secs(20)), None);
        let other = test_question("example.com", record_type::AAAA, None);
        assert_eq!(cache.get(&parse_query(&other).unwrap(), now), None);
    }

    #[test]
    fn does_not_cache_failed_or_truncated_answer() {
        let (mut cache, now) = (Cache::default(), Instant::now());
        let bytes = test_question("example.com", record_type::A, None);
        let parsed = parse_query(&bytes).unwrap();
        cache.insert(&parsed, &encoded_answer(&bytes, 0, Rcode::Ok), now);
        cache.insert(&parsed, &encoded_answer(&bytes, 20, Rcode::ServerFailure), now);
        let mut truncated = encoded_answer(&bytes, 20, Rcode::Ok);
        truncated[2] |= 2;
        cache.insert(&parsed, &truncated, now);
        let good = encoded_answer(&bytes, 20, Rcode::Ok);
        cache.insert(&parsed, &good[..good.len() - 1], now);
        assert_eq!(cache.get(&parsed, now), None);
        cache.insert(&parsed, &encoded_answer(&bytes, 3600, Rcode::NoSuchName), now);
        assert!(cache.get(&parsed, now + Duration::from_secs(29)).is_some());
        assert!(cache.get(&parsed, now + Duration::from_secs(31)).is_none(), "not longer than 30 seconds");
    }

    #[test]
    fn oldest_entry_is_evicted_when_full() {
        let (mut cache, now) = (Cache::default(), Instant::now());
        for number in 0..MAX_ENTRIES + 10 {
            let bytes = test_question(&format!("n{number}.example.com"), record_type::A, None);
            cache.insert(&parse_query(&bytes).unwrap(), &encoded_answer(&bytes, 20, Rcode::Ok), now);
        }
        assert_eq!((cache.entries.len(), cache.order.len()), (MAX_ENTRIES, MAX_ENTRIES));
    }
}
