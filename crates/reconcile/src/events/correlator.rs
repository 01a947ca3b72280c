//! Event correlation, like client-go's `EventCorrelator`: decides whether an event is created, updates the
//! count of an existing one, or is dropped. No I/O; records carry the time.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hasher as _};

use jiff::{SignedDuration, Timestamp};

use super::EventRecord;

/// From this many different messages on, similar events are aggregated (`defaultAggregateMaxEvents`).
const AGGREGATE_MAX_EVENTS: usize = 10;
/// The aggregation window (`defaultAggregateIntervalInSeconds`).
const AGGREGATE_INTERVAL: SignedDuration = SignedDuration::from_secs(600);
/// Burst of events that a source may emit about one object (`defaultSpamBurst`).
const EVENT_BURST: f64 = 25.0;
/// A source regains one event per object in this time (the inverse of `defaultSpamQPS`).
const SECONDS_PER_TOKEN: f64 = 300.0;
/// Each table is cleared when it has this many entries. Upstream uses LRU caches of the same size.
const MAX_CACHE_ENTRIES: usize = 4_096;

#[derive(Debug, PartialEq)]
pub enum CorrelateResult {
    Drop,
    Create {
        message: String,
    },
    /// `name_timestamp` is the timestamp in the name of the event to patch.
    Patch {
        name_timestamp: Timestamp,
        message: String,
        count: i32,
        first_timestamp: Timestamp,
    },
}

/// Identifies the event in the log that a record was correlated to.
pub type EventKey = u64;

#[derive(Default)]
pub struct EventCorrelator {
    buckets: HashMap<u64, TokenBucket>,
    aggregate_records: HashMap<u64, AggregateRecord>,
    logs: HashMap<u64, EventLog>,
}

struct TokenBucket {
    tokens: f64,
    at: Timestamp,
}

/// Most objects have one message per reason, so the first hash is stored inline and `messages` is not
/// allocated.
struct AggregateRecord {
    /// Hashes of the distinct messages.
    first: u64,
    messages: Vec<u64>,
    at: Timestamp,
}

impl AggregateRecord {
    fn count(&self) -> usize {
        1 + self.messages.len()
    }
}

struct EventLog {
    /// The event's name is derived from it.
    name_timestamp: Timestamp,
    count: i32,
    first: Timestamp,
}

impl EventCorrelator {
    pub fn correlate(&mut self, record: &EventRecord) -> (CorrelateResult, EventKey) {
        let aggregate_key = hash(&(source(record), record.event_type, &record.reason));
        let combined = self.is_aggregated(aggregate_key, record);
        let (message, event_key) = match combined {
            true => (
                format!("(combined from similar events): {}", record.message),
                hash(&(aggregate_key, "combined")),
            ),
            false => (record.message.clone(), hash(&(aggregate_key, &record.message))),
        };
        if !self.allow(record) {
            return (CorrelateResult::Drop, event_key);
        }
        let result = match self.logs.get_mut(&event_key) {
            // Events in the events.k8s.io form have no count.
            Some(log) if record.action.is_empty() => {
                log.count += 1;
                CorrelateResult::Patch {
                    name_timestamp: log.name_timestamp,
                    message,
                    count: log.count,
                    first_timestamp: log.first,
                }
            }
            _ => CorrelateResult::Create { message },
        };
        (result, event_key)
    }

    /// Records that an event was created for the record with this timestamp.
    pub fn record_created(&mut self, event_key: EventKey, at: Timestamp) {
        if self.logs.len() >= MAX_CACHE_ENTRIES {
            self.logs.clear();
        }
        self.logs.entry(event_key).and_modify(|log| log.name_timestamp = at).or_insert(EventLog {
            name_timestamp: at,
            count: 1,
            first: at,
        });
    }

