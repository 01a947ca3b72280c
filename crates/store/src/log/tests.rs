//! Runs the shared suite on the log engine, and tests what is specific to this engine.

mod corruption;
mod crash;
mod faults;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;

use super::commit::MIN_UNCONTENDED_WRITES;
use super::*;
use crate::suite::{self, create, delete, next_events, put, update};
use crate::{Event, Expect};

/// On tmpfs if possible: these tests do not depend on a real disk.
fn temp_dir() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

fn open_store(dir: &Path) -> LogStore {
    LogStore::open(dir, Config::default()).unwrap()
}

/// Copies the directory, as a crash at this moment would leave it.
fn copy_dir(dir: &Path) -> tempfile::TempDir {
    let to = temp_dir();
    for file in fs::read_dir(dir).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), to.path().join(file.file_name())).unwrap();
    }
    to
}

fn files_with_extension(dir: &Path, kind: &str) -> Vec<PathBuf> {
    let mut found: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|file| file.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == kind))
        .collect();
    found.sort();
    found
}

async fn list_entries(store: &LogStore) -> Vec<(String, String, Revision)> {
    let page = store.list("", None, 0, None).await.unwrap();
    let text = |entry: &Entry| String::from_utf8(entry.value.to_vec()).unwrap();
    page.entries.iter().map(|entry| (entry.key.to_string(), text(entry), entry.revision)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passes_store_suite() {
    let dir = tempfile::tempdir().unwrap();
    suite::run(Arc::new(open_store(dir.path()))).await;
}

#[tokio::test]
async fn restart_keeps_data_revisions_and_history() {
    let dir = temp_dir();
    let store = open_store(dir.path());
    let a = create(&store, "/a", "1").await;
    let b = create(&store, "/b", "1").await;
    let a = update(&store, "/a", "2", a).await;
    let last = store.write(delete("/b", b)).await.unwrap();
    let before = list_entries(&store).await;
    drop(store);
    for _ in 0..3 {
        let store = open_store(dir.path());
        assert_eq!(list_entries(&store).await, before);
        assert_eq!(store.revision().await.unwrap(), last);
        let mut watch = suite::watch(&store, "/", b).await.unwrap();
        let events = next_events(&mut watch).await;
        assert!(
            matches!(&events[..], [Event::Put { entry, created: false }, Event::Delete { .. }] if entry.revision == a)
        );
        assert_eq!(store.list("/", None, 0, Some(b)).await.unwrap().entries.len(), 2);
    }
    assert_eq!(create(&open_store(dir.path()), "/c", "").await, last + 1);
}

#[tokio::test]
async fn open_locks_directory_and_sets_permissions() {
    let dir = temp_dir();
    let path = dir.path().join("deep/store");
    let store = open_store(&path);
    create(&store, "/a", "").await;
    let second = LogStore::open(&path, Config::default()).err().unwrap();
    assert!(matches!(&second, OpenError::Locked { .. }));
    assert_eq!(second.to_string(), format!("{} is in use by another process", path.display()));
    store.backup(&dir.path().join("backup")).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&path), mode(&dir.path().join("backup"))), (0o700, 0o600));
    for file in fs::read_dir(&path).unwrap() {
        assert_eq!(mode(&file.unwrap().path()), 0o600);
    }
    drop(store);
    open_store(&path);
}

#[tokio::test]
async fn closed_store_is_read_only() {
    let dir = temp_dir();
    let store = open_store(dir.path());
    create(&store, "/a", "").await;
    let mut watch = suite::watch(&store, "/", store.revision().await.unwrap()).await.unwrap();
    store.close();
    assert_eq!(watch.events.recv().await, None);
    assert!(store.get("/a").await.unwrap().is_some());
    let write = store.write(put("/b", "", Expect::Absent)).await;
    assert!(matches!(write, Err(Error::Unavailable { .. })), "{write:?}");
}

