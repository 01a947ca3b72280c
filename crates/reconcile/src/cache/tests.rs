use std::collections::{BTreeMap, VecDeque};

use async_trait::async_trait;
use client::{Watch, WatchChange, WatchEvent};
use k8s_openapi::api::core::v1::Pod;
use parking_lot::Mutex;
use proptest::prelude::*;
use serde_json::json;

use super::*;

/// Returns the given events and then fails.
struct FakeWatch(VecDeque<WatchEvent>);

#[async_trait]
impl Watch for FakeWatch {
    async fn next(&mut self) -> Result<WatchEvent, Error> {
        self.0.pop_front().ok_or_else(|| Error::Unreachable("the end".into()))
    }
}

fn by_node(pod: &Pod, found: &mut dyn FnMut(&str)) {
    pod.spec.iter().filter_map(|spec| spec.node_name.as_deref()).for_each(found);
}

fn raw(name: &str, uid: &str, owner: &str, node: &str, revision: u64) -> RawObject {
    let value = json!({
        "kind": "Pod", "apiVersion": "v1",
        "metadata": {
            "name": name, "namespace": "default", "uid": uid, "labels": {"node": node},
            "managedFields": [{"manager": "test"}],
            "ownerReferences": [{"apiVersion": "v1", "kind": "X", "name": "x", "uid": owner, "controller": true}]
        },
        "spec": {"containers": [], "nodeName": node}
    });
    RawObject::new(value.to_string(), Some(revision))
}

async fn apply_events(cache: &Cache<Pod>, events: Vec<WatchEvent>) {
    cache.indexer.run_watch(&mut FakeWatch(events.into())).await.expect_err("feeds of tests end");
}

fn names(pods: &[Arc<Pod>]) -> Vec<&str> {
    pods.iter().map(|pod| pod.name()).collect()
}

#[tokio::test]
async fn returns_objects_by_name_owner_index_and_label() {
    let cache = Cache::new(&[Index { name: "node", values: by_node }]);
    let objects =
        vec![raw("a", "1", "o1", "n1", 5), raw("b", "2", "o1", "n2", 6), raw("c", "3", "o2", "n1", 7)];
    apply_events(&cache, vec![WatchEvent::Replace { objects, revision: 9 }]).await;
    assert_eq!(cache.revision(), 9);
    assert_eq!(names(&cache.owned_by("o1")), ["a", "b"]);
    assert_eq!(names(&cache.indexed("node", "n1")), ["a", "c"]);
    assert_eq!(names(&cache.matching("default", &LabelSelector::parse("node=n2").unwrap())), ["b"]);
    assert!(cache.in_namespace("other").is_empty());
    let a = cache.get(&Key::new("default", "a")).unwrap();
    assert_eq!((a.revision(), &a.metadata.managed_fields), (5, &None));
    assert!(cache.get_exactly(&a.key(), "2").is_none());
}

#[tokio::test]
async fn sends_deletion_before_addition_when_uid_changes() {
    let cache = Cache::new(&[]);
    let updates = Arc::new(Mutex::new(Vec::new()));
    let log = updates.clone();
    cache.listen(move |changed: ObjectUpdate<'_, Pod>| {
        let uid = |pod: Option<&Arc<Pod>>| pod.map_or("-", |pod| pod.uid()).to_owned();
        log.lock().push(format!("{}>{}", uid(changed.before), uid(changed.after)));
    });
    let change = |object, deleted| WatchChange { object, deleted };
    let changes = vec![
        change(raw("a", "1", "o", "n", 1), false),
        change(raw("a", "1", "o", "n", 2), false),
        change(raw("a", "2", "o", "n", 4), false),
        change(raw("a", "2", "o", "n", 5), true),
    ];
    apply_events(&cache, vec![WatchEvent::Changes { changes, revision: 5 }]).await;
    assert_eq!(*updates.lock(), ["->1", "1>1", "1>-", "->2", "2>-"]);
}

