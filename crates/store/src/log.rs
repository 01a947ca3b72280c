//! The embedded engine: all data in memory, made durable by an append-only log with group commit.
//!
//! The directory contains numbered segments (`*.log`), at most one snapshot (`*.snap`) and a lock
//! file. It takes at most twice the live data plus [`Config::snapshot_bytes`] and the preallocated
//! zeros of the log, and twice that while a snapshot is written. See [`recover`] for the handling
//! of corrupt files and [`commit`] for how a write becomes durable.

mod batch;
mod commit;
mod journal;
mod mvcc;
mod record;
mod recover;
mod segment;
mod snapshot;
mod watchers;

use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use rustix::fs::FlockOperation;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use self::commit::{Command, CommitHandle};
use self::mvcc::MvccStore;
pub use self::segment::{DiskOp, FaultHook};
use self::segment::{FileHeader, Segment};
use self::snapshot::PinnedRevision;
use self::watchers::Watchers;
use crate::{Entry, Error, Listener, Page, Revision, Store, Watch, Write};

#[derive(Clone)]
pub struct Config {
    /// The maximum age of the history (for watches and reads at a revision).
    pub history_age: Duration,
    /// The maximum number of events in the history.
    pub history_events: usize,
    /// The maximum size of values in the history that are not current.
    pub history_bytes: u64,
    /// A snapshot is written when the log since the last one is larger than this and than the live
    /// data.
    pub snapshot_bytes: u64,
    /// The maximum delay before a lazy write is synced.
    pub lazy_delay: Duration,
    /// Called by the commit thread when it becomes idle.
    pub on_idle: fn(),
    /// Returns Unix seconds.
    pub clock: Arc<dyn Fn() -> u64 + Send + Sync>,
    /// Injects disk faults in tests.
    pub faults: FaultHook,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            history_age: Duration::from_secs(300),
            history_events: 100_000,
            history_bytes: 64 << 20,
            snapshot_bytes: 16 << 20,
            lazy_delay: Duration::from_secs(1),
            on_idle: || {},
            clock: Arc::new(|| SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs())),
            faults: Arc::new(|_| Ok(())),
        }
    }
}

impl Config {
    /// The revision to compact the history to so that it meets the limits on events and bytes. 0 if
    /// it does.
    fn history_compact_revision(&self, mvcc: &MvccStore) -> Revision {
        let len = mvcc.history_len();
        // Discards a tenth (or a quarter) at a time. Discarding single events would cost work in
        // every batch.
        let over_events = if len > self.history_events { len - self.history_events * 9 / 10 } else { 0 };
        let over_bytes = if mvcc.old_bytes() > self.history_bytes { len.div_ceil(4) } else { 0 };
        let drop = over_events.max(over_bytes);
        if drop == 0 { 0 } else { mvcc.history_at(drop.min(len) - 1).unwrap_or(0) }
    }
}

/// The reason why a directory cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("{path} is in use by another process")]
    Locked { path: PathBuf },
    #[error("{path} is corrupt at offset {offset}: {reason}; restore a backup")]
    Corrupt { path: PathBuf, offset: u64, reason: String },
    #[error("{path} is missing; restore a backup")]
    Missing { path: PathBuf },
    #[error("{path} already holds a store")]
    NotEmpty { path: PathBuf },
    #[error("cannot open store {path}")]
    Io { path: PathBuf, source: io::Error },
}

pub struct LogStore {
    mvcc: Arc<RwLock<MvccStore>>,
    watchers: Arc<Watchers>,
    commit_handle: CommitHandle,
    config: Config,
    thread: Mutex<Option<JoinHandle<()>>>,
    _lock: DirLock,
}

/// The exclusive lock on the directory.
struct DirLock(File);

impl Drop for DirLock {
    fn drop(&mut self) {
        // Closing the file is not enough: a process that is being forked may hold a copy of the
        // descriptor.
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

impl LogStore {
    /// Opens a store. Creates the directory if it is missing. Only one process can open a
    /// directory.
    pub fn open(dir: &Path, config: Config) -> Result<LogStore, OpenError> {
        let io_error = |source| OpenError::Io { path: dir.to_owned(), source };
        let lock = lock_dir(dir)?;
        let recovery = recover::recover(dir, |mvcc| {
            let revision = config.history_compact_revision(mvcc);
            mvcc.set_compact_revision(revision);
            while revision > 0 && mvcc.trim(1000) {}
        })?;
        let mvcc = Arc::new(RwLock::new(MvccStore::default()));
        let watchers = Arc::new(Watchers::default());
        let (commit_handle, thread) =
            CommitHandle::open(config.clone(), dir.to_owned(), mvcc.clone(), watchers.clone(), recovery)
                .map_err(io_error)?;
        Ok(LogStore { mvcc, watchers, commit_handle, config, thread: Mutex::new(Some(thread)), _lock: lock })
    }

    /// Completes queued writes, syncs them and ends all watches. Reads still work afterwards,
    /// writes fail. Blocks on the disk. Dropping the store does the same.
    pub fn close(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let _ = self.commit_handle.send(Command::Close);
            if thread.join().is_err() {
                tracing::error!("commit thread panicked");
            }
        }
    }

    /// Writes a consistent backup to one file while writes continue. Returns its revision. Blocks
    /// on the disk; in async code, call it from a blocking thread.
    pub fn backup(&self, path: &Path) -> io::Result<Revision> {
        let pin = PinnedRevision::new(&self.mvcc);
        snapshot::write(&pin, path, 1, &self.config.faults, &AtomicBool::new(false))?;
        Ok(pin.revision)
    }

    /// Makes the commit thread read the clock again, after a test has moved it.
    pub fn wake(&self) {
        let _ = self.commit_handle.send(Command::Wake);
    }

    fn read(&self) -> RwLockReadGuard<'_, MvccStore> {
        self.mvcc.read().unwrap_or_else(PoisonError::into_inner)
    }

