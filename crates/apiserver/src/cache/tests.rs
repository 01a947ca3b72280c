//! The cache on top of a store, and its event ring.

use store::log::{Config, LogStore};
use store::{Expect, Write};

use super::*;

const PREFIX: &str = "/registry/configmaps/";

struct TestCache {
    cache: Arc<Cache>,
    store: Arc<LogStore>,
    _stop: watch::Sender<bool>,
    _directory: tempfile::TempDir,
}

impl TestCache {
    async fn start() -> TestCache {
        let directory = tempfile::tempdir().unwrap();
        let store = Arc::new(LogStore::open(directory.path(), Config::default()).unwrap());
        let stop = watch::Sender::new(false);
        let cache = Cache::new();
        cache.start(store.clone(), stop.subscribe()).await.unwrap();
        TestCache { cache, store, _stop: stop, _directory: directory }
    }

    async fn write(&self, key: &str, size: usize, expect: Expect) -> Revision {
        let value = stored(size);
        let write = Write { key: key.into(), value: Some(value), expect, ttl: None, lazy: false };
        let revision = self.store.write(write).await.unwrap();
        self.cache.wait_until_fresh(revision).await.unwrap();
        revision
    }
}

fn stored(size: usize) -> Bytes {
    let metadata = serde_json::json!({"name": "x"});
    let value =
        serde_json::json!({"kind": "K", "apiVersion": "v1", "metadata": metadata, "x": "x".repeat(size)});
    crate::object::to_stored(value)
}

fn object(key: &str, revision: Revision, size: usize) -> Arc<Object> {
    Arc::new(Object::new(key.into(), stored(size), revision).unwrap())
}

fn revisions(batch: EventBatch) -> Option<Vec<Revision>> {
    match batch {
        EventBatch::Events(events) => Some(events.iter().map(|event| event.revision).collect()),
        EventBatch::TooOld => None,
    }
}

#[test]
fn maps_keys_to_kind_prefixes() {
    assert_eq!(prefix_of("/registry/pods/ns/a"), Some("/registry/pods/"));
    assert_eq!(prefix_of("/registry/nodes/a"), Some("/registry/nodes/"));
    assert_eq!(prefix_of("/registry/apps/deployments/ns/a"), Some("/registry/apps/deployments/"));
    for key in ["/registry/pods", "/registry/apps/x", "/else/pods/a", ""] {
        assert_eq!(prefix_of(key), None, "{key}");
    }
}

#[tokio::test]
async fn late_shard_contains_earlier_events() {
    let test_cache = TestCache::start().await;
    let start = test_cache.cache.revision();
    let first = test_cache.write("/registry/configmaps/ns/a", 1, Expect::Absent).await;
    test_cache.write("/registry/pods/ns/a", 1, Expect::Absent).await;
    let shard = test_cache.cache.shard(PREFIX);
    let all = shard.position_after(start).unwrap();
    assert_eq!(revisions(shard.events_from(all, 9)), Some(vec![first]));
    assert!(test_cache.cache.shard("/registry/secrets/").position_after(start).is_ok());
    assert_eq!(shard.snapshot(PREFIX, test_cache.cache.revision()).revision, test_cache.cache.revision());
}

/// With concurrent writers: every change once and in order, and no gap between a snapshot and the
/// events after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_are_complete_and_in_order() {
    let test_cache = Arc::new(TestCache::start().await);
    let shard = test_cache.cache.shard(PREFIX);
    let write_tasks: Vec<_> = (0..8)
        .map(|writer| {
            let test_cache = test_cache.clone();
            tokio::spawn(async move {
                let mut last = Expect::Absent;
                for _ in 0..25 {
                    let key = format!("/registry/configmaps/ns/{writer}");
                    last = Expect::Revision(test_cache.write(&key, 10, last).await);
                }
            })
        })
        .collect();
    let (snapshot, mut position) = shard.snapshot_and_position(PREFIX, test_cache.cache.revision());
    let mut seen: BTreeMap<Arc<str>, Revision> =
        snapshot.objects.iter().map(|object| (object.key.clone(), object.revision)).collect();
    let mut last = snapshot.revision;
    let mut changes = shard.subscribe();
    let mut done = futures_util::future::join_all(write_tasks);
    loop {
        let ended = tokio::select! {
            biased;
            _ = changes.changed() => false,
            _ = &mut done => true,
        };
        let EventBatch::Events(events) = shard.events_from(position, usize::MAX) else { panic!("lost") };
        position += events.len() as u64;
        for event in events {
            assert!(event.revision > last, "{} after {last}", event.revision);
            last = event.revision;
            let before = event.previous.as_ref().map(|object| object.revision);
            assert_eq!(seen.insert(event.object.key.clone(), event.revision), before);
        }
        if ended {
            break;
        }
    }
    let now = shard.snapshot(PREFIX, 0).objects;
    let now: BTreeMap<_, _> = now.iter().map(|object| (object.key.clone(), object.revision)).collect();
    assert_eq!((now.len(), &now), (8, &seen));
}

