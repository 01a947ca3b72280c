//! The one thread that writes: it drains the queue, decides, writes once, syncs once, then makes the batch
//! visible, tells the watchers and answers everybody.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::memory::{Change, Memory};
use super::record::{self, Kind, Record};
use super::segment::{self, Header, Segment};
use super::snapshot::{self, Pin};
use super::watchers::Watchers;
use super::{Config, recover::Recovered};
use crate::{Entry, Error, Expect, Revision, Write};

/// Writes and bytes of one batch; beyond that, the first have waited long enough.
const BATCH_WRITES: usize = 4096;
const BATCH_BYTES: usize = 8 << 20;
/// Revisions that may be handed out to lazy writes ahead of the disk.
const RESERVE: Revision = 1000;
/// Events of history freed under one hold of the lock.
const TRIM: usize = 1000;
/// Between two attempts to write to a disk that has failed.
const RETRY: Duration = Duration::from_millis(200);

pub type Reply<T> = oneshot::Sender<Result<T, Error>>;

pub enum Command {
    Write(Write, Reply<Revision>),
    Compact(Revision, Reply<()>),
    Snapshotted(io::Result<()>),
    /// The clock may have moved.
    Wake,
    Close,
}

pub struct Committer {
    config: Config,
    dir: PathBuf,
    memory: Arc<RwLock<Memory>>,
    watchers: Arc<Watchers>,
    queue: Receiver<Command>,
    commands: Sender<Command>,
    log: Log,
    /// Visible but not synced (lazy writes), and since when.
    unsynced: Vec<Change>,
    unsynced_since: Option<Instant>,
    /// Recovery starts after this revision at least.
    reserved: Revision,
    expiries: BTreeSet<(u64, Arc<str>)>,
    /// Which revision was the newest when, to forget history by age.
    marks: VecDeque<(Instant, Revision)>,
    log_bytes: u64,
    snapshot_at: u64,
    snapshot: Option<Snapshotting>,
}

/// A snapshot being written by a thread of its own.
struct Snapshotting {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

enum Log {
    Open(Segment),
    /// The last write or sync failed; a new segment continues from `end`.
    Failed {
        reason: String,
        tried: Option<Instant>,
        sequence: u64,
        end: u64,
        chain: u32,
    },
}

/// Writes decided against the state that earlier ones in the same batch will have made.
#[derive(Default)]
struct Batch {
    changes: Vec<Change>,
    pending: HashMap<Arc<str>, Option<Entry>>,
    answers: Vec<(Reply<Revision>, Result<Revision, Error>)>,
    durable: bool,
}

impl Committer {
    pub fn new(
        config: Config,
        dir: PathBuf,
        memory: Arc<RwLock<Memory>>,
        watchers: Arc<Watchers>,
        (commands, queue): (Sender<Command>, Receiver<Command>),
        recovered: Recovered,
    ) -> io::Result<Committer> {
        let Recovered { memory: data, sequence, end, chain, log_bytes } = recovered;
        let header = Header::new(sequence + 1, data.revision(), end, chain);
        let segment = Segment::create(&dir, header, &config.faults)?;
        let expiries = data.expiries().collect();
        let mut marks = VecDeque::new();
        if data.history_len() > 0 {
            marks.push_back((Instant::now(), data.revision()));
        }
        *memory.write().unwrap_or_else(PoisonError::into_inner) = data;
        Ok(Committer {
            snapshot_at: config.snapshot_bytes,
            config,
            dir,
            memory,
            watchers,
            queue,
            commands,
            log: Log::Open(segment),
            unsynced: Vec::new(),
            unsynced_since: None,
            reserved: 0,
            expiries,
            marks,
            log_bytes,
            snapshot: None,
        })
    }

