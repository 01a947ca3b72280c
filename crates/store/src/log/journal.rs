//! Getting changes onto the disk, and going on after the disk has refused.
//!
//! After a failed write or sync nobody knows what of the unsynced part is on disk, and the kernel may call
//! the next sync of that file a success. So the file is given up: the journal continues in a new segment,
//! from the last sync that worked, and writes again there what it had answered lazily since.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::memory::Change;
use super::record::{self, Kind, Record};
use super::recover::Recovered;
use super::segment::{Faults, Header, Segment};
use crate::Revision;

/// Revisions that may be handed out to lazy writes ahead of the disk.
const RESERVE: Revision = 1000;
/// Between two attempts to write to a disk that has failed.
const RETRY: Duration = Duration::from_millis(200);
/// The same while no write waits, so that an idle server notices that the disk accepts writes again.
const IDLE_RETRY: Duration = Duration::from_secs(5);

/// Why writes fail, for others to see; `None` while they succeed.
pub type Failure = Arc<Mutex<Option<String>>>;

pub struct Journal {
    dir: PathBuf,
    faults: Faults,
    log: Log,
    /// Answered but not synced (lazy writes), and since when.
    unsynced: Vec<Change>,
    unsynced_since: Option<Instant>,
    /// Recovery starts after this revision at least.
    reserved: Revision,
    /// Written since the last [`Journal::rotate`].
    pub bytes: u64,
    pub failure: Failure,
}

enum Log {
    Open(Segment),
    /// A new segment continues from `end`.
    Failed {
        reason: String,
        failed: Instant,
        tried: Option<Instant>,
        sequence: u64,
        end: u64,
        chain: u32,
    },
}

impl Journal {
    /// Begins a new segment after those recovered from.
    pub fn open(dir: &Path, faults: &Faults, recovered: &Recovered) -> io::Result<Journal> {
        let Recovered { memory, sequence, end, chain, log_bytes } = recovered;
        let header = Header::new(sequence + 1, memory.revision(), *end, *chain);
        Ok(Journal {
            dir: dir.to_owned(),
            faults: faults.clone(),
            log: Log::Open(Segment::create(dir, header, faults)?),
            unsynced: Vec::new(),
            unsynced_since: None,
            reserved: 0,
            bytes: *log_bytes,
            failure: Failure::default(),
        })
    }

    /// Writes the changes, and syncs them if they are to be `durable`; or tells why it cannot. They come
    /// after revision `before`.
    pub fn store(&mut self, changes: &[Change], before: Revision, durable: bool) -> Result<(), String> {
        self.reopen(before)?;
        let Log::Open(segment) = &mut self.log else { return Err("the log is not open".into()) };
        // A lazy answer must never name a revision that a restart could give to another write.
        let last = changes.last().map_or(before, |change| change.revision);
        let reserve = (!durable && last > self.reserved).then_some(last + RESERVE);
        let records = reserve.map(reserve_record).into_iter().chain(changes.iter().map(record_of));
        let written = segment
            .append(records)
            .and_then(|()| if durable || reserve.is_some() { segment.sync() } else { Ok(()) });
        if let Err(error) = written {
            return Err(self.fail(&error));
        }
        segment.shown = segment.position;
        if segment.synced == segment.position {
            self.all_synced();
        } else {
            self.unsynced.extend(changes.iter().cloned());
            self.unsynced_since.get_or_insert_with(Instant::now);
        }
        self.reserved = reserve.unwrap_or(self.reserved);
        self.bytes += changes.iter().map(size).sum::<u64>();
        Ok(())
    }

    pub fn is_failed(&self) -> bool {
        matches!(self.log, Log::Failed { .. })
    }

    /// When [`Journal::tend`] has something to do.
    pub fn deadline(&self, lazy_delay: Duration) -> Option<Instant> {
        match (&self.log, self.unsynced_since) {
            (Log::Open(_), since) => since?.checked_add(lazy_delay),
            (Log::Failed { failed, tried, .. }, None) => Some(tried.unwrap_or(*failed) + IDLE_RETRY),
            (Log::Failed { tried, .. }, Some(since)) => Some(tried.map_or(since, |tried| tried + RETRY)),
        }
    }

    /// Syncs lazy writes that have waited long enough, and after a failure tries a new segment. `revision` is the newest
    /// so far.
    pub fn tend(&mut self, lazy_delay: Duration, revision: Revision) {
        if self.unsynced.is_empty() && self.deadline(lazy_delay).is_none_or(|due| Instant::now() < due) {
            return;
        }
        let before = self.unsynced.first().map_or(revision, |first| first.revision - 1);
        let due = self.unsynced_since.is_some_and(|since| since.elapsed() >= lazy_delay);
        if self.reopen(before).is_ok() && due {
            self.sync();
        }
    }

