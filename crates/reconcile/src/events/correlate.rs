//! What becomes of an event: a new one, a higher count on an old one, or nothing. Pure; notes carry the time.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hasher as _};

use jiff::{SignedDuration, Timestamp};

use super::Note;

/// From this many different messages on, similar events become one.
const SIMILAR: usize = 10;
/// Similar events this far apart have nothing to do with each other.
const SIMILAR_WITHIN: SignedDuration = SignedDuration::from_secs(600);
/// A source may say this much about an object at once,
const BURST: f64 = 25.0;
/// and one more every so many seconds.
const REFILL_SECONDS: f64 = 300.0;
/// What is remembered is forgotten when it gets too much, as upstream's caches do.
const REMEMBERED: usize = 4_096;

#[derive(Debug, PartialEq)]
pub enum Outcome {
    Drop,
    Create {
        message: String,
    },
    /// `named` is when the event was made that is counted up.
    Count {
        named: Timestamp,
        message: String,
        count: i32,
        first: Timestamp,
    },
}

/// Which of the remembered events a note became.
pub type Memory = u64;

#[derive(Default)]
pub struct Correlator {
    allowances: HashMap<u64, Allowance>,
    similar: HashMap<u64, Similar>,
    written: HashMap<u64, Written>,
}

struct Allowance {
    left: f64,
    at: Timestamp,
}

/// Most objects are spoken of once in a way, and there are many, so that the first of the messages takes no room of its own.
struct Similar {
    /// Hashes of the different messages.
    first: u64,
    more: Vec<u64>,
    at: Timestamp,
}

impl Similar {
    fn count(&self) -> usize {
        1 + self.more.len()
    }
}

struct Written {
    /// Its name follows from that.
    named: Timestamp,
    count: i32,
    first: Timestamp,
}

impl Correlator {
    pub fn correlate(&mut self, note: &Note) -> (Outcome, Memory) {
        let similar = hash(&(source(note), note.severity, &note.reason));
        let combined = self.is_one_of_many(similar, note);
        let (message, memory) = match combined {
            true => {
                (format!("(combined from similar events): {}", note.message), hash(&(similar, "combined")))
            }
            false => (note.message.clone(), hash(&(similar, &note.message))),
        };
        if !self.is_allowed(note) {
            return (Outcome::Drop, memory);
        }
        let outcome = match self.written.get_mut(&memory) {
            // Events of the newer form are not counted here.
            Some(written) if note.action.is_empty() => {
                written.count += 1;
                Outcome::Count { named: written.named, message, count: written.count, first: written.first }
            }
            _ => Outcome::Create { message },
        };
        (outcome, memory)
    }

    /// An event was made for a note of this time.
    pub fn made(&mut self, memory: Memory, at: Timestamp) {
        if self.written.len() >= REMEMBERED {
            self.written.clear();
        }
        self.written.entry(memory).and_modify(|written| written.named = at).or_insert(Written {
            named: at,
            count: 1,
            first: at,
        });
    }

    fn is_one_of_many(&mut self, key: u64, note: &Note) -> bool {
        if self.similar.len() >= REMEMBERED {
            self.similar.clear();
        }
        let message = hash(&note.message);
        let anew = || Similar { first: message, more: Vec::new(), at: note.at };
        let similar = self.similar.entry(key).or_insert_with(anew);
        if note.at.duration_since(similar.at) > SIMILAR_WITHIN {
            *similar = anew();
        }
        similar.at = note.at;
        let is_known = similar.first == message || similar.more.contains(&message);
        if !is_known && similar.count() < SIMILAR {
            similar.more.push(message);
        }
        similar.count() >= SIMILAR
    }

    fn is_allowed(&mut self, note: &Note) -> bool {
        if self.allowances.len() >= REMEMBERED {
            self.allowances.clear();
        }
        let key = hash(&source(note));
        let allowance = self.allowances.entry(key).or_insert(Allowance { left: BURST, at: note.at });
        let passed = note.at.duration_since(allowance.at).as_secs_f64().max(0.0);
        allowance.left = (allowance.left + passed / REFILL_SECONDS).min(BURST);
        allowance.at = note.at;
        let allowed = allowance.left >= 1.0;
        if allowed {
            allowance.left -= 1.0;
        }
        allowed
    }
}

/// Who speaks about what.
fn source(note: &Note) -> impl std::hash::Hash + '_ {
    let about = &note.about;
    (note.source, &about.kind, &about.namespace, &about.name, &about.uid, &about.api_version)
}

fn hash(value: &impl std::hash::Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ObjectReference;

    use super::super::Severity;
    use super::*;

    fn note(message: &str, second: i64) -> Note {
        Note {
            about: ObjectReference { name: Some("web".into()), ..ObjectReference::default() },
            related: None,
            severity: Severity::Normal,
            reason: "Created".into(),
            message: message.into(),
            action: "",
            source: "test",
            at: Timestamp::from_second(second).unwrap(),
        }
    }

    fn told(correlator: &mut Correlator, note: &Note) -> String {
        let (outcome, memory) = correlator.correlate(note);
        let text = match &outcome {
            Outcome::Drop => "drop".to_owned(),
            Outcome::Create { message } => format!("create {message}"),
            Outcome::Count { message, count, .. } => format!("{count} x {message}"),
        };
        if let Outcome::Create { .. } = outcome {
            correlator.made(memory, note.at);
        }
        text
    }

    #[test]
    fn the_same_event_is_counted() {
        let mut correlator = Correlator::default();
        let texts = [1, 2, 3].map(|second| told(&mut correlator, &note("a", second)));
        assert_eq!(texts, ["create a", "2 x a", "3 x a"]);
    }

    #[test]
    fn many_similar_events_become_one() {
        let mut correlator = Correlator::default();
        let texts: Vec<_> = (0..12).map(|i| told(&mut correlator, &note(&format!("m{i}"), i))).collect();
        assert_eq!(texts[8], "create m8");
        assert_eq!(texts[9], "create (combined from similar events): m9");
        assert_eq!(texts[11], "3 x (combined from similar events): m11");
    }

    #[test]
    fn a_talkative_source_is_cut_short_and_may_speak_again_later() {
        let mut correlator = Correlator::default();
        let texts: Vec<_> = (0..26).map(|_| told(&mut correlator, &note("a", 0))).collect();
        assert_eq!(texts[24..], ["25 x a", "drop"]);
        assert_eq!(told(&mut correlator, &note("a", 301)), "26 x a");
    }
}
