//! How writes are committed: the queue is drained, decided, written once and synced once; then the batch is visible,
//! the watchers are told and everybody is answered.
//!
//! A thread of its own does so, and sleeps when there is nothing to do. A write that comes alone is committed by whoever
//! brings it ([`Desk::at_once`]): waking one thread and then another costs as much as all the rest.

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::batch::{Batch, Reply};
use super::journal::{Failure, Journal};
use super::memory::{Change, Memory};
use super::recover::Recovered;
use super::snapshot::{self, Pin};
use super::watchers::Watchers;
use super::{Config, segment};
use crate::{Error, Revision, Write};
use tokio::sync::oneshot;

/// Writes and bytes of one batch; beyond that, the first have waited long enough.
const BATCH_WRITES: usize = 4096;
const BATCH_BYTES: usize = 8 << 20;
/// Events of history freed under one hold of the lock.
const TRIM: usize = 1000;
/// Keys that should have expired are tried this often on a failed disk.
const EXPIRE_RETRY: Duration = Duration::from_secs(1);
/// After this many writes that came alone the next is taken to, too. Of a crowd each would wait for the disk in turn,
/// where one wait does for all.
pub const ALONE: u32 = 8;
/// A disk that takes less than this for a write, on average, is quick: one may wait for it where others wait too.
const QUICK: Duration = Duration::from_millis(1);

pub enum Command {
    Write(Write, Reply<Revision>),
    Compact(Revision, Reply<()>),
    Snapshotted(io::Result<()>),
    /// The clock may have moved.
    Wake,
    Close,
}

/// Where writes are handed in.
pub struct Desk {
    committer: Arc<Mutex<Committer>>,
    commands: Sender<Command>,
    /// The thread is at work, or has ended.
    awake: Arc<AtomicBool>,
    alone: Arc<AtomicU32>,
    failure: Failure,
}

pub struct Committer {
    config: Config,
    dir: PathBuf,
    memory: Arc<RwLock<Memory>>,
    watchers: Arc<Watchers>,
    commands: Sender<Command>,
    journal: Journal,
    expiries: BTreeSet<(u64, Arc<str>)>,
    /// Which revision was the newest when, to forget history by age.
    marks: VecDeque<(Instant, Revision)>,
    snapshot: Option<Snapshotting>,
    /// How many writes in a row came alone.
    alone: Arc<AtomicU32>,
    /// What a durable write took of late; `None` when it is not known, or no more may be written.
    pace: Option<Duration>,
    /// The thread has to look after something.
    chores: bool,
}

/// A snapshot being written by a thread of its own.
struct Snapshotting {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Desk {
    /// Starts the thread.
    pub fn open(
        config: Config,
        dir: PathBuf,
        memory: Arc<RwLock<Memory>>,
        watchers: Arc<Watchers>,
        recovered: Recovered,
    ) -> io::Result<(Desk, JoinHandle<()>)> {
        let (commands, queue) = mpsc::channel();
        let committer = Committer::new(config, dir, memory, watchers, commands.clone(), recovered)?;
        let (alone, at_rest) = (committer.alone.clone(), committer.config.at_rest);
        let failure = committer.journal.failure.clone();
        let committer = Arc::new(Mutex::new(committer));
        let awake = Arc::new(AtomicBool::new(false));
        let desk = Desk { committer: committer.clone(), commands, awake: awake.clone(), alone, failure };
        let thread = std::thread::Builder::new()
            .name("store-commit".into())
            .spawn(move || run(&committer, &queue, &awake, at_rest))?;
        Ok((desk, thread))
    }

    pub fn send(&self, command: Command) -> Result<(), mpsc::SendError<Command>> {
        self.commands.send(command)
    }

