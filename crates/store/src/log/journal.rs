//! Getting changes onto the disk, and going on after the disk has refused.
//!
//! After a failed write or sync nobody knows what of the unsynced part is on disk, and the kernel may call
//! the next sync of that file a success. So the file is given up: the journal continues in a new segment,
//! from the last sync that worked, and writes again there what it had answered lazily since.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::mvcc::Change;
use super::record::{self, Record, RecordKind};
use super::recover::Recovery;
use super::segment::{FaultHook, FileHeader, Segment};
use crate::Revision;

/// Revisions that may be handed out to lazy writes ahead of the disk.
const RESERVED_REVISIONS: Revision = 1000;
/// Between two attempts to write to a disk that has failed.
const REOPEN_RETRY: Duration = Duration::from_millis(200);
/// The same while no write waits, so that an idle server notices that the disk accepts writes again.
const IDLE_REOPEN_RETRY: Duration = Duration::from_secs(5);

/// Why writes fail, for others to see; `None` while they succeed.
pub type WriteFailure = Arc<Mutex<Option<String>>>;

pub struct Journal {
    dir: PathBuf,
    faults: FaultHook,
    log: LogState,
    /// Answered but not synced (lazy writes), and since when.
    pending_sync: Vec<Change>,
    pending_sync_since: Option<Instant>,
    /// Recovery starts after this revision at least.
    reserved: Revision,
    /// Written since the last [`Journal::rotate`].
    pub bytes: u64,
    pub failure: WriteFailure,
}

enum LogState {
    Open(Segment),
    /// A new segment continues from `end`.
    Failed {
        reason: String,
        failed: Instant,
        last_attempt: Option<Instant>,
        sequence: u64,
        end: u64,
        last_crc: u32,
    },
}

impl Journal {
    /// Begins a new segment after those recovered from.
    pub fn open(dir: &Path, faults: &FaultHook, recovery: &Recovery) -> io::Result<Journal> {
        let Recovery { mvcc, sequence, end, last_crc: chain, log_bytes } = recovery;
        let header = FileHeader::new(sequence + 1, mvcc.revision(), *end, *chain);
        Ok(Journal {
            dir: dir.to_owned(),
            faults: faults.clone(),
            log: LogState::Open(Segment::create(dir, header, faults)?),
            pending_sync: Vec::new(),
            pending_sync_since: None,
            reserved: 0,
            bytes: *log_bytes,
            failure: WriteFailure::default(),
        })
    }

    /// Writes the changes, and syncs them if they are to be `durable`; or tells why it cannot. They come
    /// after revision `before`.
    pub fn append(&mut self, changes: &[Change], before: Revision, must_sync: bool) -> Result<(), String> {
        self.reopen(before)?;
        let LogState::Open(segment) = &mut self.log else { return Err("the log is not open".into()) };
        // A lazy answer must never name a revision that a restart could give to another write.
        let last = changes.last().map_or(before, |change| change.revision);
        let reserve = (!must_sync && last > self.reserved).then_some(last + RESERVED_REVISIONS);
        let records = reserve.map(reserve_record).into_iter().chain(changes.iter().map(change_record));
        let result = segment
            .append(records)
            .and_then(|()| if must_sync || reserve.is_some() { segment.sync() } else { Ok(()) });
        if let Err(error) = result {
            return Err(self.fail(&error));
        }
        segment.committed = segment.position;
        if segment.synced == segment.position {
            self.mark_synced();
        } else {
            self.pending_sync.extend(changes.iter().cloned());
            self.pending_sync_since.get_or_insert_with(Instant::now);
        }
        self.reserved = reserve.unwrap_or(self.reserved);
        self.bytes += changes.iter().map(record_size).sum::<u64>();
        Ok(())
    }

    pub fn is_failed(&self) -> bool {
        matches!(self.log, LogState::Failed { .. })
    }

    /// When [`Journal::tend`] has something to do.
    pub fn deadline(&self, lazy_delay: Duration) -> Option<Instant> {
        match (&self.log, self.pending_sync_since) {
            (LogState::Open(_), since) => since?.checked_add(lazy_delay),
            (LogState::Failed { failed, last_attempt: tried, .. }, None) => {
                Some(tried.unwrap_or(*failed) + IDLE_REOPEN_RETRY)
            }
            (LogState::Failed { last_attempt: tried, .. }, Some(since)) => {
                Some(tried.map_or(since, |last_attempt| last_attempt + REOPEN_RETRY))
            }
        }
    }

    /// Syncs lazy writes that have waited long enough, and after a failure tries a new segment. `revision` is the newest
    /// so far.
    pub fn run_maintenance(&mut self, lazy_delay: Duration, revision: Revision) {
        if self.pending_sync.is_empty()
            && self.deadline(lazy_delay).is_none_or(|deadline| Instant::now() < deadline)
        {
            return;
        }
        let before = self.pending_sync.first().map_or(revision, |first| first.revision - 1);
        let expired = self.pending_sync_since.is_some_and(|since| since.elapsed() >= lazy_delay);
        if self.reopen(before).is_ok() && expired {
            self.sync();
        }
    }