    fn is_aggregated(&mut self, key: u64, record: &EventRecord) -> bool {
        if self.aggregate_records.len() >= MAX_CACHE_ENTRIES {
            self.aggregate_records.clear();
        }
        let message = hash(&record.message);
        let new_record = || AggregateRecord { first: message, messages: Vec::new(), at: record.timestamp };
        let aggregate = self.aggregate_records.entry(key).or_insert_with(new_record);
        if record.timestamp.duration_since(aggregate.at) > AGGREGATE_INTERVAL {
            *aggregate = new_record();
        }
        aggregate.at = record.timestamp;
        let is_known = aggregate.first == message || aggregate.messages.contains(&message);
        if !is_known && aggregate.count() < AGGREGATE_MAX_EVENTS {
            aggregate.messages.push(message);
        }
        aggregate.count() >= AGGREGATE_MAX_EVENTS
    }

    fn allow(&mut self, record: &EventRecord) -> bool {
        if self.buckets.len() >= MAX_CACHE_ENTRIES {
            self.buckets.clear();
        }
        let key = hash(&source(record));
        let bucket =
            self.buckets.entry(key).or_insert(TokenBucket { tokens: EVENT_BURST, at: record.timestamp });
        let elapsed = record.timestamp.duration_since(bucket.at).as_secs_f64().max(0.0);
        bucket.tokens = (bucket.tokens + elapsed / SECONDS_PER_TOKEN).min(EVENT_BURST);
        bucket.at = record.timestamp;
        let allowed = bucket.tokens >= 1.0;
        if allowed {
            bucket.tokens -= 1.0;
        }
        allowed
    }
}

/// The rate limit key: the source and the object.
fn source(record: &EventRecord) -> impl std::hash::Hash + '_ {
    let regarding = &record.regarding;
    (
        record.source,
        &regarding.kind,
        &regarding.namespace,
        &regarding.name,
        &regarding.uid,
        &regarding.api_version,
    )
}

fn hash(value: &impl std::hash::Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ObjectReference;

    use super::super::EventType;
    use super::*;

    fn note(message: &str, second: i64) -> EventRecord {
        EventRecord {
            regarding: ObjectReference { name: Some("web".into()), ..ObjectReference::default() },
            related: None,
            event_type: EventType::Normal,
            reason: "Created".into(),
            message: message.into(),
            action: "",
            source: "test",
            timestamp: Timestamp::from_second(second).unwrap(),
        }
    }

    fn correlate_to_text(correlator: &mut EventCorrelator, record: &EventRecord) -> String {
        let (result, event_key) = correlator.correlate(record);
        let text = match &result {
            CorrelateResult::Drop => "drop".to_owned(),
            CorrelateResult::Create { message } => format!("create {message}"),
            CorrelateResult::Patch { message, count, .. } => format!("{count} x {message}"),
        };
        if let CorrelateResult::Create { .. } = result {
            correlator.record_created(event_key, record.timestamp);
        }
        text
    }

    #[test]
    fn updates_count_of_repeated_event() {
        let mut correlator = EventCorrelator::default();
        let results = [1, 2, 3].map(|second| correlate_to_text(&mut correlator, &note("a", second)));
        assert_eq!(results, ["create a", "2 x a", "3 x a"]);
    }

    #[test]
    fn merges_many_related_events() {
        let mut correlator = EventCorrelator::default();
        let results: Vec<_> =
            (0..12).map(|i| correlate_to_text(&mut correlator, &note(&format!("m{i}"), i))).collect();
        assert_eq!(results[8], "create m8");
        assert_eq!(results[9], "create (combined from similar events): m9");
        assert_eq!(results[11], "3 x (combined from similar events): m11");
    }

    #[test]
    fn limits_event_rate_of_source_with_token_bucket() {
        let mut correlator = EventCorrelator::default();
        let results: Vec<_> = (0..26).map(|_| correlate_to_text(&mut correlator, &note("a", 0))).collect();
        assert_eq!(results[24..], ["25 x a", "drop"]);
        assert_eq!(correlate_to_text(&mut correlator, &note("a", 301)), "26 x a");
    }
}