    /// Why the last write failed; `None` once the disk accepts writes again.
    pub fn failure(&self) -> Option<String> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Commits the write here and now and waits for the disk, if nobody else writes and the disk is quick. Else the
    /// write is given back, for the thread.
    pub fn at_once(&self, write: Write) -> Result<Result<Revision, Error>, Write> {
        // What is lazy or expires is looked after by the thread.
        if write.lazy || write.ttl.is_some() || self.awake.load(Ordering::Acquire) {
            return Err(write);
        }
        let Ok(mut committer) = self.committer.try_lock() else {
            self.alone.store(0, Ordering::Relaxed);
            return Err(write);
        };
        let alone = self.alone.load(Ordering::Relaxed) >= ALONE;
        if !alone || committer.pace.is_none_or(|pace| pace > QUICK) {
            return Err(write);
        }
        let (reply, mut answer) = oneshot::channel();
        let (batch, _) = committer.gather(Some(Command::Write(write, reply)), || None);
        committer.commit(batch);
        if committer.is_untidy() {
            let _ = self.send(Command::Wake);
        }
        drop(committer);
        Ok(answer
            .try_recv()
            .unwrap_or_else(|_| Err(Error::Unavailable { reason: "the store failed".into() })))
    }
}

#[cfg(test)]
impl Desk {
    /// As if so many writes had come alone and taken that long, once the thread sleeps.
    pub async fn set_past(&self, alone: u32, pace: Option<Duration>) {
        while self.awake.load(Ordering::Acquire) {
            tokio::task::yield_now().await;
        }
        self.alone.store(alone, Ordering::Relaxed);
        self.committer.lock().unwrap().pace = pace;
    }
}

/// What the thread does. It ends when somebody who held the committer broke: what is in it is not to be trusted then.
fn run(committer: &Mutex<Committer>, queue: &Receiver<Command>, awake: &AtomicBool, at_rest: fn()) {
    while let Ok(wait) = committer.lock().map(|committer| committer.deadline()) {
        awake.store(false, Ordering::Release);
        at_rest();
        let first = match wait {
            None => queue.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(wait) => queue.recv_timeout(wait),
        };
        awake.store(true, Ordering::Release);
        let first = match first {
            Ok(command) => Some(command),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(Command::Close),
        };
        let Ok(mut committer) = committer.lock() else { return };
        let (mut batch, after) = committer.gather(first, || queue.try_recv().ok());
        committer.expire(&mut batch);
        committer.commit(batch);
        match after {
            Some(Command::Compact(revision, reply)) => {
                let _ = reply.send(committer.compact(revision));
            }
            Some(Command::Snapshotted(result)) => committer.snapshotted(result),
            Some(Command::Close) => return committer.close(),
            Some(Command::Write(..) | Command::Wake) | None => {}
        }
        committer.tidy();
    }
}

impl Committer {
    fn new(
        config: Config,
        dir: PathBuf,
        memory: Arc<RwLock<Memory>>,
        watchers: Arc<Watchers>,
        commands: Sender<Command>,
        recovered: Recovered,
    ) -> io::Result<Committer> {
        let journal = Journal::open(&dir, &config.faults, &recovered)?;
        let data = recovered.memory;
        let expiries = data.expiries().collect();
        let mut marks = VecDeque::new();
        if data.history_len() > 0 {
            marks.push_back((Instant::now(), data.revision()));
        }
        *memory.write().unwrap_or_else(PoisonError::into_inner) = data;
        Ok(Committer {
            config,
            dir,
            memory,
            watchers,
            commands,
            journal,
            expiries,
            marks,
            snapshot: None,
            alone: Arc::default(),
            pace: None,
            chores: false,
        })
    }

    /// How long to sleep when nothing comes in; `None`: there is nothing to wake up for.
    fn deadline(&self) -> Option<Duration> {
        let now = Instant::now();
        let expiry = self.expiries.first().map(|(expires, _)| {
            let left = Duration::from_secs(expires.saturating_sub((self.config.clock)()));
            if self.journal.is_failed() { left.max(EXPIRE_RETRY) } else { left }
        });
        let age = self.marks.front().and_then(|(when, _)| when.checked_add(self.config.history_age));
        [self.journal.deadline(self.config.lazy_delay), age]
            .into_iter()
            .flatten()
            .map(|when| when.saturating_duration_since(now))
            .chain(expiry)
            .min()
    }

    /// Decides the writes that wait, up to a command that is something else.
    fn gather(
        &self,
        first: Option<Command>,
        mut queue: impl FnMut() -> Option<Command>,
    ) -> (Batch, Option<Command>) {
        let memory = self.read();
        let mut batch = Batch::after(memory.revision());
        let (mut next, mut bytes) = (first, 0);
        let now = (self.config.clock)();
        while let Some(command) = next.take() {
            let Command::Write(write, reply) = command else { return (batch, Some(command)) };
            bytes += write.value.as_ref().map_or(0, bytes::Bytes::len);
            batch.decide(&memory, now, write, reply);
            if batch.answers.len() < BATCH_WRITES && bytes < BATCH_BYTES {
                next = queue();
            }
        }
        (batch, None)
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
            let current = self.read().expiry(&key);
            // A key written again has another expiry, or will have one after this batch.
            if current == Some(expires) && !batch.changes_key(&key) {
                batch.add(key, None, 0);
            }
        }
    }