    pub fn run(mut self) {
        loop {
            let first = match self.deadline() {
                None => self.queue.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(wait) => self.queue.recv_timeout(wait),
            };
            let mut batch = Batch::default();
            let (mut bytes, mut after) = (0, None);
            let mut next = match first {
                Ok(command) => Some(command),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => Some(Command::Close),
            };
            while let Some(command) = next.take() {
                let Command::Write(write, reply) = command else {
                    after = Some(command);
                    break;
                };
                bytes += write.value.as_ref().map_or(0, bytes::Bytes::len);
                self.decide(&mut batch, write, reply);
                if batch.answers.len() < BATCH_WRITES && bytes < BATCH_BYTES {
                    next = self.queue.try_recv().ok();
                }
            }
            self.expire(&mut batch);
            self.commit(batch);
            match after {
                Some(Command::Compact(revision, reply)) => {
                    let _ = reply.send(self.compact(revision));
                }
                Some(Command::Snapshotted(result)) => self.snapshotted(result),
                Some(Command::Close) => return self.close(),
                Some(Command::Write(..) | Command::Wake) | None => {}
            }
            self.sync_lazy();
            self.forget_history();
            self.start_snapshot();
        }
    }

    /// How long to sleep when nothing comes in; `None`: there is nothing to wake up for.
    fn deadline(&self) -> Option<Duration> {
        let now = Instant::now();
        let expiry = self.expiries.first().map(|(expires, _)| {
            let left = Duration::from_secs(expires.saturating_sub((self.config.clock)()));
            // A failed disk takes no deletions either.
            if matches!(self.log, Log::Failed { .. }) { left.max(RETRY) } else { left }
        });
        let retry = match &self.log {
            Log::Failed { tried, .. } if !self.unsynced.is_empty() => {
                Some(tried.map_or(now, |tried| tried + RETRY))
            }
            _ => None,
        };
        let sync =
            self.unsynced_since.filter(|_| retry.is_none()).map(|since| since + self.config.lazy_delay);
        let age = self.marks.front().map(|(when, _)| *when + self.config.history_age);
        [sync, age, retry]
            .into_iter()
            .flatten()
            .map(|when| when.saturating_duration_since(now))
            .chain(expiry)
            .min()
    }

    fn decide(&self, batch: &mut Batch, write: Write, reply: Reply<Revision>) {
        let current = match batch.pending.get(&write.key) {
            Some(pending) => pending.clone(),
            None => self.read().current(&write.key),
        };
        let lazy = write.lazy;
        let answer = check(&write, current).map(|()| {
            let revision = self.next_revision(batch);
            let ttl = write.ttl.filter(|_| write.value.is_some());
            let expires = ttl.map_or(0, |ttl| {
                let seconds = ttl.as_secs().saturating_add(u64::from(ttl.subsec_nanos() > 0));
                (self.config.clock)().saturating_add(seconds.max(1))
            });
            batch.add(Change { key: write.key, value: write.value, revision, expires });
            batch.durable |= !lazy;
            revision
        });
        batch.answers.push((reply, answer));
    }

    /// Deletes what has outlived its time, as ordinary (lazy) deletes.
    fn expire(&mut self, batch: &mut Batch) {
        if self.expiries.is_empty() {
            return;
        }
        let now = (self.config.clock)();
        while let Some((expires, _)) = self.expiries.first()
            && *expires <= now
            && batch.changes.len() < BATCH_WRITES * 2
        {
            let Some((expires, key)) = self.expiries.pop_first() else { break };
            // Written in this same batch: its new expiry counts, and is registered by the commit.
            if batch.pending.contains_key(&key) || self.read().expiry(&key) != Some(expires) {
                continue;
            }
            let revision = self.next_revision(batch);
            batch.add(Change { key, value: None, revision, expires: 0 });
        }
    }

    fn commit(&mut self, batch: Batch) {
        let Batch { changes, answers, durable, .. } = batch;
        if let Some(last) = changes.last().map(|change| change.revision) {
            if let Err(reason) = self.store(&changes, last, durable) {
                for change in changes.into_iter().filter(|change| change.value.is_none()) {
                    let expires = self.read().expiry(&change.key).unwrap_or(0);
                    if expires > 0 {
                        self.expiries.insert((expires, change.key));
                    }
                }
                for (reply, _) in answers {
                    let _ = reply.send(Err(Error::Unavailable { reason: reason.clone() }));
                }
                return;
            }
            self.show(changes, last);
        }
        for (reply, answer) in answers {
            let _ = reply.send(answer);
        }
    }