    async fn send_command<T>(
        &self,
        command: impl FnOnce(oneshot::Sender<Result<T, Error>>) -> Command,
    ) -> Result<T, Error> {
        let closed = || Error::Unavailable { reason: "the store is closed".into() };
        let (reply, response) = oneshot::channel();
        self.commit_handle.send(command(reply)).map_err(|_| closed())?;
        response.await.map_err(|_| closed())?
    }
}

impl Drop for LogStore {
    fn drop(&mut self) {
        self.close();
    }
}

#[async_trait]
impl Store for LogStore {
    async fn revision(&self) -> Result<Revision, Error> {
        Ok(self.read().revision())
    }

    async fn get(&self, key: &str) -> Result<Option<Entry>, Error> {
        Ok(self.read().get(key))
    }

    async fn list(
        &self,
        prefix: &str,
        from: Option<&str>,
        limit: usize,
        at: Option<Revision>,
    ) -> Result<Page, Error> {
        self.read().list(prefix, from, limit, at)
    }

    async fn write(&self, write: Write) -> Result<Revision, Error> {
        // An inline commit blocks on the disk, which is not allowed if this is the only worker of
        // the runtime.
        let multi_threaded = Handle::try_current().is_ok_and(|runtime| runtime.metrics().num_workers() > 1);
        let write =
            match if multi_threaded { self.commit_handle.try_commit_inline(write) } else { Err(write) } {
                Ok(result) => return result,
                Err(write) => write,
            };
        self.send_command(|reply| Command::Write(write, reply)).await
    }

    async fn watch(&self, prefix: &str, after: Revision, listener: Listener) -> Result<Watch, Error> {
        self.watchers.add(&self.mvcc, prefix, after, listener)
    }

    async fn compact(&self, revision: Revision) -> Result<(), Error> {
        self.send_command(|reply| Command::Compact(revision, reply)).await
    }

    fn write_failure(&self) -> Option<String> {
        self.commit_handle.failure()
    }
}

/// Verifies a backup completely and creates a store from it in `dir`, which must not contain one.
/// Returns the revision of the backup.
pub fn restore(backup: &Path, dir: &Path) -> Result<Revision, OpenError> {
    let revision = recover::load_snapshot(backup, Some(1), |_| {})?;
    let _lock = lock_dir(dir)?;
    let io_error = |source| OpenError::Io { path: dir.to_owned(), source };
    for file in fs::read_dir(dir).map_err(io_error)? {
        let path = file.map_err(io_error)?.path();
        if path.extension().is_some_and(|extension| extension == "log" || extension == "snap") {
            return Err(OpenError::NotEmpty { path: dir.to_owned() });
        }
    }
    let faults: FaultHook = Arc::new(|_| Ok(()));
    let snapshot = segment::snapshot_path(dir, 1);
    let temporary = snapshot.with_extension("snap.tmp");
    let result = (|| {
        let mut copy = segment::create_file(&temporary, &faults)?;
        io::copy(&mut File::open(backup)?, &mut copy)?;
        copy.sync_all()?;
        segment::rename(&temporary, &snapshot, &faults)?;
        // The segment comes last: a snapshot alone does not open, a segment alone would look like
        // an empty store.
        Segment::create(dir, FileHeader::new(1, revision, 0, 0), &faults).map(drop)
    })();
    result.map_err(io_error)?;
    Ok(revision)
}

/// Creates the directory, restricts it to its owner and locks it.
fn lock_dir(dir: &Path) -> Result<DirLock, OpenError> {
    let io_error = |path: &Path| {
        let path = path.to_owned();
        move |source| OpenError::Io { path, source }
    };
    DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(io_error(dir))?;
    fs::set_permissions(dir, Permissions::from_mode(0o700)).map_err(io_error(dir))?;
    let path = dir.join("lock");
    let lock = segment::create_file(&path, &(Arc::new(|_| Ok(())) as FaultHook)).map_err(io_error(&path))?;
    match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(DirLock(lock)),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(OpenError::Locked { path: dir.to_owned() }),
        Err(error) => Err(io_error(&path)(error.into())),
    }
}

#[cfg(test)]
mod tests;