    fn commit(&mut self, batch: Batch) {
        if !batch.changes.is_empty() {
            let begun = Instant::now();
            if let Err(reason) = self.journal.store(&batch.changes, batch.before, batch.durable) {
                self.pace = None;
                return self.refuse(batch, &reason);
            }
            match batch.changes.len() {
                1 => self.alone.fetch_add(1, Ordering::Relaxed),
                _ => self.alone.swap(0, Ordering::Relaxed),
            };
            if batch.durable {
                let took = begun.elapsed();
                self.pace = Some(self.pace.map_or(took, |pace| (pace * 7 + took) / 8));
            }
            let last = batch.last();
            let changes: Vec<_> = batch.changes.into_iter().map(Change::settled).collect();
            for change in &changes {
                if change.expires > 0 {
                    self.expiries.insert((change.expires, change.key.clone()));
                }
            }
            let events: Vec<_> = {
                let mut memory = self.write();
                changes.into_iter().map(|change| memory.apply(change)).collect()
            };
            self.watchers.publish(&events, last);
            let now = Instant::now();
            if self.marks.back().is_none_or(|(when, _)| now - *when >= self.config.history_age / 10) {
                self.marks.push_back((now, last));
                self.chores = true;
            }
        }
        for (reply, answer) in batch.answers {
            let _ = reply.send(answer);
        }
    }

    fn is_untidy(&self) -> bool {
        self.chores
            || self.journal.is_failed()
            || self.snapshot_is_due()
            || self.config.history_floor(&self.read()) > 0
    }

    /// What is not urgent for those who write.
    fn tidy(&mut self) {
        self.chores = false;
        let revision = self.read().revision();
        self.journal.tend(self.config.lazy_delay, revision);
        self.forget_history();
        if self.snapshot_is_due() {
            self.start_snapshot();
        }
    }

    /// Nothing of the batch has happened.
    fn refuse(&mut self, batch: Batch, reason: &str) {
        for change in batch.changes {
            // Keys that should expire must do so later.
            let expires = self.read().expiry(&change.key).unwrap_or(0);
            if expires > 0 {
                self.expiries.insert((expires, change.key));
            }
        }
        for (reply, _) in batch.answers {
            let _ = reply.send(Err(Error::Unavailable { reason: reason.to_owned() }));
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
        self.write().set_floor(revision);
        self.trim();
        while self.marks.front().is_some_and(|(_, mark)| *mark <= revision) {
            self.marks.pop_front();
        }
    }

    fn trim(&self) {
        while self.write().trim(TRIM) {}
    }

    fn forget_history(&mut self) {
        let mut floor = self.config.history_floor(&self.read());
        while let Some((when, revision)) = self.marks.front()
            && when.elapsed() >= self.config.history_age
        {
            floor = floor.max(*revision);
            self.marks.pop_front();
        }
        if floor > self.read().floor() {
            self.set_floor(floor);
        }
    }

    /// Once the log outweighs the data.
    fn snapshot_is_due(&self) -> bool {
        self.snapshot.is_none()
            && self.journal.bytes >= self.config.snapshot_bytes
            && self.journal.bytes >= self.read().live_bytes()
    }

    /// A new segment, and beside it a snapshot of all before.
    fn start_snapshot(&mut self) {
        let revision = self.read().revision();
        let Some(sequence) = self.journal.rotate(revision) else { return };
        let pin = Pin::new(&self.memory);
        let (dir, faults, done) = (self.dir.clone(), self.config.faults.clone(), self.commands.clone());
        let path = segment::snapshot_path(&dir, sequence);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let spawned = std::thread::Builder::new().name("store-snapshot".into()).spawn(move || {
            let written = snapshot::write(&pin, &path, sequence, &faults, &stopped)
                .and_then(|()| snapshot::remove_older(&dir, sequence, &faults));
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
        if let Err(error) = result {
            // Nothing is lost, the old segments are still there; it is tried again when as much has come again.
            tracing::warn!(%error, "cannot write a snapshot");
        }
        self.trim();
    }

    fn close(&mut self) {
        self.pace = None;
        let last = self.read().revision();
        self.journal.close(last);
        // The directory must be left alone before its lock is.
        if let Some(Snapshotting { stop, thread }) = self.snapshot.take() {
            stop.store(true, Ordering::Relaxed);
            let _ = thread.join();
        }
        self.watchers.close();
    }

    fn read(&self) -> RwLockReadGuard<'_, Memory> {
        self.memory.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Memory> {
        self.memory.write().unwrap_or_else(PoisonError::into_inner)
    }
}