#[tokio::test]
async fn keys_expire_across_restart() {
    let dir = temp_dir();
    let now = Arc::new(AtomicU64::new(1_000_000));
    let clock = now.clone();
    let config = Config { clock: Arc::new(move || clock.load(Ordering::SeqCst)), ..Config::default() };
    let store = LogStore::open(dir.path(), config.clone()).unwrap();
    let hour = Some(Duration::from_secs(3600));
    for key in ["/a", "/b"] {
        store.write(Write { ttl: hour, ..put(key, "", Expect::Absent) }).await.unwrap();
        now.fetch_add(10, Ordering::SeqCst);
    }
    let mut watch = suite::watch(&store, "/", 3).await.unwrap();
    now.store(1_000_000 + 3600, Ordering::SeqCst);
    store.wake();
    assert_eq!(next_events(&mut watch).await, [Event::Delete { key: "/a".into(), revision: 4 }]);
    assert_eq!(list_entries(&store).await.len(), 1);
    drop(store);
    now.fetch_add(10, Ordering::SeqCst);
    let store = LogStore::open(dir.path(), config).unwrap();
    let mut watch = suite::watch(&store, "/", 4).await.unwrap();
    assert_eq!(next_events(&mut watch).await, [Event::Delete { key: "/b".into(), revision: 5 }]);
}

#[tokio::test]
async fn snapshot_limits_log_size() {
    let dir = temp_dir();
    let snapshot_bytes = 64 << 10;
    let config = Config { snapshot_bytes, history_events: 10, ..Config::default() };
    let store = LogStore::open(dir.path(), config.clone()).unwrap();
    let value = "x".repeat(1000);
    let mut revisions = Vec::new();
    for n in 0..20 {
        revisions.push(create(&store, &format!("/k/{n}"), &value).await);
    }
    for n in 0..2000 {
        revisions[n % 20] =
            update(&store, &format!("/k/{}", n % 20), &format!("{n}{value}"), revisions[n % 20]).await;
    }
    let expected = list_entries(&store).await;
    store.close();
    // About two megabytes were written. The rest is preallocated zeros, twice.
    let size: u64 =
        fs::read_dir(dir.path()).unwrap().map(|file| file.unwrap().metadata().unwrap().len()).sum();
    assert!(size < 4 * snapshot_bytes + (2 << 20) + (64 << 10), "{size}");
    drop(store);
    let store = LogStore::open(dir.path(), config).unwrap();
    assert_eq!(list_entries(&store).await, expected);
    assert_eq!(store.revision().await.unwrap(), revisions[19]);
    let old = store.list("/", None, 0, Some(revisions[19] - 1000)).await;
    assert!(matches!(old, Err(Error::Compacted { .. })), "{old:?}");
}

#[tokio::test]
async fn history_is_limited_by_events_bytes_and_age() {
    let value = "x".repeat(100);
    let config_base = Config::default();
    for (config, max_history) in [
        (Config { history_events: 50, ..config_base.clone() }, 51),
        (Config { history_bytes: 2000, ..config_base.clone() }, 22),
        (Config { history_age: Duration::ZERO, ..config_base.clone() }, 1),
    ] {
        let dir = temp_dir();
        let store = LogStore::open(dir.path(), config).unwrap();
        let mut last = create(&store, "/a", &value).await;
        for _ in 0..200 {
            last = update(&store, "/a", &value, last).await;
        }
        // The reply comes after the maintenance that the previous writes triggered.
        store.compact(1).await.unwrap();
        let oldest = last - store.read().compact_revision();
        assert!(oldest < max_history, "{oldest}");
        let old = suite::watch(&store, "/", last - max_history).await.err();
        assert!(matches!(old, Some(Error::Compacted { .. })), "{old:?}");
    }
}

