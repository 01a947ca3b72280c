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
use super::journal::{Journal, WriteFailure};
use super::mvcc::{Change, MvccStore};
use super::recover::Recovery;
use super::snapshot::{self, PinnedRevision};
use super::watchers::Watchers;
use super::{Config, segment};
use crate::{Error, Revision, Write};
use tokio::sync::oneshot;

/// Writes and bytes of one batch; beyond that, the first have waited long enough.
const MAX_BATCH_WRITES: usize = 4096;
const MAX_BATCH_BYTES: usize = 8 << 20;
/// Events of history freed under one hold of the lock.
const TRIM_BATCH_EVENTS: usize = 1000;
/// Keys that should have expired are tried this often on a failed disk.
const EXPIRE_RETRY: Duration = Duration::from_secs(1);
/// After this many writes that came alone the next is taken to, too. Of a crowd each would wait for the disk in turn,
/// where one wait does for all.
pub const MIN_UNCONTENDED_WRITES: u32 = 8;
/// A disk that takes less than this for a write, on average, is quick: one may wait for it where others wait too.
const MAX_INLINE_COMMIT_LATENCY: Duration = Duration::from_millis(1);

pub enum Command {
    Write(Write, Reply<Revision>),
    Compact(Revision, Reply<()>),
    SnapshotFinished(io::Result<()>),
    /// The clock may have moved.
    Wake,
    Close,
}

/// Where writes are handed in.
pub struct CommitHandle {
    worker: Arc<Mutex<CommitWorker>>,
    commands: Sender<Command>,
    /// The thread is at work, or has ended.
    busy: Arc<AtomicBool>,
    uncontended_writes: Arc<AtomicU32>,
    failure: WriteFailure,
}

pub struct CommitWorker {
    config: Config,
    dir: PathBuf,
    mvcc: Arc<RwLock<MvccStore>>,
    watchers: Arc<Watchers>,
    commands: Sender<Command>,
    journal: Journal,
    expire_times: BTreeSet<(u64, Arc<str>)>,
    /// Which revision was the newest when, to forget history by age.
    revision_times: VecDeque<(Instant, Revision)>,
    snapshot: Option<SnapshotTask>,
    /// How many writes in a row came alone.
    uncontended_writes: Arc<AtomicU32>,
    /// What a durable write took of late; `None` when it is not known, or no more may be written.
    sync_latency: Option<Duration>,
    /// The thread has to look after something.
    maintenance_pending: bool,
}

/// A snapshot being written by a thread of its own.
struct SnapshotTask {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl CommitHandle {
    /// Starts the thread.
    pub fn open(
        config: Config,
        dir: PathBuf,
        mvcc: Arc<RwLock<MvccStore>>,
        watchers: Arc<Watchers>,
        recovery: Recovery,
    ) -> io::Result<(CommitHandle, JoinHandle<()>)> {
        let (commands, queue) = mpsc::channel();
        let worker = CommitWorker::new(config, dir, mvcc, watchers, commands.clone(), recovery)?;
        let (uncontended_writes, on_idle) = (worker.uncontended_writes.clone(), worker.config.on_idle);
        let failure = worker.journal.failure.clone();
        let worker = Arc::new(Mutex::new(worker));
        let busy = Arc::new(AtomicBool::new(false));
        let handle = CommitHandle {
            worker: worker.clone(),
            commands,
            busy: busy.clone(),
            uncontended_writes,
            failure,
        };
        let thread = std::thread::Builder::new()
            .name("store-commit".into())
            .spawn(move || run(&worker, &queue, &busy, on_idle))?;
        Ok((handle, thread))
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
    pub fn try_commit_inline(&self, write: Write) -> Result<Result<Revision, Error>, Write> {
        // What is lazy or expires is looked after by the thread.
        if write.lazy || write.ttl.is_some() || self.busy.load(Ordering::Acquire) {
            return Err(write);
        }
        let Ok(mut worker) = self.worker.try_lock() else {
            self.uncontended_writes.store(0, Ordering::Relaxed);
            return Err(write);
        };
        let is_uncontended = self.uncontended_writes.load(Ordering::Relaxed) >= MIN_UNCONTENDED_WRITES;
        if !is_uncontended
            || worker.sync_latency.is_none_or(|sync_latency| sync_latency > MAX_INLINE_COMMIT_LATENCY)
        {
            return Err(write);
        }
        let (reply, mut result) = oneshot::channel();
        let (batch, _) = worker.collect_batch(Some(Command::Write(write, reply)), || None);
        worker.commit(batch);
        if worker.needs_maintenance() {
            let _ = self.send(Command::Wake);
        }
        drop(worker);
        Ok(result
            .try_recv()
            .unwrap_or_else(|_| Err(Error::Unavailable { reason: "the store failed".into() })))
    }
}

#[cfg(test)]
impl CommitHandle {
    /// As if so many writes had come alone and taken that long, once the thread sleeps.
    pub async fn set_write_history(&self, uncontended_writes: u32, sync_latency: Option<Duration>) {
        while self.busy.load(Ordering::Acquire) {
            tokio::task::yield_now().await;
        }
        self.uncontended_writes.store(uncontended_writes, Ordering::Relaxed);
        self.worker.lock().unwrap().sync_latency = sync_latency;
    }
}

/// What the thread does. It ends when somebody who held the committer broke: what is in it is not to be trusted then.
fn run(worker: &Mutex<CommitWorker>, queue: &Receiver<Command>, busy: &AtomicBool, on_idle: fn()) {
    while let Ok(wait) = worker.lock().map(|worker| worker.deadline()) {
        busy.store(false, Ordering::Release);
        on_idle();
        let first = match wait {
            None => queue.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(wait) => queue.recv_timeout(wait),
        };
        busy.store(true, Ordering::Release);
        let first = match first {
            Ok(command) => Some(command),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(Command::Close),
        };
        let Ok(mut worker) = worker.lock() else { return };
        let (mut batch, next_command) = worker.collect_batch(first, || queue.try_recv().ok());
        worker.expire(&mut batch);
        worker.commit(batch);
        match next_command {
            Some(Command::Compact(revision, reply)) => {
                let _ = reply.send(worker.compact(revision));
            }
            Some(Command::SnapshotFinished(result)) => worker.finish_snapshot(result),
            Some(Command::Close) => return worker.close(),
            Some(Command::Write(..) | Command::Wake) | None => {}
        }
        worker.run_maintenance();
    }
}

impl CommitWorker {
    fn new(
        config: Config,
        dir: PathBuf,
        mvcc: Arc<RwLock<MvccStore>>,
        watchers: Arc<Watchers>,
        commands: Sender<Command>,
        recovery: Recovery,
    ) -> io::Result<CommitWorker> {
        let journal = Journal::open(&dir, &config.faults, &recovery)?;
        let data = recovery.mvcc;
        let expire_times = data.expire_times().collect();
        let mut revision_times = VecDeque::new();
        if data.history_len() > 0 {
            revision_times.push_back((Instant::now(), data.revision()));
        }
        *mvcc.write().unwrap_or_else(PoisonError::into_inner) = data;
        Ok(CommitWorker {
            config,
            dir,
            mvcc,
            watchers,
            commands,
            journal,
            expire_times,
            revision_times,
            snapshot: None,
            uncontended_writes: Arc::default(),
            sync_latency: None,
            maintenance_pending: false,
        })
    }