#[test]
fn ring_drops_old_events_and_reports_too_old() {
    let shard = Shard::new(10);
    let size = 1 << 20;
    for revision in 11..61 {
        shard.put(object("/registry/configmaps/ns/a", revision, size));
    }
    let state = shard.state.read();
    assert!(state.ring_bytes <= MAX_RING_BYTES, "{}", state.ring_bytes);
    let floor = state.floor;
    drop(state);
    assert!((40..60).contains(&floor), "{floor}");
    assert_eq!(
        shard.position_after(floor - 1),
        Err(CacheError::TooOld { requested: floor - 1, oldest: floor })
    );
    let position = shard.position_after(floor).unwrap();
    assert_eq!(revisions(shard.events_from(position, 1)), Some(vec![floor + 1]));
    assert!(matches!(shard.events_from(position - 1, 1), EventBatch::TooOld));
    // Creations have no previous version, so the ring accounts only for the events themselves and
    // keeps all of them.
    let shard = Shard::new(0);
    for revision in 1..101 {
        shard.put(object(&format!("/registry/configmaps/ns/{revision}"), revision, size / 2));
    }
    assert_eq!(shard.position_after(0), Ok(0));
}

#[test]
fn keeps_encoded_lines_only_for_recent_events() {
    let shard = Shard::new(0);
    let size = MAX_ENCODED_BYTES / 4;
    for revision in 1..10 {
        shard.put(object(&format!("/registry/configmaps/ns/{revision}"), revision, size));
        let EventBatch::Events(events) = shard.events_from(0, 99) else { panic!("lost") };
        events.iter().for_each(|event| assert!(event.line().len() > size));
    }
    let state = shard.state.read();
    let built =
        state.ring.iter().filter(|event| matches!(*event.line.lock(), EncodedLine::Encoded(_))).count();
    assert_eq!((built, state.encoded_events), (3, 3));
}

#[test]
fn reload_expires_watch_positions() {
    let shard = Shard::new(5);
    shard.put(object("/registry/configmaps/ns/a", 6, 1));
    let old_position = shard.position_after(6).unwrap();
    shard.reset(BTreeMap::new(), 9);
    assert!(matches!(shard.events_from(old_position, 1), EventBatch::TooOld));
    assert_eq!(shard.position_after(8), Err(CacheError::TooOld { requested: 8, oldest: 9 }));
    let position = shard.position_after(9).unwrap();
    shard.put(object("/registry/configmaps/ns/b", 10, 1));
    assert_eq!(revisions(shard.events_from(position, 9)), Some(vec![10]));
}