    /// Syncs, and goes on in a new segment, whose number is returned; `revision` is the newest so far.
    pub fn rotate(&mut self, revision: Revision) -> Option<u64> {
        if !self.sync() {
            return None;
        }
        let Log::Open(segment) = &self.log else { return None };
        let header = Header::new(segment.sequence + 1, revision, segment.position, segment.chain);
        match Segment::create(&self.dir, header, &self.faults) {
            Ok(next) => {
                self.log = Log::Open(next);
                self.reserved = 0;
                self.bytes = 0;
                Some(header.sequence)
            }
            Err(error) => {
                // The new file may exist and say that this one ends here, so nothing may follow here.
                self.fail(&error);
                None
            }
        }
    }

    /// Everything on disk, and a mark that no revision was handed out beyond `last`.
    pub fn close(&mut self, last: Revision) {
        if let Log::Failed { tried, .. } = &mut self.log {
            *tried = None;
        }
        if self.reopen(last).is_ok()
            && self.sync()
            && let Log::Open(segment) = &mut self.log
        {
            let mark = std::iter::once(reserve_record(last));
            if let Err(error) = segment.append(mark).and_then(|()| segment.sync()) {
                tracing::warn!(%error, "cannot mark the log as closed");
            }
        }
    }

    fn sync(&mut self) -> bool {
        let Log::Open(segment) = &mut self.log else { return false };
        match segment.sync() {
            Ok(()) => self.all_synced(),
            Err(error) => drop(self.fail(&error)),
        }
        !self.is_failed()
    }

    fn all_synced(&mut self) {
        self.unsynced.clear();
        self.unsynced_since = None;
    }

    /// Gives up on the segment and returns the reason.
    fn fail(&mut self, error: &io::Error) -> String {
        let reason = self.reason(error);
        self.report(Some(reason.clone()));
        tracing::error!(%reason, "the store refuses writes until the disk takes them again");
        if let Log::Open(segment) = &self.log {
            let Segment { sequence, synced: end, synced_chain: chain, .. } = *segment;
            let failed = Instant::now();
            let failed = Log::Failed { reason: reason.clone(), failed, tried: None, sequence, end, chain };
            if let Log::Open(segment) = std::mem::replace(&mut self.log, failed) {
                segment.abandon();
            }
        }
        reason
    }

    /// After a failure: continues in a new segment. `before` is the newest revision so far.
    fn reopen(&mut self, before: Revision) -> Result<(), String> {
        let Log::Failed { reason, tried, sequence, end, chain, .. } = &mut self.log else { return Ok(()) };
        if tried.is_some_and(|tried| tried.elapsed() < RETRY) {
            return Err(reason.clone());
        }
        *tried = Some(Instant::now());
        let base = self.unsynced.first().map_or(before, |first| first.revision - 1);
        let header = Header::new(*sequence + 1, base, *end, *chain);
        let reserve = (self.reserved > 0).then_some(self.reserved).map(reserve_record);
        let opened = Segment::create(&self.dir, header, &self.faults).and_then(|mut segment| {
            segment.append(reserve.into_iter().chain(self.unsynced.iter().map(record_of)))?;
            segment.sync()?;
            segment.shown = segment.position;
            Ok(segment)
        });
        match opened {
            Ok(segment) => {
                tracing::info!("the store takes writes again");
                self.log = Log::Open(segment);
                self.all_synced();
                self.report(None);
                Ok(())
            }
            Err(error) => {
                let new = self.reason(&error);
                self.report(Some(new.clone()));
                if let Log::Failed { reason, .. } = &mut self.log {
                    reason.clone_from(&new);
                }
                Err(new)
            }
        }
    }

    fn report(&self, reason: Option<String>) {
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = reason;
    }

    fn reason(&self, error: &io::Error) -> String {
        format!("cannot write to {}: {error}", self.dir.display())
    }
}

fn record_of(change: &Change) -> Record<'_> {
    Record {
        kind: if change.value.is_some() { Kind::Put } else { Kind::Delete },
        synced: 0,
        revision: change.revision,
        expires: change.expires,
        key: &change.key,
        value: change.value.as_deref().unwrap_or_default(),
    }
}

fn reserve_record(revision: Revision) -> Record<'static> {
    Record { kind: Kind::Reserve, synced: 0, revision, expires: 0, key: "", value: &[] }
}

fn size(change: &Change) -> u64 {
    let value = change.value.as_ref().map_or(0, bytes::Bytes::len);
    (record::HEAD + record::BODY_OVERHEAD + change.key.len() + value) as u64
}
