//! Writes changes to the log and recovers from disk failures.
//!
//! After a failed write or sync it is unknown which part of the unsynced data is on disk, and the
//! kernel may report success for the next sync of that file. So the file is abandoned. The journal
//! continues in a new segment from the last successful sync, and first writes the lazy writes again
//! that it has acknowledged since.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::mvcc::Change;
use super::record::{self, Record, RecordKind};
use super::recover::Recovery;
use super::segment::{FaultHook, FileHeader, Segment};
use crate::Revision;

/// The number of revisions that lazy writes may use ahead of the disk.
const RESERVED_REVISIONS: Revision = 1000;
/// The interval between attempts to write to a failed disk.
const REOPEN_RETRY: Duration = Duration::from_millis(200);
/// The interval while no write is pending, so that an idle server detects that the disk accepts
/// writes again.
const IDLE_REOPEN_RETRY: Duration = Duration::from_secs(5);

/// The reason why writes fail, shared with readers. `None` while they succeed.
pub type WriteFailure = Arc<Mutex<Option<String>>>;

pub struct Journal {
    dir: PathBuf,
    faults: FaultHook,
    log: LogState,
    /// Lazy writes that are acknowledged but not synced, and since when.
    pending_sync: Vec<Change>,
    pending_sync_since: Option<Instant>,
    /// Recovery continues after at least this revision.
    reserved: Revision,
    /// Bytes written since the last [`Journal::rotate`].
    pub bytes: u64,
    pub failure: WriteFailure,
}

enum LogState {
    Open(Segment),
    /// A new segment has to continue from `end`.
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
    /// Starts a new segment after the recovered ones.
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

    /// Appends the changes, which follow revision `before`, and syncs them if `must_sync` is set.
    /// Returns the reason on failure.
    pub fn append(&mut self, changes: &[Change], before: Revision, must_sync: bool) -> Result<(), String> {
        self.reopen(before)?;
        let LogState::Open(segment) = &mut self.log else { return Err("the log is not open".into()) };
        // A revision that was returned for a lazy write must not be assigned to another write after
        // a crash. The reservation record makes recovery skip it.
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

    /// The time at which [`Journal::run_maintenance`] has work.
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

    /// Syncs lazy writes after `lazy_delay`, and retries with a new segment after a failure.
    /// `revision` is the current one.
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

    /// Syncs and continues in a new segment. Returns its number. `revision` is the current one.
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
                // The new file may exist and declare that this segment ends here, so nothing may be
                // appended to it.
                self.fail(&error);
                None
            }
        }
    }

    /// Syncs everything and records that no revision after `last` was assigned.
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
                tracing::warn!(%error, "cannot write the final record to the log");
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

    /// Abandons the segment and returns the reason.
    fn fail(&mut self, error: &io::Error) -> String {
        let reason = self.failure_reason(error);
        self.set_failure(Some(reason.clone()));
        tracing::error!(%reason, "disk write failed, rejecting writes until the disk accepts them");
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

    /// Continues in a new segment after a failure. `before` is the current revision.
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
                tracing::info!("store accepts writes again");
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