    /// How long to sleep when nothing comes in; `None`: there is nothing to wake up for.
    fn deadline(&self) -> Option<Duration> {
        let now = Instant::now();
        let expiry = self.expire_times.first().map(|(expires, _)| {
            let remaining = Duration::from_secs(expires.saturating_sub((self.config.clock)()));
            if self.journal.is_failed() { remaining.max(EXPIRE_RETRY) } else { remaining }
        });
        let age = self.revision_times.front().and_then(|(when, _)| when.checked_add(self.config.history_age));
        [self.journal.deadline(self.config.lazy_delay), age]
            .into_iter()
            .flatten()
            .map(|when| when.saturating_duration_since(now))
            .chain(expiry)
            .min()
    }

    /// Decides the writes that wait, up to a command that is something else.
    fn collect_batch(
        &self,
        first: Option<Command>,
        mut queue: impl FnMut() -> Option<Command>,
    ) -> (Batch, Option<Command>) {
        let mvcc = self.read();
        let mut batch = Batch::new(mvcc.revision());
        let (mut next, mut bytes) = (first, 0);
        let now = (self.config.clock)();
        while let Some(command) = next.take() {
            let Command::Write(write, reply) = command else { return (batch, Some(command)) };
            bytes += write.value.as_ref().map_or(0, bytes::Bytes::len);
            batch.add_write(&mvcc, now, write, reply);
            if batch.results.len() < MAX_BATCH_WRITES && bytes < MAX_BATCH_BYTES {
                next = queue();
            }
        }
        (batch, None)
    }

    /// Deletes what has outlived its time, as ordinary (lazy) deletes.
    fn expire(&mut self, batch: &mut Batch) {
        if self.expire_times.is_empty() {
            return;
        }
        let now = (self.config.clock)();
        while let Some((expires, _)) = self.expire_times.first()
            && *expires <= now
            && batch.changes.len() < MAX_BATCH_WRITES * 2
        {
            let Some((expires, key)) = self.expire_times.pop_first() else { break };
            let current = self.read().expiry(&key);
            // A key written again has another expiry, or will have one after this batch.
            if current == Some(expires) && !batch.changes_key(&key) {
                batch.add_change(key, None, 0);
            }
        }
    }