#[test]
fn label_index_returns_the_same_objects_as_a_full_scan() {
    let shard = Shard::new(0);
    let put = |i: usize, revision: usize, labels: serde_json::Value| {
        let value = serde_json::json!({"kind": "K", "apiVersion": "v1", "metadata": {"labels": labels}});
        let (key, bytes) = (format!("{PREFIX}ns{}/{i}", i % 2), crate::object::to_stored(value));
        shard.put(Arc::new(Object::new(key.into(), bytes, revision as u64).unwrap()));
    };
    let lists = || shard.state.read().label_index.len();
    let labels = |pairs: &[(&str, &str)]| {
        Labels::new(pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect())
    };
    let check = |pairs: &[(&str, &str)], expected: usize| {
        for prefix in [PREFIX.to_owned(), format!("{PREFIX}ns1/")] {
            let found = shard.snapshot_with_labels(&prefix, 0, &labels(pairs)).objects;
            let mut all = shard.snapshot(&prefix, 0).objects;
            all.retain(|object| pairs.iter().all(|(name, value)| object.label(name) == Some(value)));
            assert_eq!(found.len(), all.len(), "{pairs:?} {prefix}");
            assert!(found.iter().zip(&all).all(|(a, b)| Arc::ptr_eq(a, b)), "{pairs:?} {prefix}");
        }
        assert_eq!(lists(), expected, "{pairs:?}");
    };
    for i in 0..3_000 {
        put(i, i + 1, serde_json::json!({"app": format!("a{}", i % 100), "tier": format!("t{}", i % 3)}));
    }
    // The first request scans and is remembered; the second one creates the list.
    shard.snapshot_with_labels(PREFIX, 0, &labels(&[("app", "a1")]));
    assert_eq!(lists(), 0);
    check(&[("app", "a1")], 1);
    // Labels that many objects have are not indexed.
    (0..3).for_each(|_| check(&[("tier", "t1")], 1));
    (0..2).for_each(|_| check(&[("app", "a2"), ("tier", "t1")], 2));
    (0..2).for_each(|_| check(&[("app", "none")], 3));
    // Change labels, and delete and create objects.
    for i in 0..300 {
        match i % 3 {
            0 => put(i, 4_000 + i, serde_json::json!({"app": "a1"})),
            1 => put(i, 4_000 + i, serde_json::json!({"app": "none", "tier": "t1"})),
            _ => shard.delete(&format!("{PREFIX}ns{}/{i}", i % 2), 4_000 + i as u64),
        }
    }
    for pairs in [&[("app", "a1")][..], &[("app", "a2"), ("tier", "t1")], &[("app", "none")]] {
        check(pairs, 3);
    }
    // The number of lists is limited; the least recently used one is replaced.
    for i in 10..40 {
        let app = format!("a{i}");
        (0..2).for_each(|_| drop(shard.snapshot_with_labels(PREFIX, 0, &labels(&[("app", &app)]))));
        check(&[("app", "a1")], lists());
    }
    assert_eq!(lists(), 8);
    assert!(shard.state.read().label_index.find(PREFIX, &labels(&[("app", "a1")])).is_some());
    assert!(shard.state.read().label_index.find(PREFIX, &labels(&[("app", "none")])).is_none());
    // A list is dropped when most objects match it.
    for i in 0..3_000 {
        put(i, 5_000 + i, serde_json::json!({"app": "a1"}));
    }
    check(&[("app", "a1")], 7);
}

#[test]
fn expires_old_events_and_their_encoded_lines() {
    let shard = Shard::new(0);
    for revision in 1..=3 {
        shard.put(object("/registry/configmaps/ns/a", revision, 10));
    }
    let position = shard.position_after(1).unwrap();
    let retention = |events, bytes| EventRetention { events, bytes };
    let lines = || {
        let state = shard.state.read();
        let built =
            state.ring.iter().filter(|event| matches!(*event.line.lock(), EncodedLine::Encoded(_))).count();
        (built, state.encoded_events, state.encoded_bytes)
    };
    assert!(shard.expire_events(Duration::from_secs(3600), retention(0, 0)), "no event is old enough");
    assert!(
        shard.expire_events(Duration::from_secs(3600), retention(9, 9999)),
        "encoded lines expire by age"
    );
    shard.state.read().ring.iter().for_each(|event| drop(event.line()));
    assert_eq!((lines().0, lines().1), (3, 3));
    assert_eq!(revisions(shard.events_from(position, 9)), Some(vec![2, 3]));
    assert!(!shard.expire_events(Duration::ZERO, retention(2, 9999)), "the newest events are retained");
    assert_eq!(revisions(shard.events_from(position, 9)), Some(vec![2, 3]));
    assert_eq!(lines(), (0, 0, 0), "without encoded lines");
    assert!(!shard.expire_events(Duration::ZERO, retention(2, 1)), "fewer events if they are large");
    assert_eq!(revisions(shard.events_from(position, 9)), None);
    assert_eq!(shard.position_after(2), Err(CacheError::TooOld { requested: 2, oldest: 3 }));
    let position = shard.position_after(3).unwrap();
    shard.put(object("/registry/configmaps/ns/a", 4, 10));
    assert_eq!(revisions(shard.events_from(position, 9)), Some(vec![4]));
    let state = shard.state.read();
    assert_eq!((state.encoded_events, state.ring.len()), (1, 1));
    assert_eq!(state.encoded_bytes, state.ring[0].object.size());
}