    /// Puts the changes on disk, as far as they must be.
    fn store(&mut self, changes: &[Change], last: Revision, durable: bool) -> Result<(), String> {
        self.reopen()?;
        let Log::Open(segment) = &mut self.log else { return Err("the log is not open".into()) };
        // Lazy answers must never name a revision that a restart could give to another write.
        let reserve = (!durable && last > self.reserved).then_some(last + RESERVE);
        let written = segment
            .append(reserve.map(reserve_record).into_iter().chain(changes.iter().map(record_of)))
            .and_then(|()| if durable || reserve.is_some() { segment.sync() } else { Ok(()) });
        match written {
            Ok(()) => {
                segment.shown = segment.position;
                self.reserved = reserve.unwrap_or(self.reserved);
                self.log_bytes += changes.iter().map(size).sum::<u64>();
                if segment.synced == segment.position {
                    self.unsynced.clear();
                    self.unsynced_since = None;
                } else {
                    self.unsynced.extend(changes.iter().cloned());
                    self.unsynced_since.get_or_insert_with(Instant::now);
                }
                Ok(())
            }
            Err(error) => Err(self.fail(&error)),
        }
    }

    /// Makes a stored batch visible.
    fn show(&mut self, changes: Vec<Change>, last: Revision) {
        for change in &changes {
            if change.expires > 0 {
                self.expiries.insert((change.expires, change.key.clone()));
            }
        }
        let events: Vec<_> = {
            let mut memory = self.memory.write().unwrap_or_else(PoisonError::into_inner);
            changes.into_iter().map(|change| memory.apply(change)).collect()
        };
        self.watchers.publish(&self.memory, &events, last);
        let now = Instant::now();
        if self.marks.back().is_none_or(|(when, _)| now - *when >= self.config.history_age / 10) {
            self.marks.push_back((now, last));
        }
    }

    fn sync_lazy(&mut self) {
        if self.unsynced.is_empty() {
            return;
        }
        if matches!(self.log, Log::Failed { .. }) {
            let _ = self.reopen();
        } else if self.unsynced_since.is_some_and(|since| since.elapsed() >= self.config.lazy_delay) {
            self.sync();
        }
    }

    fn sync(&mut self) -> bool {
        let Log::Open(segment) = &mut self.log else { return false };
        match segment.sync() {
            Ok(()) => {
                self.unsynced.clear();
                self.unsynced_since = None;
                true
            }
            Err(error) => {
                self.fail(&error);
                false
            }
        }
    }

    /// Gives up on the segment: after a failed sync nobody knows what of it is on disk.
    fn fail(&mut self, error: &io::Error) -> String {
        let reason = format!("cannot write to {}: {error}", self.dir.display());
        tracing::error!(%reason, "the store refuses writes until the disk takes them again");
        if let Log::Open(segment) = &self.log {
            let Segment { sequence, synced, synced_chain, .. } = *segment;
            let failed = Log::Failed {
                reason: reason.clone(),
                tried: None,
                sequence,
                end: synced,
                chain: synced_chain,
            };
            if let Log::Open(segment) = std::mem::replace(&mut self.log, failed) {
                segment.abandon();
            }
        }
        reason
    }

    /// After a failure: continues in a new segment, with what had been shown but not synced.
    fn reopen(&mut self) -> Result<(), String> {
        let Log::Failed { reason, tried, sequence, end, chain } = &mut self.log else { return Ok(()) };
        if tried.is_some_and(|tried| tried.elapsed() < RETRY) {
            return Err(reason.clone());
        }
        *tried = Some(Instant::now());
        let base = match self.unsynced.first() {
            Some(first) => first.revision - 1,
            None => self.memory.read().unwrap_or_else(PoisonError::into_inner).revision(),
        };
        let header = Header::new(*sequence + 1, base, *end, *chain);
        let reserve = (self.reserved > 0).then_some(self.reserved).map(reserve_record);
        let opened = Segment::create(&self.dir, header, &self.config.faults).and_then(|mut segment| {
            segment.append(reserve.into_iter().chain(self.unsynced.iter().map(record_of)))?;
            segment.sync()?;
            segment.shown = segment.position;
            Ok(segment)
        });
        match opened {
            Ok(segment) => {
                tracing::info!("the store takes writes again");
                self.log = Log::Open(segment);
                self.unsynced.clear();
                self.unsynced_since = None;
                Ok(())
            }
            Err(error) => {
                *reason = format!("cannot write to {}: {error}", self.dir.display());
                Err(reason.clone())
            }
        }
    }