#[tokio::test]
async fn lazy_writes_are_visible_before_sync_and_revisions_are_not_reused() {
    let dir = temp_dir();
    let lazy_delay = Duration::from_secs(3600);
    let syncs = Arc::new(AtomicU64::new(0));
    let counter = syncs.clone();
    let faults: FaultHook = Arc::new(move |op| {
        counter.fetch_add(u64::from(op == DiskOp::Sync), Ordering::SeqCst);
        Ok(())
    });
    let store = LogStore::open(dir.path(), Config { lazy_delay, faults, ..Config::default() }).unwrap();
    let mut last = create(&store, "/lease", "0").await;
    let synced = copy_dir(dir.path());
    let before = syncs.load(Ordering::SeqCst);
    for n in 1..100 {
        let write = Write { lazy: true, ..put("/lease", &n.to_string(), Expect::Revision(last)) };
        last = store.write(write).await.unwrap();
        assert_eq!(store.get("/lease").await.unwrap().unwrap().revision, last);
    }
    assert_eq!(syncs.load(Ordering::SeqCst) - before, 1, "only for the reservation");
    // Simulates a machine crash: only the lazy write that was synced with the reservation is
    // certain to be on disk.
    let log = files_with_extension(dir.path(), "log").pop().unwrap();
    let segment_bytes = fs::read(&log).unwrap();
    let first_lazy = find_end(&segment_bytes, 3);
    let last_segment = files_with_extension(synced.path(), "log").pop().unwrap();
    fs::write(&last_segment, &segment_bytes[..first_lazy]).unwrap();
    let after = open_store(synced.path());
    assert_eq!(after.get("/lease").await.unwrap().unwrap().value, "1");
    assert!(create(&after, "/b", "").await > last);
    // A clean shutdown skips no revisions.
    drop(store);
    assert_eq!(create(&open_store(dir.path()), "/b", "").await, last + 1);
}