    fn commit(&mut self, batch: Batch) {
        if !batch.changes.is_empty() {
            let started = Instant::now();
            if let Err(reason) = self.journal.append(&batch.changes, batch.before, batch.must_sync) {
                self.sync_latency = None;
                return self.reject(batch, &reason);
            }
            match batch.changes.len() {
                1 => self.uncontended_writes.fetch_add(1, Ordering::Relaxed),
                _ => self.uncontended_writes.swap(0, Ordering::Relaxed),
            };
            if batch.must_sync {
                let latency = started.elapsed();
                self.sync_latency =
                    Some(self.sync_latency.map_or(latency, |sync_latency| (sync_latency * 7 + latency) / 8));
            }
            let last = batch.last_revision();
            let changes: Vec<_> = batch.changes.into_iter().map(Change::into_owned).collect();
            for change in &changes {
                if change.expires > 0 {
                    self.expire_times.insert((change.expires, change.key.clone()));
                }
            }
            let events: Vec<_> = {
                let mut mvcc = self.write();
                changes.into_iter().map(|change| mvcc.apply(change)).collect()
            };
            self.watchers.publish(&events, last);
            let now = Instant::now();
            if self.revision_times.back().is_none_or(|(when, _)| now - *when >= self.config.history_age / 10)
            {
                self.revision_times.push_back((now, last));
                self.maintenance_pending = true;
            }
        }
        for (reply, result) in batch.results {
            let _ = reply.send(result);
        }
    }

    fn needs_maintenance(&self) -> bool {
        self.maintenance_pending
            || self.journal.is_failed()
            || self.should_snapshot()
            || self.config.history_compact_revision(&self.read()) > 0
    }

    /// What is not urgent for those who write.
    fn run_maintenance(&mut self) {
        self.maintenance_pending = false;
        let revision = self.read().revision();
        self.journal.run_maintenance(self.config.lazy_delay, revision);
        self.compact_history();
        if self.should_snapshot() {
            self.start_snapshot();
        }
    }

    /// Nothing of the batch has happened.
    fn reject(&mut self, batch: Batch, reason: &str) {
        for change in batch.changes {
            // Keys that should expire must do so later.
            let expires = self.read().expiry(&change.key).unwrap_or(0);
            if expires > 0 {
                self.expire_times.insert((expires, change.key));
            }
        }
        for (reply, _) in batch.results {
            let _ = reply.send(Err(Error::Unavailable { reason: reason.to_owned() }));
        }
    }

    fn compact(&mut self, revision: Revision) -> Result<(), Error> {
        let current = self.read().revision();
        if revision > current {
            return Err(Error::Future { requested: revision, current });
        }
        self.set_compact_revision(revision);
        Ok(())
    }

    fn set_compact_revision(&mut self, revision: Revision) {
        self.write().set_compact_revision(revision);
        self.trim();
        while self.revision_times.front().is_some_and(|(_, mark)| *mark <= revision) {
            self.revision_times.pop_front();
        }
    }

    fn trim(&self) {
        while self.write().trim(TRIM_BATCH_EVENTS) {}
    }

    fn compact_history(&mut self) {
        let mut compact_revision = self.config.history_compact_revision(&self.read());
        while let Some((when, revision)) = self.revision_times.front()
            && when.elapsed() >= self.config.history_age
        {
            compact_revision = compact_revision.max(*revision);
            self.revision_times.pop_front();
        }
        if compact_revision > self.read().compact_revision() {
            self.set_compact_revision(compact_revision);
        }
    }

    /// Once the log outweighs the data.
    fn should_snapshot(&self) -> bool {
        self.snapshot.is_none()
            && self.journal.bytes >= self.config.snapshot_bytes
            && self.journal.bytes >= self.read().live_bytes()
    }

    /// A new segment, and beside it a snapshot of all before.
    fn start_snapshot(&mut self) {
        let revision = self.read().revision();
        let Some(sequence) = self.journal.rotate(revision) else { return };
        let pin = PinnedRevision::new(&self.mvcc);
        let (dir, faults, finished) = (self.dir.clone(), self.config.faults.clone(), self.commands.clone());
        let path = segment::snapshot_path(&dir, sequence);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let spawn_result = std::thread::Builder::new().name("store-snapshot".into()).spawn(move || {
            let result = snapshot::write(&pin, &path, sequence, &faults, &stopped)
                .and_then(|()| snapshot::remove_obsolete_files(&dir, sequence, &faults));
            drop(pin);
            let _ = finished.send(Command::SnapshotFinished(result));
        });
        match spawn_result {
            Ok(thread) => self.snapshot = Some(SnapshotTask { stop, thread }),
            Err(error) => self.finish_snapshot(Err(error)),
        }
    }

    fn finish_snapshot(&mut self, result: io::Result<()>) {
        self.snapshot = None;
        if let Err(error) = result {
            // Nothing is lost, the old segments are still there; it is tried again when as much has come again.
            tracing::warn!(%error, "cannot write a snapshot");
        }
        self.trim();
    }

    fn close(&mut self) {
        self.sync_latency = None;
        let last = self.read().revision();
        self.journal.close(last);
        // The directory must be left alone before its lock is.
        if let Some(SnapshotTask { stop, thread }) = self.snapshot.take() {
            stop.store(true, Ordering::Relaxed);
            let _ = thread.join();
        }
        self.watchers.close();
    }

    fn read(&self) -> RwLockReadGuard<'_, MvccStore> {
        self.mvcc.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, MvccStore> {
        self.mvcc.write().unwrap_or_else(PoisonError::into_inner)
    }
}