    fn compact(&mut self, revision: Revision) -> Result<(), Error> {
        let current = self.read().revision();
        if revision > current {
            return Err(Error::Future { asked: revision, current });
        }
        self.set_floor(revision);
        Ok(())
    }

    fn set_floor(&mut self, revision: Revision) {
        self.memory.write().unwrap_or_else(PoisonError::into_inner).set_floor(revision);
        self.trim();
        while self.marks.front().is_some_and(|(_, mark)| *mark <= revision) {
            self.marks.pop_front();
        }
    }

    fn trim(&self) {
        while self.memory.write().unwrap_or_else(PoisonError::into_inner).trim(TRIM) {}
    }

    fn forget_history(&mut self) {
        let mut floor = 0;
        while let Some((when, revision)) = self.marks.front()
            && when.elapsed() >= self.config.history_age
        {
            floor = *revision;
            self.marks.pop_front();
        }
        floor = floor.max(self.config.history_floor(&self.read()));
        if floor > self.read().floor() {
            self.set_floor(floor);
        }
    }

    /// Once the log outweighs the data: a new segment, and beside it a snapshot of all before.
    fn start_snapshot(&mut self) {
        let live = self.read().live_bytes();
        if self.snapshot.is_some() || self.log_bytes < self.snapshot_at.max(live) || !self.sync() {
            return;
        }
        let Log::Open(segment) = &self.log else { return };
        let revision = self.read().revision();
        let header = Header::new(segment.sequence + 1, revision, segment.position, segment.chain);
        let next = match Segment::create(&self.dir, header, &self.config.faults) {
            Ok(next) => next,
            Err(error) => {
                // The new file may exist and say that this one ends here, so nothing may follow here.
                self.fail(&error);
                return;
            }
        };
        self.log = Log::Open(next);
        self.reserved = 0;
        self.log_bytes = 0;
        let pin = Pin::new(&self.memory);
        let (dir, faults, done) = (self.dir.clone(), self.config.faults.clone(), self.commands.clone());
        let path = segment::snapshot_path(&dir, header.sequence);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let spawned = std::thread::Builder::new().name("store-snapshot".into()).spawn(move || {
            let written = snapshot::write(&pin, &path, header.sequence, &faults, &stopped)
                .and_then(|()| snapshot::remove_older(&dir, header.sequence, &faults));
            drop(pin);
            let _ = done.send(Command::Snapshotted(written));
        });
        match spawned {
            Ok(thread) => self.snapshot = Some(Snapshotting { stop, thread }),
            Err(error) => self.snapshotted(Err(error)),
        }
    }

    fn snapshotted(&mut self, result: io::Result<()>) {
        self.snapshot = None;
        self.snapshot_at = self.config.snapshot_bytes;
        if let Err(error) = result {
            // Nothing is lost, the old segments are still there; try again when as much has come again.
            tracing::warn!(%error, "cannot write a snapshot");
        }
        self.trim();
    }

    /// Everything on disk, and a mark that no revision was handed out beyond it.
    fn close(&mut self) {
        let last = self.read().revision();
        if let Log::Failed { tried, .. } = &mut self.log {
            *tried = None;
        }
        if self.reopen().is_ok()
            && self.sync()
            && let Log::Open(segment) = &mut self.log
        {
            let marked = segment.append(std::iter::once(reserve_record(last))).and_then(|()| segment.sync());
            if let Err(error) = marked {
                tracing::warn!(%error, "cannot mark the log as closed");
            }
        }
        // The directory must be left alone before its lock is.
        if let Some(Snapshotting { stop, thread }) = self.snapshot.take() {
            stop.store(true, Ordering::Relaxed);
            let _ = thread.join();
        }
        self.watchers.close();
    }

    fn next_revision(&self, batch: &Batch) -> Revision {
        batch.changes.last().map_or_else(|| self.read().revision(), |change| change.revision) + 1
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, Memory> {
        self.memory.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Batch {
    fn add(&mut self, change: Change) {
        let entry = change.value.as_ref().map(|value| Entry {
            key: change.key.clone(),
            value: value.clone(),
            revision: change.revision,
        });
        self.pending.insert(change.key.clone(), entry);
        self.changes.push(change);
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