/// The end offset of the `n`th record of a segment.
fn find_end(bytes: &[u8], n: usize) -> usize {
    let mut at = segment::HEADER_BYTES;
    for _ in 0..n {
        let len = u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        at += record::RECORD_HEADER_BYTES + len as usize;
    }
    at
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn backup_during_writes_is_consistent() {
    let dir = temp_dir();
    let store = Arc::new(open_store(&dir.path().join("store")));
    // Two keys that are incremented alternately: one is never more than a step ahead of the other.
    let (mut left_revision, mut right_revision) =
        (create(&*store, "/l", "0").await, create(&*store, "/r", "0").await);
    let writer = {
        let store = store.clone();
        tokio::spawn(async move {
            for n in 1..300 {
                left_revision = update(&*store, "/l", &n.to_string(), left_revision).await;
                right_revision = update(&*store, "/r", &n.to_string(), right_revision).await;
            }
        })
    };
    let mut backup_files = Vec::new();
    for n in 0..8 {
        let (store, path) = (store.clone(), dir.path().join(format!("backup-{n}")));
        let backup = tokio::task::spawn_blocking(move || (store.backup(&path).unwrap(), path));
        backup_files.push(backup.await.unwrap());
    }
    writer.await.unwrap();
    for (n, (revision, backup)) in backup_files.iter().enumerate() {
        let to = dir.path().join(format!("restored-{n}"));
        assert_eq!(restore(backup, &to).unwrap(), *revision);
        assert!(matches!(restore(backup, &to), Err(OpenError::NotEmpty { .. })));
        let restore_store = open_store(&to);
        assert_eq!(restore_store.revision().await.unwrap(), *revision);
        let found = list_entries(&restore_store).await;
        let value = |n: usize| found[n].1.parse::<u64>().unwrap();
        assert!(value(0) == value(1) || value(0) == value(1) + 1, "{found:?}");
        create(&restore_store, "/new", "").await;
        drop(restore_store);
        assert_eq!(list_entries(&open_store(&to)).await.len(), 3);
    }
    let mut bytes = fs::read(&backup_files[0].1).unwrap();
    let middle = bytes.len() / 2;
    for broken in [middle, bytes.len() - 1] {
        bytes[broken] ^= 4;
        fs::write(dir.path().join("broken"), &bytes).unwrap();
        let error = restore(&dir.path().join("broken"), &dir.path().join("never")).unwrap_err();
        assert!(matches!(error, OpenError::Corrupt { .. }), "{error}");
        bytes[broken] ^= 4;
        fs::write(dir.path().join("broken"), &bytes[..broken]).unwrap();
        let error = restore(&dir.path().join("broken"), &dir.path().join("never")).unwrap_err();
        assert!(matches!(error, OpenError::Corrupt { .. }), "{error}");
    }
    assert!(!dir.path().join("never").exists());
}

#[tokio::test]
async fn queued_writes_share_one_sync_and_are_invisible_before_it() {
    let dir = temp_dir();
    let (sync_started, syncing) = mpsc::channel();
    let (gate, resume) = mpsc::channel::<()>();
    let gates = Mutex::new((sync_started, resume));
    let block_sync = Arc::new(AtomicBool::new(false));
    let block_sync_clone = block_sync.clone();
    let faults: FaultHook = Arc::new(move |op| {
        if op == DiskOp::Sync && block_sync_clone.load(Ordering::SeqCst) {
            let gates = gates.lock().unwrap();
            gates.0.send(()).unwrap();
            // The channel is closed when the test ends.
            let _ = gates.1.recv();
        }
        Ok(())
    });
    let store = Arc::new(LogStore::open(dir.path(), Config { faults, ..Config::default() }).unwrap());
    block_sync.store(true, Ordering::SeqCst);
    let writer = |n: usize| {
        let store = store.clone();
        tokio::spawn(async move { create(&*store, &format!("/{n}"), "").await })
    };
    let first = writer(0);
    tokio::task::yield_now().await;
    syncing.recv().unwrap();
    let rest: Vec<_> = (1..50).map(writer).collect();
    tokio::task::yield_now().await;
    assert_eq!((store.revision().await.unwrap(), store.get("/0").await.unwrap()), (1, None));
    assert!(!first.is_finished());
    gate.send(()).unwrap();
    assert_eq!(first.await.unwrap(), 2);
    syncing.recv().unwrap();
    assert_eq!(store.revision().await.unwrap(), 2);
    gate.send(()).unwrap();
    let mut revisions = Vec::new();
    for write in rest {
        revisions.push(write.await.unwrap());
    }
    assert_eq!(revisions, (3..52).collect::<Vec<_>>());
    assert!(syncing.try_recv().is_err());
    block_sync.store(false, Ordering::SeqCst);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uncontended_write_is_committed_by_caller() {
    let dir = temp_dir();
    let synced_by_worker = Arc::new(Mutex::new(Vec::new()));
    let log = synced_by_worker.clone();
    let faults: FaultHook = Arc::new(move |op| {
        if op == DiskOp::Sync {
            let thread = std::thread::current();
            log.lock().unwrap().push(thread.name() == Some("store-commit"));
        }
        Ok(())
    });
    let store = LogStore::open(dir.path(), Config { faults, ..Config::default() }).unwrap();
    let check = async |uncontended_writes: u32, sync_latency: Option<u64>, write: Write, by_thread: bool| {
        store
            .commit_handle
            .set_write_history(uncontended_writes, sync_latency.map(Duration::from_millis))
            .await;
        synced_by_worker.lock().unwrap().clear();
        store.write(write).await.unwrap();
        assert_eq!(
            *synced_by_worker.lock().unwrap(),
            [by_thread],
            "{uncontended_writes} uncontended writes with latency {sync_latency:?}"
        );
    };
    let new = |key: &str| put(key, "", Expect::Absent);
    check(MIN_UNCONTENDED_WRITES, None, new("/unknown"), true).await;
    check(MIN_UNCONTENDED_WRITES, Some(0), new("/quick"), false).await;
    check(MIN_UNCONTENDED_WRITES, Some(9), new("/slow"), true).await;
    check(MIN_UNCONTENDED_WRITES - 1, Some(0), new("/crowd"), true).await;
    check(
        MIN_UNCONTENDED_WRITES,
        Some(0),
        Write { ttl: Some(Duration::from_secs(9)), ..new("/expires") },
        true,
    )
    .await;
    check(MIN_UNCONTENDED_WRITES, Some(0), Write { lazy: true, ..new("/lazy") }, true).await;
    store.close();
    let late = store.write(new("/late")).await;
    assert!(matches!(late, Err(Error::Unavailable { .. })), "{late:?}");
}
