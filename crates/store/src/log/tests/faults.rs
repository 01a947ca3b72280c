//! A disk that refuses: no write is answered that is not stored, reads go on, and so do writes once they can.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;

use proptest::prelude::*;

use super::*;

/// A switch that makes one kind of operation fail.
fn faulty(op: Op) -> (Config, Arc<AtomicBool>) {
    let broken = Arc::new(AtomicBool::new(false));
    let switch = broken.clone();
    let faults: Faults = Arc::new(move |asked| {
        if asked == op && switch.load(Ordering::SeqCst) {
            return Err(io::Error::from_raw_os_error(rustix::io::Errno::NOSPC.raw_os_error()));
        }
        Ok(())
    });
    (Config { faults, ..Config::default() }, broken)
}

/// Tries until the store takes the write again.
async fn write_again(store: &LogStore, write: Write) -> Revision {
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
async fn a_failing_disk_is_told_of_and_recovered_from() {
    for op in [Op::Write, Op::Sync] {
        let dir = directory();
        let (config, broken) = faulty(op);
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
        // Killed now, it comes back with what was answered. Even of lazy writes, here.
        let crashed = copy(dir.path());
        broken.store(false, Ordering::SeqCst);
        let b = write_again(&store, put("/b", "1", Expect::Absent)).await;
        assert_eq!(b, lazy + 1);
        assert!(
            matches!(&next_events(&mut watch).await[..], [Event::Put { entry, .. }] if entry.revision == b)
        );
        update(&store, "/a", "3", a).await;
        let before = contents(&store).await;
        let after_crash = copy(dir.path());
        store.close();
        drop(store);
        for dir in [dir.path(), after_crash.path()] {
            assert_eq!(contents(&open(dir)).await, before, "{op:?}");
        }
        let found = contents(&open(crashed.path())).await;
        assert_eq!(found[0], ("/a".into(), "1".into(), a), "{op:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_snapshot_loses_nothing() {
    for op in [Op::Create, Op::Rename] {
        let dir = directory();
        let (config, broken) = faulty(op);
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
                    revision = write_again(&store, write).await;
                }
                Err(error) => panic!("{error}"),
            }
        }
        let before = contents(&store).await;
        drop(store);
        assert_eq!(contents(&open(dir.path())).await, before);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Any operation may fail at any time; whatever was answered is there afterwards, crash or not.
    #[test]
    fn what_was_answered_is_stored(
        steps in prop::collection::vec((0..4u8, any::<bool>(), prop::option::weighted(0.15, 0..6u8)), 1..60),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let dir = directory();
            // Fails the operation after this many others; then the disk is well again.
            let fuse = Arc::new(AtomicU64::new(u64::MAX));
            let left = fuse.clone();
            let faults: Faults = Arc::new(move |_| {
                if left.fetch_sub(1, Ordering::SeqCst) == 0 {
                    return Err(io::Error::from_raw_os_error(rustix::io::Errno::IO.raw_os_error()));
                }
                Ok(())
            });
            let config = Config { faults, snapshot_bytes: 2 << 10, ..Config::default() };
            let store = LogStore::open(dir.path(), config).unwrap();
            let mut model: BTreeMap<String, (String, Revision)> = BTreeMap::new();
            let mut newest = 1;
            for (n, (key, lazy, fault)) in steps.into_iter().enumerate() {
                if let Some(fault) = fault {
                    fuse.store(fault.into(), Ordering::SeqCst);
                }
                let (key, value) = (format!("/{key}"), format!("{n}{}", "x".repeat(n * 10)));
                let expect = model.get(&key).map_or(Expect::Absent, |(_, revision)| Expect::Revision(*revision));
                let write = Write { lazy, ..put(&key, &value, expect) };
                match store.write(write).await {
                    Ok(revision) => {
                        assert!(revision > newest);
                        newest = revision;
                        model.insert(key, (value, revision));
                    }
                    Err(Error::Unavailable { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
                let expected: Vec<_> = model.iter().map(|(key, (value, revision))| (key.clone(), value.clone(), *revision)).collect();
                assert_eq!(contents(&store).await, expected);
            }
            fuse.store(u64::MAX, Ordering::SeqCst);
            let before = contents(&store).await;
            store.close();
            drop(store);
            // A write refused while failing may still be on its way when the process ends, no other.
            let after = open(dir.path());
            assert!(after.revision().await.unwrap() >= newest);
            let found = contents(&after).await;
            for entry in &before {
                assert!(found.iter().any(|now| now == entry || now.0 == entry.0 && now.2 > newest), "{entry:?}");
            }
        });
    }
}

/// A file system of a few megabytes, for as long as it lives.
struct Small(tempfile::TempDir);

impl Small {
    fn mount() -> Option<Small> {
        let dir = tempfile::tempdir().unwrap();
        let mounted = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=8m", "tmpfs"])
            .arg(dir.path())
            .output();
        if mounted.is_ok_and(|output| output.status.success()) {
            return Some(Small(dir));
        }
        eprintln!("skipped: mounting a file system needs root");
        None
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg(self.0.path()).output();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_really_full_disk() {
    let Some(small) = Small::mount() else { return };
    let (dir, filler) = (small.0.path().join("store"), small.0.path().join("filler"));
    fs::write(&filler, vec![1; 4 << 20]).unwrap();
    let store = open(&dir);
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
    assert_eq!(contents(&store).await.len(), stored);
    fs::remove_file(filler).unwrap();
    write_again(&store, put("/again", "", Expect::Absent)).await;
    drop(store);
    assert_eq!(contents(&open(&dir)).await.len(), stored + 1);
}