    /// Syncs, and goes on in a new segment, whose number is returned; `revision` is the newest so far.
    pub fn rotate(&mut self, revision: Revision) -> Option<u64> {
        if !self.sync() {
            return None;
        }
        let LogState::Open(segment) = &self.log else { return None };
        let header = FileHeader::new(segment.sequence + 1, revision, segment.position, segment.last_crc);
        match Segment::create(&self.dir, header, &self.faults) {
            Ok(next) => {
                self.log = LogState::Open(next);
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
        if let LogState::Failed { last_attempt: tried, .. } = &mut self.log {
            *tried = None;
        }
        if self.reopen(last).is_ok()
            && self.sync()
            && let LogState::Open(segment) = &mut self.log
        {
            let mark = std::iter::once(reserve_record(last));
            if let Err(error) = segment.append(mark).and_then(|()| segment.sync()) {
                tracing::warn!(%error, "cannot mark the log as closed");
            }
        }
    }

    fn sync(&mut self) -> bool {
        let LogState::Open(segment) = &mut self.log else { return false };
        match segment.sync() {
            Ok(()) => self.mark_synced(),
            Err(error) => drop(self.fail(&error)),
        }
        !self.is_failed()
    }

    fn mark_synced(&mut self) {
        self.pending_sync.clear();
        self.pending_sync_since = None;
    }

    /// Gives up on the segment and returns the reason.
    fn fail(&mut self, error: &io::Error) -> String {
        let reason = self.failure_reason(error);
        self.set_failure(Some(reason.clone()));
        tracing::error!(%reason, "the store refuses writes until the disk takes them again");
        if let LogState::Open(segment) = &self.log {
            let Segment { sequence, synced: end, synced_crc: last_crc, .. } = *segment;
            let failed = Instant::now();
            let failed = LogState::Failed {
                reason: reason.clone(),
                failed,
                last_attempt: None,
                sequence,
                end,
                last_crc,
            };
            if let LogState::Open(segment) = std::mem::replace(&mut self.log, failed) {
                segment.truncate_to_committed();
            }
        }
        reason
    }

    /// After a failure: continues in a new segment. `before` is the newest revision so far.
    fn reopen(&mut self, before: Revision) -> Result<(), String> {
        let LogState::Failed { reason, last_attempt: tried, sequence, end, last_crc: chain, .. } =
            &mut self.log
        else {
            return Ok(());
        };
        if tried.is_some_and(|last_attempt| last_attempt.elapsed() < REOPEN_RETRY) {
            return Err(reason.clone());
        }
        *tried = Some(Instant::now());
        let base = self.pending_sync.first().map_or(before, |first| first.revision - 1);
        let header = FileHeader::new(*sequence + 1, base, *end, *chain);
        let reserve = (self.reserved > 0).then_some(self.reserved).map(reserve_record);
        let result = Segment::create(&self.dir, header, &self.faults).and_then(|mut segment| {
            segment.append(reserve.into_iter().chain(self.pending_sync.iter().map(change_record)))?;
            segment.sync()?;
            segment.committed = segment.position;
            Ok(segment)
        });
        match result {
            Ok(segment) => {
                tracing::info!("the store takes writes again");
                self.log = LogState::Open(segment);
                self.mark_synced();
                self.set_failure(None);
                Ok(())
            }
            Err(error) => {
                let failure = self.failure_reason(&error);
                self.set_failure(Some(failure.clone()));
                if let LogState::Failed { reason, .. } = &mut self.log {
                    reason.clone_from(&failure);
                }
                Err(failure)
            }
        }
    }

    fn set_failure(&self, reason: Option<String>) {
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = reason;
    }

    fn failure_reason(&self, error: &io::Error) -> String {
        format!("cannot write to {}: {error}", self.dir.display())
    }
}

fn change_record(change: &Change) -> Record<'_> {
    Record {
        kind: if change.value.is_some() { RecordKind::Put } else { RecordKind::Delete },
        synced: 0,
        revision: change.revision,
        expires: change.expires,
        key: &change.key,
        value: change.value.as_deref().unwrap_or_default(),
    }
}

fn reserve_record(revision: Revision) -> Record<'static> {
    Record { kind: RecordKind::Reserve, synced: 0, revision, expires: 0, key: "", value: &[] }
}

fn record_size(change: &Change) -> u64 {
    let value = change.value.as_ref().map_or(0, bytes::Bytes::len);
    (record::RECORD_HEADER_BYTES + record::BODY_OVERHEAD_BYTES + change.key.len() + value) as u64
}
