//! The shared suite on this engine, and what only this engine promises.

mod crash;
mod damage;
mod faults;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;

use super::commit::ALONE;
use super::*;
use crate::suite::{self, create, delete, next_events, put, update};
use crate::{Event, Expect};

/// In memory if possible: these tests ask what is written, not how fast.
fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

fn open(dir: &Path) -> LogStore {
    LogStore::open(dir, Config::default()).unwrap()
}

/// What a crash now would leave behind.
fn copy(dir: &Path) -> tempfile::TempDir {
    let to = directory();
    for file in fs::read_dir(dir).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), to.path().join(file.file_name())).unwrap();
    }
    to
}

fn files(dir: &Path, kind: &str) -> Vec<PathBuf> {
    let mut found: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|file| file.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == kind))
        .collect();
    found.sort();
    found
}

async fn contents(store: &LogStore) -> Vec<(String, String, Revision)> {
    let page = store.list("", None, 0, None).await.unwrap();
    let text = |entry: &Entry| String::from_utf8(entry.value.to_vec()).unwrap();
    page.entries.iter().map(|entry| (entry.key.to_string(), text(entry), entry.revision)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn suite() {
    let dir = tempfile::tempdir().unwrap();
    suite::run(Arc::new(open(dir.path()))).await;
}

#[tokio::test]
async fn a_restart_keeps_data_revisions_and_history() {
    let dir = directory();
    let store = open(dir.path());
    let a = create(&store, "/a", "1").await;
    let b = create(&store, "/b", "1").await;
    let a = update(&store, "/a", "2", a).await;
    let last = store.write(delete("/b", b)).await.unwrap();
    let before = contents(&store).await;
    drop(store);
    for _ in 0..3 {
        let store = open(dir.path());
        assert_eq!(contents(&store).await, before);
        assert_eq!(store.revision().await.unwrap(), last);
        let mut watch = suite::watch(&store, "/", b).await.unwrap();
        let events = next_events(&mut watch).await;
        assert!(
            matches!(&events[..], [Event::Put { entry, created: false }, Event::Delete { .. }] if entry.revision == a)
        );
        assert_eq!(store.list("/", None, 0, Some(b)).await.unwrap().entries.len(), 2);
    }
    assert_eq!(create(&open(dir.path()), "/c", "").await, last + 1);
}

#[tokio::test]
async fn a_directory_belongs_to_one_store_and_one_user() {
    let dir = directory();
    let path = dir.path().join("deep/store");
    let store = open(&path);
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
    open(&path);
}

#[tokio::test]
async fn after_closing_reads_work_and_nothing_else() {
    let dir = directory();
    let store = open(dir.path());
    create(&store, "/a", "").await;
    let mut watch = suite::watch(&store, "/", store.revision().await.unwrap()).await.unwrap();
    store.close();
    assert_eq!(watch.events.recv().await, None);
    assert!(store.get("/a").await.unwrap().is_some());
    let write = store.write(put("/b", "", Expect::Absent)).await;
    assert!(matches!(write, Err(Error::Unavailable { .. })), "{write:?}");
}

#[tokio::test]
async fn keys_expire_by_the_clock_also_across_a_restart() {
    let dir = directory();
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
    assert_eq!(contents(&store).await.len(), 1);
    drop(store);
    now.fetch_add(10, Ordering::SeqCst);
    let store = LogStore::open(dir.path(), config).unwrap();
    let mut watch = suite::watch(&store, "/", 4).await.unwrap();
    assert_eq!(next_events(&mut watch).await, [Event::Delete { key: "/b".into(), revision: 5 }]);
}

#[tokio::test]
async fn the_log_stays_in_proportion_to_the_data() {
    let dir = directory();
    let bound = 64 << 10;
    let config = Config { snapshot_bytes: bound, history_events: 10, ..Config::default() };
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
    let expected = contents(&store).await;
    store.close();
    // Two megabytes have been written; the rest is zeros ahead of the log, twice.
    let size: u64 =
        fs::read_dir(dir.path()).unwrap().map(|file| file.unwrap().metadata().unwrap().len()).sum();
    assert!(size < 4 * bound + (2 << 20) + (64 << 10), "{size}");
    drop(store);
    let store = LogStore::open(dir.path(), config).unwrap();
    assert_eq!(contents(&store).await, expected);
    assert_eq!(store.revision().await.unwrap(), revisions[19]);
    let old = store.list("/", None, 0, Some(revisions[19] - 1000)).await;
    assert!(matches!(old, Err(Error::Compacted { .. })), "{old:?}");
}

#[tokio::test]
async fn history_is_bounded_by_events_bytes_and_age() {
    let value = "x".repeat(100);
    let many = Config::default();
    for (config, kept) in [
        (Config { history_events: 50, ..many.clone() }, 51),
        (Config { history_bytes: 2000, ..many.clone() }, 22),
        (Config { history_age: Duration::ZERO, ..many.clone() }, 1),
    ] {
        let dir = directory();
        let store = LogStore::open(dir.path(), config).unwrap();
        let mut last = create(&store, "/a", &value).await;
        for _ in 0..200 {
            last = update(&store, "/a", &value, last).await;
        }
        // Answered after what the writes before it left to do.
        store.compact(1).await.unwrap();
        let oldest = last - store.read().floor();
        assert!(oldest < kept, "{oldest}");
        let old = suite::watch(&store, "/", last - kept).await.err();
        assert!(matches!(old, Some(Error::Compacted { .. })), "{old:?}");
    }
}

#[tokio::test]
async fn lazy_writes_are_seen_at_once_and_their_revisions_never_used_again() {
    let dir = directory();
    let lazy_delay = Duration::from_secs(3600);
    let syncs = Arc::new(AtomicU64::new(0));
    let counter = syncs.clone();
    let faults: Faults = Arc::new(move |op| {
        counter.fetch_add(u64::from(op == Op::Sync), Ordering::SeqCst);
        Ok(())
    });
    let store = LogStore::open(dir.path(), Config { lazy_delay, faults, ..Config::default() }).unwrap();
    let mut last = create(&store, "/lease", "0").await;
    let synced = copy(dir.path());
    let before = syncs.load(Ordering::SeqCst);
    for n in 1..100 {
        let write = Write { lazy: true, ..put("/lease", &n.to_string(), Expect::Revision(last)) };
        last = store.write(write).await.unwrap();
        assert_eq!(store.get("/lease").await.unwrap().unwrap().revision, last);
    }
    assert_eq!(syncs.load(Ordering::SeqCst) - before, 1, "for the reservation alone");
    // The machine stops: of the lazy writes only the one that rode along with the reservation is sure.
    let log = files(dir.path(), "log").pop().unwrap();
    let keep = fs::read(&log).unwrap();
    let first_lazy = find_end(&keep, 3);
    let crashed = files(synced.path(), "log").pop().unwrap();
    fs::write(&crashed, &keep[..first_lazy]).unwrap();
    let after = open(synced.path());
    assert_eq!(after.get("/lease").await.unwrap().unwrap().value, "1");
    assert!(create(&after, "/b", "").await > last);
    // After an orderly end nothing is skipped.
    drop(store);
    assert_eq!(create(&open(dir.path()), "/b", "").await, last + 1);
}

/// Where the `n`th record of a segment ends.
fn find_end(bytes: &[u8], n: usize) -> usize {
    let mut at = segment::HEADER;
    for _ in 0..n {
        let len = u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        at += record::HEAD + len as usize;
    }
    at
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backup_taken_while_writing_restores_to_one_moment() {
    let dir = directory();
    let store = Arc::new(open(&dir.path().join("store")));
    // Two keys that always move together: one is never more than a step ahead of the other.
    let (mut left, mut right) = (create(&*store, "/l", "0").await, create(&*store, "/r", "0").await);
    let writer = {
        let store = store.clone();
        tokio::spawn(async move {
            for n in 1..300 {
                left = update(&*store, "/l", &n.to_string(), left).await;
                right = update(&*store, "/r", &n.to_string(), right).await;
            }
        })
    };
    let mut taken = Vec::new();
    for n in 0..8 {
        let (store, path) = (store.clone(), dir.path().join(format!("backup-{n}")));
        let backup = tokio::task::spawn_blocking(move || (store.backup(&path).unwrap(), path));
        taken.push(backup.await.unwrap());
    }
    writer.await.unwrap();
    for (n, (revision, backup)) in taken.iter().enumerate() {
        let to = dir.path().join(format!("restored-{n}"));
        assert_eq!(restore(backup, &to).unwrap(), *revision);
        assert!(matches!(restore(backup, &to), Err(OpenError::NotEmpty { .. })));
        let restored = open(&to);
        assert_eq!(restored.revision().await.unwrap(), *revision);
        let found = contents(&restored).await;
        let value = |n: usize| found[n].1.parse::<u64>().unwrap();
        assert!(value(0) == value(1) || value(0) == value(1) + 1, "{found:?}");
        create(&restored, "/new", "").await;
        drop(restored);
        assert_eq!(contents(&open(&to)).await.len(), 3);
    }
    let mut bytes = fs::read(&taken[0].1).unwrap();
    let middle = bytes.len() / 2;
    for broken in [middle, bytes.len() - 1] {
        bytes[broken] ^= 4;
        fs::write(dir.path().join("broken"), &bytes).unwrap();
        let error = restore(&dir.path().join("broken"), &dir.path().join("never")).unwrap_err();
        assert!(matches!(error, OpenError::Damaged { .. }), "{error}");
        bytes[broken] ^= 4;
        fs::write(dir.path().join("broken"), &bytes[..broken]).unwrap();
        let error = restore(&dir.path().join("broken"), &dir.path().join("never")).unwrap_err();
        assert!(matches!(error, OpenError::Damaged { .. }), "{error}");
    }
    assert!(!dir.path().join("never").exists());
}

#[tokio::test]
async fn writes_that_wait_share_one_sync_and_none_is_seen_before_it() {
    let dir = directory();
    let (entered, syncing) = mpsc::channel();
    let (gate, go) = mpsc::channel::<()>();
    let gates = Mutex::new((entered, go));
    let armed = Arc::new(AtomicBool::new(false));
    let on = armed.clone();
    let faults: Faults = Arc::new(move |op| {
        if op == Op::Sync && on.load(Ordering::SeqCst) {
            let gates = gates.lock().unwrap();
            gates.0.send(()).unwrap();
            // An error means that the test is over.
            let _ = gates.1.recv();
        }
        Ok(())
    });
    let store = Arc::new(LogStore::open(dir.path(), Config { faults, ..Config::default() }).unwrap());
    armed.store(true, Ordering::SeqCst);
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
    armed.store(false, Ordering::SeqCst);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_that_comes_alone_is_committed_where_it_is_asked_for() {
    let dir = directory();
    let by = Arc::new(Mutex::new(Vec::new()));
    let log = by.clone();
    let faults: Faults = Arc::new(move |op| {
        if op == Op::Sync {
            let thread = std::thread::current();
            log.lock().unwrap().push(thread.name() == Some("store-commit"));
        }
        Ok(())
    });
    let store = LogStore::open(dir.path(), Config { faults, ..Config::default() }).unwrap();
    let check = async |alone: u32, pace: Option<u64>, write: Write, by_thread: bool| {
        store.desk.set_past(alone, pace.map(Duration::from_millis)).await;
        by.lock().unwrap().clear();
        store.write(write).await.unwrap();
        assert_eq!(*by.lock().unwrap(), [by_thread], "{alone} alone with pace {pace:?}");
    };
    let new = |key: &str| put(key, "", Expect::Absent);
    check(ALONE, None, new("/unknown"), true).await;
    check(ALONE, Some(0), new("/quick"), false).await;
    check(ALONE, Some(9), new("/slow"), true).await;
    check(ALONE - 1, Some(0), new("/crowd"), true).await;
    check(ALONE, Some(0), Write { ttl: Some(Duration::from_secs(9)), ..new("/expires") }, true).await;
    check(ALONE, Some(0), Write { lazy: true, ..new("/lazy") }, true).await;
    store.close();
    let late = store.write(new("/late")).await;
    assert!(matches!(late, Err(Error::Unavailable { .. })), "{late:?}");
}