#[tokio::test]
async fn drops_decoded_objects_that_are_not_used() {
    let cache = Cache::new(&[Index { name: "node", values: by_node }]);
    let objects = vec![raw("a", "1", "o1", "n1", 5), raw("b", "2", "o2", "n2", 6)];
    apply_events(&cache, vec![WatchEvent::Replace { objects, revision: 9 }]).await;
    let key = Key::new("default", "b");
    let typed = |pod: Option<Arc<Pod>>| Arc::downgrade(&pod.expect("it is there"));
    let (a, b) = (typed(cache.owned_by("o1").pop()), typed(cache.get(&key)));
    assert!(a.upgrade().is_some() && b.upgrade().is_some());
    for _ in 0..5 {
        assert!(cache.indexer.collect_garbage(), "one object is still in use");
        assert_eq!(cache.indexed("node", "n1").len(), 1);
        assert!(a.upgrade().is_some() && b.upgrade().is_none());
    }
    while cache.indexer.collect_garbage() {}
    assert!(a.upgrade().is_none());
    assert_eq!(names(&cache.all()), ["a", "b"]);
}

#[tokio::test]
async fn limits_number_of_recent_decoded_objects() {
    let cache = Cache::new(&[]);
    let first = Arc::new(Mutex::new(None));
    let seen = first.clone();
    cache.listen(move |changed: ObjectUpdate<'_, Pod>| {
        seen.lock().get_or_insert_with(|| Arc::downgrade(changed.latest()));
    });
    let objects = (0..1100).map(|i| raw(&format!("p{i}"), &i.to_string(), "o", "n", i + 1)).collect();
    apply_events(&cache, vec![WatchEvent::Replace { objects, revision: 2000 }]).await;
    assert!(first.lock().as_ref().expect("the first was notified").upgrade().is_none());
}

#[tokio::test(start_paused = true)]
async fn waiting_for_missing_revision_times_out() {
    let cache: Arc<Cache<Pod>> = Cache::new(&[]);
    let error = cache.wait_until_revision(7).await.expect_err("nothing ever comes");
    assert_eq!(error.to_string(), "revision 7 of pods did not show up in the cache in time");
}

proptest! {
    /// After any sequence of events the indexes agree with a scan of all objects, and the listener has seen
    /// exactly the objects in the cache.
    #[test]
    fn indexes_and_listeners_are_consistent_with_objects(
        steps in prop::collection::vec((0..5u8, 0..3u8, 0..3u8, 0..7u8), 0..60)
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let cache = Cache::new(&[Index { name: "node", values: by_node }]);
            let observed: Arc<Mutex<BTreeMap<Key, String>>> = Arc::default();
            let log = observed.clone();
            cache.listen(move |changed: ObjectUpdate<'_, Pod>| {
                let mut observed = log.lock();
                let known = observed.remove(&changed.latest().key());
                assert_eq!(known.as_deref(), changed.before.map(|pod| pod.uid()));
                if let Some(after) = changed.after {
                    observed.insert(after.key(), after.uid().to_owned());
                }
            });
            for (revision, (name, owner, node, step)) in (1..).zip(steps) {
                if step == 6 {
                    cache.indexer.collect_garbage();
                    continue;
                }
                let (name, node) = (format!("p{name}"), format!("n{node}"));
                let pod = raw(&name, &format!("{name}-{}", step % 2), &owner.to_string(), &node, revision);
                let there = cache.get(&Key::new("default", &name)).is_some();
                let events = match step {
                    0 => WatchEvent::Replace { objects: vec![pod], revision },
                    1 if there => WatchEvent::Changes { changes: vec![WatchChange { object: pod, deleted: true }], revision },
                    1 => continue,
                    _ => WatchEvent::Changes { changes: vec![WatchChange { object: pod, deleted: false }], revision },
                };
                apply_events(&cache, vec![events]).await;
                let all = cache.all();
                let keys: Vec<_> = all.iter().map(|pod| (pod.key(), pod.uid().to_owned())).collect();
                assert_eq!(keys, observed.lock().clone().into_iter().collect::<Vec<_>>());
                for value in 0..3 {
                    let node = format!("n{value}");
                    let expected: Vec<_> = all.iter().filter(|pod| pod.label("node") == Some(&node)).cloned().collect();
                    assert_eq!(cache.indexed("node", &node), expected);
                    let owner = value.to_string();
                    let owned = |pod: &&Arc<Pod>| pod.controller().is_some_and(|reference| reference.uid == owner);
                    assert_eq!(cache.owned_by(&owner), all.iter().filter(owned).cloned().collect::<Vec<_>>());
                }
            }
        });
    }
}
