//! Group commit. The commit thread drains the queue, checks the preconditions, appends all writes
//! to the log and syncs once. Then the batch becomes visible, watchers get its events and the
//! writers get their results.
//!
//! An uncontended write is committed by its caller instead ([`CommitHandle::try_commit_inline`]),
//! because waking the thread and then the caller costs as much as the rest of the commit.

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

/// Limits of a batch, which bound the latency of its first writes.
const MAX_BATCH_WRITES: usize = 4096;
const MAX_BATCH_BYTES: usize = 8 << 20;
/// Events of history that are freed while the lock is held once.
const TRIM_BATCH_EVENTS: usize = 1000;
/// The retry interval for expired keys while the disk fails.
const EXPIRE_RETRY: Duration = Duration::from_secs(1);
/// After this many uncontended writes in a row, the next one is assumed to be uncontended, too.
/// Concurrent inline commits would sync one after the other, where a batch syncs once.
pub const MIN_UNCONTENDED_WRITES: u32 = 8;
/// A disk whose average latency of a durable write is below this is fast enough to block an async
/// worker.
const MAX_INLINE_COMMIT_LATENCY: Duration = Duration::from_millis(1);

pub enum Command {
    Write(Write, Reply<Revision>),
    Compact(Revision, Reply<()>),
    SnapshotFinished(io::Result<()>),
    /// The clock may have changed.
    Wake,
    Close,
}

/// Hands writes to the commit thread, or commits them inline.
pub struct CommitHandle {
    worker: Arc<Mutex<CommitWorker>>,
    commands: Sender<Command>,
    /// Whether the commit thread is working or has ended.
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
    /// The current revision at points in time, to discard history by age.
    revision_times: VecDeque<(Instant, Revision)>,
    snapshot: Option<SnapshotTask>,
    /// The number of uncontended writes in a row.
    uncontended_writes: Arc<AtomicU32>,
    /// The moving average of the latency of durable writes. `None` if it is unknown, or if writes
    /// must not be committed inline.
    sync_latency: Option<Duration>,
    /// Set if the commit thread has to update its timers.
    maintenance_pending: bool,
}

/// A snapshot that is being written by a background thread.
struct SnapshotTask {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl CommitHandle {
    /// Starts the commit thread.
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

    /// The reason why the last write failed. `None` once the disk accepts writes again.
    pub fn failure(&self) -> Option<String> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Commits a write on the current thread and blocks on the disk, if no other write is in
    /// progress and the disk is fast. Otherwise returns the write, to be sent to the commit thread.
    pub fn try_commit_inline(&self, write: Write) -> Result<Result<Revision, Error>, Write> {
        // Timers for lazy and expiring writes are handled by the commit thread.
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
            .unwrap_or_else(|_| Err(Error::Unavailable { reason: "commit returned no result".into() })))
    }
}

#[cfg(test)]
impl CommitHandle {
    /// Sets the history of uncontended writes and the latency once the commit thread is idle.
    pub async fn set_write_history(&self, uncontended_writes: u32, sync_latency: Option<Duration>) {
        while self.busy.load(Ordering::Acquire) {
            tokio::task::yield_now().await;
        }
        self.uncontended_writes.store(uncontended_writes, Ordering::Relaxed);
        self.worker.lock().unwrap().sync_latency = sync_latency;
    }
}

/// The loop of the commit thread. Ends if the mutex is poisoned, because the state of the worker
/// may be inconsistent then.
fn run(worker: &Mutex<CommitWorker>, queue: &Receiver<Command>, busy: &AtomicBool, on_idle: fn()) {
    while let Ok(wait) = worker.lock().map(|worker| worker.deadline()) {
        // From here on a writer may commit inline: it holds the mutex of the worker while the
        // thread waits for a command.
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

    /// The time until the next timer. `None` if there is none.
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

    /// Adds queued writes to a batch, up to the batch limits or to the first command that is not a
    /// write.
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

    /// Adds deletes of expired keys to the batch. They are lazy.
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
            // The key has been rewritten since, or is rewritten in this batch, with another expiry
            // time.
            if current == Some(expires) && !batch.changes_key(&key) {
                batch.add_change(key, None, 0);
            }
        }
    }

    fn commit(&mut self, batch: Batch) {
        if !batch.changes.is_empty() {
            // The order is fixed: log, sync, apply, publish, reply. Nothing is visible before it is
            // in the log, and a watcher gets an event before its writer gets the result.
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

    /// Work that writers do not wait for.
    fn run_maintenance(&mut self) {
        self.maintenance_pending = false;
        let revision = self.read().revision();
        self.journal.run_maintenance(self.config.lazy_delay, revision);
        self.compact_history();
        if self.should_snapshot() {
            self.start_snapshot();
        }
    }

    /// Fails all writes of a batch that could not be stored.
    fn reject(&mut self, batch: Batch, reason: &str) {
        for change in batch.changes {
            // Expired keys are deleted later.
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

    /// Whether the log is larger than its limit and than the data.
    fn should_snapshot(&self) -> bool {
        self.snapshot.is_none()
            && self.journal.bytes >= self.config.snapshot_bytes
            && self.journal.bytes >= self.read().live_bytes()
    }

    /// Starts a new segment and writes a snapshot of everything before it in the background.
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
            // No data is lost: the old segments are kept. The next attempt follows when the log has
            // grown again.
            tracing::warn!(%error, "snapshot failed, will retry when the log has grown");
        }
        self.trim();
    }

    fn close(&mut self) {
        self.sync_latency = None;
        let last = self.read().revision();
        self.journal.close(last);
        // The snapshot thread must not touch the directory after its lock is released.
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
