//! Disk failures: no write is acknowledged that is not stored, reads continue, and writes succeed
//! again once the disk accepts them.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;

use proptest::prelude::*;

use super::*;

/// A disk on which one kind of operation can be made to fail.
fn failing_disk(op: DiskOp) -> (Config, Arc<AtomicBool>) {
    let broken = Arc::new(AtomicBool::new(false));
    let switch = broken.clone();
    let faults: FaultHook = Arc::new(move |requested| {
        if requested == op && switch.load(Ordering::SeqCst) {
            return Err(io::Error::from_raw_os_error(rustix::io::Errno::NOSPC.raw_os_error()));
        }
        Ok(())
    });
    (Config { faults, ..Config::default() }, broken)
}

/// Retries until the store accepts the write.
async fn retry_write(store: &LogStore, write: Write) -> Revision {
    let started = std::time::Instant::now();
    loop {
        match store.write(write.clone()).await {
            Ok(revision) => return revision,
            Err(Error::Unavailable { .. }) if started.elapsed() < Duration::from_secs(10) => {}
            Err(error) => panic!("{error}"),
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_accepts_writes_after_disk_failure() {
    for op in [DiskOp::Write, DiskOp::Sync] {
        let dir = temp_dir();
        let (config, broken) = failing_disk(op);
        let store = LogStore::open(dir.path(), config).unwrap();
        let a = create(&store, "/a", "1").await;
        let lazy = Write { lazy: true, ..put("/lazy", "1", Expect::Absent) };
        let lazy = store.write(lazy).await.unwrap();
        let mut watch = suite::watch(&store, "/", lazy).await.unwrap();
        broken.store(true, Ordering::SeqCst);
        for _ in 0..3 {
            match store.write(put("/a", "2", Expect::Revision(a))).await {
                Err(Error::Unavailable { reason }) => {
                    assert!(reason.contains("No space left on device"), "{reason}");
                    assert!(reason.contains(dir.path().to_str().unwrap()), "{reason}");
                }
                other => panic!("{op:?}: {other:?}"),
            }
            assert_eq!(store.get("/a").await.unwrap().unwrap().value, "1");
            assert_eq!(store.revision().await.unwrap(), lazy);
        }
        // After a crash now, all acknowledged writes are recovered; in this case even the lazy
        // ones.
        let crash_copy = copy_dir(dir.path());
        broken.store(false, Ordering::SeqCst);
        let b = retry_write(&store, put("/b", "1", Expect::Absent)).await;
        assert_eq!(b, lazy + 1);
        assert!(
            matches!(&next_events(&mut watch).await[..], [Event::Put { entry, .. }] if entry.revision == b)
        );
        update(&store, "/a", "3", a).await;
        let before = list_entries(&store).await;
        let later_copy = copy_dir(dir.path());
        store.close();
        drop(store);
        for dir in [dir.path(), later_copy.path()] {
            assert_eq!(list_entries(&open_store(dir)).await, before, "{op:?}");
        }
        let found = list_entries(&open_store(crash_copy.path())).await;
        assert_eq!(found[0], ("/a".into(), "1".into(), a), "{op:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_snapshot_keeps_data() {
    for op in [DiskOp::Create, DiskOp::Rename] {
        let dir = temp_dir();
        let (config, broken) = failing_disk(op);
        let config = Config { snapshot_bytes: 4 << 10, ..config };
        let store = LogStore::open(dir.path(), config).unwrap();
        let mut revision = create(&store, "/a", "").await;
        for n in 0..200 {
            broken.store(n % 20 > 10, Ordering::SeqCst);
            let write = put("/a", &format!("{n}{}", "x".repeat(500)), Expect::Revision(revision));
            match store.write(write.clone()).await {
                Ok(new) => revision = new,
                Err(Error::Unavailable { .. }) => {
                    broken.store(false, Ordering::SeqCst);
                    revision = retry_write(&store, write).await;
                }
                Err(error) => panic!("{error}"),
            }
        }
        let before = list_entries(&store).await;
        drop(store);
        assert_eq!(list_entries(&open_store(dir.path())).await, before);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Any operation may fail at any time. Acknowledged writes are present afterwards, with and
    /// without a crash.
    #[test]
    fn acked_writes_persist_after_disk_faults(
        steps in prop::collection::vec((0..4u8, any::<bool>(), prop::option::weighted(0.15, 0..6u8)), 1..60),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let dir = temp_dir();
            // Fails one operation after this many others.
            let ops_until_fault = Arc::new(AtomicU64::new(u64::MAX));
            let ops_left = ops_until_fault.clone();
            let faults: FaultHook = Arc::new(move |_| {
                if ops_left.fetch_sub(1, Ordering::SeqCst) == 0 {
                    return Err(io::Error::from_raw_os_error(rustix::io::Errno::IO.raw_os_error()));
                }
                Ok(())
            });
            let config = Config { faults, snapshot_bytes: 2 << 10, ..Config::default() };
            let store = LogStore::open(dir.path(), config).unwrap();
            let mut model: BTreeMap<String, (String, Revision)> = BTreeMap::new();
            let mut latest = 1;
            for (n, (key, lazy, fault)) in steps.into_iter().enumerate() {
                if let Some(fault) = fault {
                    ops_until_fault.store(fault.into(), Ordering::SeqCst);
                }
                let (key, value) = (format!("/{key}"), format!("{n}{}", "x".repeat(n * 10)));
                let expect = model.get(&key).map_or(Expect::Absent, |(_, revision)| Expect::Revision(*revision));
                let write = Write { lazy, ..put(&key, &value, expect) };
                match store.write(write).await {
                    Ok(revision) => {
                        assert!(revision > latest);
                        latest = revision;
                        model.insert(key, (value, revision));
                    }
                    Err(Error::Unavailable { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
                let expected: Vec<_> = model.iter().map(|(key, (value, revision))| (key.clone(), value.clone(), *revision)).collect();
                assert_eq!(list_entries(&store).await, expected);
            }
            ops_until_fault.store(u64::MAX, Ordering::SeqCst);
            let before = list_entries(&store).await;
            store.close();
            drop(store);
            // A write that was rejected during the failure may still be on disk, but no other.
            let after = open_store(dir.path());
            assert!(after.revision().await.unwrap() >= latest);
            let found = list_entries(&after).await;
            for entry in &before {
                assert!(found.iter().any(|now| now == entry || now.0 == entry.0 && now.2 > latest), "{entry:?}");
            }
        });
    }
}

/// A tmpfs of a few megabytes that is unmounted on drop.
struct SmallTmpfs(tempfile::TempDir);

impl SmallTmpfs {
    fn mount() -> Option<SmallTmpfs> {
        let dir = tempfile::tempdir().unwrap();
        let mounted = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=8m", "tmpfs"])
            .arg(dir.path())
            .output();
        if mounted.is_ok_and(|output| output.status.success()) {
            return Some(SmallTmpfs(dir));
        }
        eprintln!("skipped: mounting a file system needs root");
        None
    }
}

impl Drop for SmallTmpfs {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg(self.0.path()).output();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_disk_rejects_writes_until_space_is_available() {
    let Some(tmpfs) = SmallTmpfs::mount() else { return };
    let (dir, filler) = (tmpfs.0.path().join("store"), tmpfs.0.path().join("filler"));
    fs::write(&filler, vec![1; 4 << 20]).unwrap();
    let store = open_store(&dir);
    let value = "x".repeat(100_000);
    let mut stored = 0;
    let reason = loop {
        match store.write(put(&format!("/{stored:03}"), &value, Expect::Absent)).await {
            Ok(_) => stored += 1,
            Err(Error::Unavailable { reason }) => break reason,
            Err(error) => panic!("{error}"),
        }
        assert!(stored < 100);
    };
    assert!(reason.contains("No space left on device"), "{reason}");
    assert_eq!(list_entries(&store).await.len(), stored);
    fs::remove_file(filler).unwrap();
    retry_write(&store, put("/again", "", Expect::Absent)).await;
    drop(store);
    assert_eq!(list_entries(&open_store(&dir)).await.len(), stored + 1);
}
