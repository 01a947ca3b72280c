//! Writes decided together; pure.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::oneshot;

use super::memory::{Change, Memory};
use super::record;
use crate::{Entry, Error, Expect, Revision, Write};

pub type Reply<T> = oneshot::Sender<Result<T, Error>>;

/// Each write is decided against the state that the earlier ones will have made. Nothing of it may be
/// answered before it is stored, not even a refusal, which may tell of a write in the same batch.
pub struct Batch {
    /// The newest revision before the batch.
    pub before: Revision,
    pub changes: Vec<Change>,
    pending: HashMap<Arc<str>, Option<Entry>>,
    pub answers: Vec<(Reply<Revision>, Result<Revision, Error>)>,
    pub durable: bool,
}

impl Batch {
    pub fn after(before: Revision) -> Batch {
        Batch { before, changes: Vec::new(), pending: HashMap::new(), answers: Vec::new(), durable: false }
    }

    /// The revision after the batch.
    pub fn last(&self) -> Revision {
        self.changes.last().map_or(self.before, |change| change.revision)
    }

    pub fn changes_key(&self, key: &str) -> bool {
        self.pending.contains_key(key)
    }

    /// `now` is in unix seconds.
    pub fn decide(&mut self, memory: &Memory, now: u64, write: Write, reply: Reply<Revision>) {
        let current = match self.pending.get(&write.key) {
            Some(pending) => pending.clone(),
            None => memory.current(&write.key),
        };
        let answer = check(&write, current).map(|()| {
            let ttl = write.ttl.filter(|_| write.value.is_some());
            let expires = ttl.map_or(0, |ttl| {
                let seconds = ttl.as_secs().saturating_add(u64::from(ttl.subsec_nanos() > 0));
                now.saturating_add(seconds.max(1))
            });
            self.durable |= !write.lazy;
            self.add(write.key, write.value, expires)
        });
        self.answers.push((reply, answer));
    }

    pub fn add(&mut self, key: Arc<str>, value: Option<bytes::Bytes>, expires: u64) -> Revision {
        let revision = self.last() + 1;
        let entry = value.clone().map(|value| Entry { key: key.clone(), value, revision });
        self.pending.insert(key.clone(), entry);
        self.changes.push(Change { key, value, revision, expires });
        revision
    }
}

/// Whether the write may happen, given the key's current state.
fn check(write: &Write, current: Option<Entry>) -> Result<(), Error> {
    let key = write.key.clone();
    let len = key.len() + write.value.as_ref().map_or(0, bytes::Bytes::len) + record::BODY_OVERHEAD;
    if len > record::MAX_BODY {
        return Err(Error::Unavailable { reason: format!("{len} bytes are too many for one key") });
    }
    match (write.expect, &current) {
        (Expect::Absent, Some(_)) => Err(Error::Exists { key }),
        // Nothing to delete.
        (Expect::Absent, None) if write.value.is_none() => Err(Error::Conflict { key, current: None }),
        (Expect::Absent, None) => Ok(()),
        (Expect::Revision(expected), Some(entry)) if entry.revision == expected => Ok(()),
        (Expect::Revision(_), _) => Err(Error::Conflict { key, current }),
    }
}
