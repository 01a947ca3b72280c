//! A batch of writes: checks preconditions and assigns revisions. Does no I/O.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::oneshot;

use super::mvcc::{Change, MvccStore};
use super::record;
use crate::{Entry, Error, Expect, Revision, Write};

pub type Reply<T> = oneshot::Sender<Result<T, Error>>;

/// Each write is checked against the state after the earlier writes of the batch. No result may be
/// sent before the batch is stored, not even a conflict, because it may expose a write of the same
/// batch.
pub struct Batch {
    /// The current revision before the batch.
    pub before: Revision,
    pub changes: Vec<Change>,
    pending: HashMap<Arc<str>, Option<Entry>>,
    pub results: Vec<(Reply<Revision>, Result<Revision, Error>)>,
    pub must_sync: bool,
}

impl Batch {
    pub fn new(before: Revision) -> Batch {
        Batch { before, changes: Vec::new(), pending: HashMap::new(), results: Vec::new(), must_sync: false }
    }

    /// The revision after the batch.
    pub fn last_revision(&self) -> Revision {
        self.changes.last().map_or(self.before, |change| change.revision)
    }

    pub fn changes_key(&self, key: &str) -> bool {
        self.pending.contains_key(key)
    }

    /// `now` is in Unix seconds.
    pub fn add_write(&mut self, mvcc: &MvccStore, now: u64, write: Write, reply: Reply<Revision>) {
        let current = match self.pending.get(&write.key) {
            Some(pending) => pending.clone(),
            None => mvcc.get(&write.key),
        };
        let result = check_precondition(&write, current).map(|()| {
            let ttl = write.ttl.filter(|_| write.value.is_some());
            let expires = ttl.map_or(0, |ttl| {
                let seconds = ttl.as_secs().saturating_add(u64::from(ttl.subsec_nanos() > 0));
                now.saturating_add(seconds.max(1))
            });
            self.must_sync |= !write.lazy;
            self.add_change(write.key, write.value, expires)
        });
        self.results.push((reply, result));
    }

    pub fn add_change(&mut self, key: Arc<str>, value: Option<bytes::Bytes>, expires: u64) -> Revision {
        let revision = self.last_revision() + 1;
        let entry = value.clone().map(|value| Entry { key: key.clone(), value, revision });
        self.pending.insert(key.clone(), entry);
        self.changes.push(Change { key, value, revision, expires });
        revision
    }
}

/// Checks the precondition of a write against the current state of its key.
fn check_precondition(write: &Write, current: Option<Entry>) -> Result<(), Error> {
    let key = write.key.clone();
    let len = key.len() + write.value.as_ref().map_or(0, bytes::Bytes::len) + record::BODY_OVERHEAD_BYTES;
    if len > record::MAX_BODY_BYTES {
        return Err(Error::Unavailable {
            reason: format!("{len} bytes exceed the limit for a key and its value"),
        });
    }
    match (write.expect, &current) {
        (Expect::Absent, Some(_)) => Err(Error::Exists { key }),
        // A delete of a missing key.
        (Expect::Absent, None) if write.value.is_none() => Err(Error::Conflict { key, current: None }),
        (Expect::Absent, None) => Ok(()),
        (Expect::Revision(expected), Some(entry)) if entry.revision == expected => Ok(()),
        (Expect::Revision(_), _) => Err(Error::Conflict { key, current }),
    }
}
