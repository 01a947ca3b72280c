//! The tests that every engine must pass.
//!
//! Each test uses its own key prefix, so that they can share one etcd. Revisions are compared
//! relative to each other, never with constants, except in [`empty_store`].

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::{Entry, Error, Event, Expect, Revision, Store, Watch, Write};
use tokio::sync::mpsc;

/// Runs all tests on an empty store.
pub async fn run(store: Arc<dyn Store>) {
    empty_store(&*store).await;
    preconditions(&*store).await;
    lists(&*store).await;
    lists_at_a_revision(&*store).await;
    watch_from_a_revision(&*store).await;
    watch_progress(&*store).await;
    slow_watcher_gets_all_events(&*store).await;
    ttl(&*store).await;
    concurrent_writes(store.clone()).await;
    watchers_at_different_rates(store.clone()).await;
    compaction(&*store).await;
}

pub fn put(key: &str, value: &str, expect: Expect) -> Write {
    let value = Some(Bytes::copy_from_slice(value.as_bytes()));
    Write { key: key.into(), value, expect, ttl: None, lazy: false }
}

pub fn delete(key: &str, revision: Revision) -> Write {
    Write { key: key.into(), value: None, expect: Expect::Revision(revision), ttl: None, lazy: false }
}

pub async fn create(store: &dyn Store, key: &str, value: &str) -> Revision {
    store.write(put(key, value, Expect::Absent)).await.unwrap()
}

pub async fn update(store: &dyn Store, key: &str, value: &str, before: Revision) -> Revision {
    store.write(put(key, value, Expect::Revision(before))).await.unwrap()
}

/// The events of a watch that have not been checked yet.
pub struct EventStream {
    pub events: mpsc::UnboundedReceiver<Vec<Event>>,
    _watch: Watch,
}

pub async fn watch(store: &dyn Store, prefix: &str, after: Revision) -> Result<EventStream, Error> {
    let (sender, events) = mpsc::unbounded_channel();
    let listener = move |batch: Vec<Event>| drop(sender.send(batch));
    Ok(EventStream { events, _watch: store.watch(prefix, after, Box::new(listener)).await? })
}

/// The next batch with events, within 20 seconds. Progress notifications are skipped.
pub async fn next_events(watch: &mut EventStream) -> Vec<Event> {
    loop {
        let events = next_batch(watch).await.expect("the watch ended");
        let events: Vec<_> =
            events.into_iter().filter(|event| !matches!(event, Event::Progress(_))).collect();
        if !events.is_empty() {
            return events;
        }
    }
}

pub async fn next_batch(watch: &mut EventStream) -> Option<Vec<Event>> {
    tokio::time::timeout(Duration::from_secs(20), watch.events.recv())
        .await
        .expect("no event within 20 seconds")
}

/// Collects events until the watch has reached revision `until`, by an event or a progress
/// notification.
pub async fn events_until(watch: &mut EventStream, until: Revision) -> Vec<Event> {
    let mut all = Vec::new();
    loop {
        let mut progress = 0;
        for event in next_batch(watch).await.expect("the watch ended") {
            progress = event.revision();
            if !matches!(event, Event::Progress(_)) {
                all.push(event);
            }
        }
        if progress >= until {
            return all;
        }
    }
}

/// `key=value@n` where n counts from `base`, `+` marks a creation and `-` a deletion.
fn render_events(events: &[Event], base: Revision) -> String {
    let each = |event: &Event| match event {
        Event::Put { entry, created } => {
            format!("{}{}", if *created { "+" } else { "" }, render_entry(entry, base))
        }
        Event::Delete { key, revision } => format!("-{key}@{}", revision - base),
        Event::Progress(revision) => format!("progress@{}", revision - base),
    };
    events.iter().map(each).collect::<Vec<_>>().join(" ")
}

fn render_entry(entry: &Entry, base: Revision) -> String {
    format!("{}={}@{}", entry.key, String::from_utf8_lossy(&entry.value), entry.revision - base)
}

async fn empty_store(store: &dyn Store) {
    assert_eq!(store.revision().await.unwrap(), 1);
    let page = store.list("", None, 0, None).await.unwrap();
    assert_eq!((page.entries.len(), page.revision, page.remaining), (0, 1, 0));
    assert_eq!(store.get("/fresh").await.unwrap(), None);
    let mut watch = watch(store, "/fresh", 1).await.unwrap();
    assert_eq!(create(store, "/fresh", "a").await, 2);
    assert_eq!(store.revision().await.unwrap(), 2);
    assert_eq!(render_events(&next_events(&mut watch).await, 0), "+/fresh=a@2");
}

async fn preconditions(store: &dyn Store) {
    let key = "/pre/a";
    let base = store.revision().await.unwrap();
    let one = create(store, key, "1").await;
    assert_eq!(one, base + 1);
    let create_result = store.write(put(key, "2", Expect::Absent)).await;
    assert!(matches!(create_result, Err(Error::Exists { .. })), "{create_result:?}");

    let two = update(store, key, "2", one).await;
    assert_eq!(two, base + 2, "a failed write uses no revision");
    for stale in [one, two + 100, 0] {
        for write in [put(key, "3", Expect::Revision(stale)), delete(key, stale)] {
            match store.write(write).await {
                Err(Error::Conflict { key: conflict_key, current: Some(current) }) => {
                    assert_eq!((&*conflict_key, render_entry(&current, base)), (key, "/pre/a=2@2".into()));
                }
                other => panic!("{other:?}"),
            }
        }
    }
    let three = store.write(delete(key, two)).await.unwrap();
    assert_eq!(three, base + 3);
    assert_eq!(store.get(key).await.unwrap(), None);
    for write in [
        put(key, "3", Expect::Revision(two)),
        delete(key, two),
        Write { expect: Expect::Absent, ..delete(key, 0) },
    ] {
        let result = store.write(write).await;
        assert!(matches!(result, Err(Error::Conflict { current: None, .. })), "{result:?}");
    }
    assert_eq!(create(store, key, "").await, base + 4);
    assert_eq!(render_entry(&store.get(key).await.unwrap().unwrap(), base), "/pre/a=@4");
    let lazy = Write { lazy: true, ..put(key, "lazy", Expect::Revision(base + 4)) };
    assert_eq!(store.write(lazy).await.unwrap(), base + 5);
    assert_eq!(render_entry(&store.get(key).await.unwrap().unwrap(), base), "/pre/a=lazy@5");
}

#[track_caller]
fn check_page(page: &crate::Page, keys: &[&str], remaining: usize) {
    let found: Vec<_> = page.entries.iter().map(|entry| &*entry.key).collect();
    assert_eq!((found.as_slice(), page.remaining), (keys, remaining));
}

async fn lists(store: &dyn Store) {
    // Neither in key order nor all under the prefix.
    for key in ["/list/b", "/list/a/1", "/list/a.", "/list/a/2", "/list", "/list/a", "/lisu", "/list/é"] {
        create(store, key, "").await;
    }
    let all = ["/list/a", "/list/a.", "/list/a/1", "/list/a/2", "/list/b", "/list/é"];
    type Case<'a> = (&'a str, Option<&'a str>, usize, &'a [&'a str], usize);
    let cases: &[Case] = &[
        ("/list/", None, 0, &all, 0),
        ("/list/", None, 4, &all[..4], 2),
        ("/list/", None, 6, &all, 0),
        ("/list/", None, 7, &all, 0),
        ("/list/", Some("/list/a/1"), 0, &all[2..], 0),
        ("/list/", Some("/list/a/1\0"), 2, &all[3..5], 1),
        ("/list/", Some("/"), 1, &all[..1], 5),
        ("/list/", Some("/list/é\0"), 1, &[], 0),
        ("/list/", Some("/lisu"), 1, &[], 0),
        ("/list/a/", None, 1, &all[2..3], 1),
        ("/list/none/", None, 1, &[], 0),
    ];
    for (prefix, from, limit, keys, remaining) in cases {
        let page = store.list(prefix, *from, *limit, None).await.unwrap();
        check_page(&page, keys, *remaining);
        assert_eq!(page.revision, store.revision().await.unwrap());
    }
}

async fn lists_at_a_revision(store: &dyn Store) {
    let base = store.revision().await.unwrap();
    let a = create(store, "/at/a", "1").await;
    create(store, "/at/b", "1").await;
    let a = update(store, "/at/a", "2", a).await;
    store.write(delete("/at/a", a)).await.unwrap();
    create(store, "/at/c", "1").await;
    let states =
        ["", "/at/a=1@1", "/at/a=1@1 /at/b=1@2", "/at/a=2@3 /at/b=1@2", "/at/b=1@2", "/at/b=1@2 /at/c=1@5"];
    for (n, state) in (0..).zip(states) {
        let page = store.list("/at/", None, 0, Some(base + n)).await.unwrap();
        let rendered: Vec<_> = page.entries.iter().map(|entry| render_entry(entry, base)).collect();
        assert_eq!((rendered.join(" ").as_str(), page.revision), (state, base + n));
    }
    // The pages of a list are not affected by later writes.
    let first = store.list("/at/", None, 1, Some(base + 3)).await.unwrap();
    check_page(&first, &["/at/a"], 1);
    let second = store.list("/at/", Some("/at/a\0"), 1, Some(base + 3)).await.unwrap();
    check_page(&second, &["/at/b"], 0);

    let now = store.revision().await.unwrap();
    let future = store.list("/at/", None, 0, Some(now + 1)).await;
    assert!(matches!(future, Err(Error::Future { .. })), "{future:?}");
    let future = watch(store, "/at/", now + 1).await.err();
    assert!(matches!(future, Some(Error::Future { .. })), "{future:?}");
}

async fn watch_from_a_revision(store: &dyn Store) {
    let base = store.revision().await.unwrap();
    let a = create(store, "/watch/a", "1").await;
    create(store, "/watches", "other").await;
    let a = update(store, "/watch/a", "2", a).await;
    let mut early = watch(store, "/watch/", base).await.unwrap();
    let mut late = watch(store, "/watch/", a).await.unwrap();
    let a = store.write(delete("/watch/a", a)).await.unwrap();
    create(store, "/watch/a", "3").await;
    let last = create(store, "/watch/b", "1").await;
    let live = "-/watch/a@4 +/watch/a=3@5 +/watch/b=1@6";
    assert_eq!(
        render_events(&events_until(&mut early, last).await, base),
        format!("+/watch/a=1@1 /watch/a=2@3 {live}")
    );
    assert_eq!(render_events(&events_until(&mut late, last).await, base), live);
    let mut middle = watch(store, "/watch/", a).await.unwrap();
    assert_eq!(render_events(&events_until(&mut middle, last).await, base), live.split_once(' ').unwrap().1);
}

async fn watch_progress(store: &dyn Store) {
    let base = store.revision().await.unwrap();
    let mut watch = watch(store, "/progress/", base).await.unwrap();
    let one = create(store, "/progress/a", "1").await;
    let mut revision = create(store, "/elsewhere", "").await;
    assert_eq!(render_events(&events_until(&mut watch, revision).await, base), "+/progress/a=1@1");
    // Progress may be coalesced, but the last revision is reported.
    for n in 0..300 {
        revision = update(store, "/elsewhere", &n.to_string(), revision).await;
    }
    assert_eq!(events_until(&mut watch, revision).await, []);
    update(store, "/progress/a", "2", one).await;
    assert_eq!(
        render_events(&next_events(&mut watch).await, base),
        format!("/progress/a=2@{}", revision + 1 - base)
    );
}

async fn slow_watcher_gets_all_events(store: &dyn Store) {
    let base = store.revision().await.unwrap();
    let mut slow = watch(store, "/slow/", base).await.unwrap();
    let mut fast = watch(store, "/slow/", base).await.unwrap();
    let mut revision = create(store, "/slow/a", "0").await;
    for n in 1..700 {
        revision = update(store, "/slow/a", &n.to_string(), revision).await;
        if n % 50 == 0 {
            events_until(&mut fast, revision).await;
        }
    }
    let events = events_until(&mut slow, revision).await;
    let values: Vec<String> = events
        .iter()
        .map(|event| match event {
            Event::Put { entry, .. } => String::from_utf8_lossy(&entry.value).into_owned(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(values, (0..700).map(|n| n.to_string()).collect::<Vec<_>>());
    let revision = update(store, "/slow/a", "end", revision).await;
    assert_eq!(events_until(&mut slow, revision).await.len(), 1);
}

async fn ttl(store: &dyn Store) {
    let base = store.revision().await.unwrap();
    let mut watch = watch(store, "/ttl/", base).await.unwrap();
    let short = Some(Duration::from_secs(1));
    let a = store.write(Write { ttl: short, ..put("/ttl/a", "", Expect::Absent) }).await.unwrap();
    let b = store.write(Write { ttl: short, ..put("/ttl/b", "1", Expect::Absent) }).await.unwrap();
    let hour = Some(Duration::from_secs(3600));
    store.write(Write { ttl: hour, ..put("/ttl/c", "", Expect::Absent) }).await.unwrap();
    // Rewritten without a TTL: the key stays.
    update(store, "/ttl/b", "2", b).await;
    assert_eq!(
        render_events(&events_until(&mut watch, base + 4).await, base),
        "+/ttl/a=@1 +/ttl/b=1@2 +/ttl/c=@3 /ttl/b=2@4"
    );
    assert_eq!(render_events(&next_events(&mut watch).await, base), "-/ttl/a@5");
    assert_eq!(store.revision().await.unwrap(), base + 5);
    check_page(&store.list("/ttl/", None, 0, None).await.unwrap(), &["/ttl/b", "/ttl/c"], 0);
    check_page(&store.list("/ttl/", None, 0, Some(a)).await.unwrap(), &["/ttl/a"], 0);
}

/// Each writer increments every key by compare-and-swap. No increment may be lost, and a watcher
/// sees all of them.
async fn concurrent_writes(store: Arc<dyn Store>) {
    const WRITER_COUNT: usize = 16;
    const KEYS: usize = 4;
    const ROUNDS: usize = 6;
    let base = store.revision().await.unwrap();
    let mut watch = watch(&*store, "/many/", base).await.unwrap();
    let tasks: Vec<_> = (0..WRITER_COUNT)
        .map(|writer| {
            let store = store.clone();
            tokio::spawn(async move {
                for round in 0..ROUNDS {
                    let key = format!("/many/{}", (writer + round) % KEYS);
                    while !increment(&*store, &key).await {}
                }
            })
        })
        .collect();
    for writer in tasks {
        writer.await.unwrap();
    }
    let total = WRITER_COUNT * ROUNDS;
    let end = store.revision().await.unwrap();
    assert_eq!(end, base + total as u64);
    let events = events_until(&mut watch, end).await;
    let mut counts = BTreeMap::new();
    for (n, event) in (1..).zip(&events) {
        let Event::Put { entry, created } = event else { panic!("{event:?}") };
        assert_eq!(entry.revision, base + n);
        let before = counts.insert(entry.key.clone(), entry.clone());
        let count = before.as_ref().map_or(0, |before| parse_number(&before.value));
        assert_eq!((parse_number(&entry.value), *created), (count + 1, before.is_none()));
    }
    assert_eq!((events.len(), counts.len()), (total, KEYS));
    let page = store.list("/many/", None, 0, None).await.unwrap();
    assert_eq!(page.entries, counts.into_values().collect::<Vec<_>>());
}

/// Watchers with different start revisions, prefixes and speeds see exactly what was written.
async fn watchers_at_different_rates(store: Arc<dyn Store>) {
    const WRITES: u64 = 400;
    let base = store.revision().await.unwrap();
    let end = base + WRITES;
    let keys = ["/pace/a/1", "/pace/a/2", "/pace/b/1", "/pacer"];
    let mut watchers = tokio::task::JoinSet::new();
    let mut written = Vec::new();
    let mut last = BTreeMap::new();
    for n in 0..WRITES {
        let key = keys[(n * n / 3 % 4) as usize];
        let expect = last.get(key).map_or(Expect::Absent, |revision| Expect::Revision(*revision));
        let revision = store.write(put(key, &n.to_string(), expect)).await.unwrap();
        last.insert(key, revision);
        written.push((revision, key, n.to_string()));
        if n % 20 == 0 {
            let prefix = ["/pace/", "/pace/a/", "/pace/a/2", "/pacer", "/nothing/"][(n / 20 % 5) as usize];
            // Some watches start in the past.
            let after = if n % 40 == 0 { revision } else { base + n / 2 };
            let mut watch = watch(&*store, prefix, after).await.unwrap();
            watchers.spawn(async move {
                let (mut seen, mut progress) = (Vec::new(), after);
                while progress < end {
                    for _ in 0..n * 3 {
                        tokio::task::yield_now().await;
                    }
                    for event in next_batch(&mut watch).await.expect("the watch ended") {
                        progress = event.revision();
                        if let Event::Put { entry, .. } = event {
                            let value = String::from_utf8_lossy(&entry.value).into_owned();
                            seen.push((entry.revision, entry.key.to_string(), value));
                        }
                    }
                }
                (prefix, after, seen)
            });
        }
    }
    while let Some(watcher) = watchers.join_next().await {
        let (prefix, after, seen) = watcher.unwrap();
        let expected: Vec<_> = written
            .iter()
            .filter(|(revision, key, _)| *revision > after && key.starts_with(prefix))
            .map(|(revision, key, value)| (*revision, (*key).to_owned(), value.clone()))
            .collect();
        assert_eq!(seen, expected, "{prefix} after {after}");
    }
}

fn parse_number(value: &[u8]) -> usize {
    String::from_utf8_lossy(value).parse().unwrap()
}

async fn increment(store: &dyn Store, key: &str) -> bool {
    let write = match store.get(key).await.unwrap() {
        None => put(key, "1", Expect::Absent),
        Some(entry) => {
            put(key, &(parse_number(&entry.value) + 1).to_string(), Expect::Revision(entry.revision))
        }
    };
    match store.write(write).await {
        Ok(_) => true,
        Err(Error::Exists { .. } | Error::Conflict { .. }) => false,
        Err(error) => panic!("{error}"),
    }
}

async fn compaction(store: &dyn Store) {
    let base = store.revision().await.unwrap();
    let a = create(store, "/compact/a", "1").await;
    let b = create(store, "/compact/b", "1").await;
    let a = update(store, "/compact/a", "2", a).await;
    store.write(delete("/compact/b", b)).await.unwrap();
    let last = update(store, "/compact/a", "3", a).await;
    let mut running = watch(store, "/compact/", last).await.unwrap();
    let future = store.compact(last + 1).await;
    assert!(matches!(future, Err(Error::Future { .. })), "{future:?}");
    store.compact(base + 3).await.unwrap();
    store.compact(base + 3).await.unwrap();
    store.compact(base + 1).await.unwrap();
    for old in [0, 1, base, base + 1] {
        let error = store.list("/compact/", None, 0, Some(old)).await.err();
        assert!(matches!(error, Some(Error::Compacted { .. })), "{old}: {error:?}");
        let error = watch(store, "/compact/", old).await.err();
        assert!(matches!(error, Some(Error::Compacted { .. })), "{old}: {error:?}");
    }
    check_page(
        &store.list("/compact/", None, 0, Some(base + 3)).await.unwrap(),
        &["/compact/a", "/compact/b"],
        0,
    );
    check_page(&store.list("/compact/", None, 0, None).await.unwrap(), &["/compact/a"], 0);
    let mut watch = watch(store, "/compact/", base + 3).await.unwrap();
    assert_eq!(render_events(&events_until(&mut watch, last).await, base), "-/compact/b@4 /compact/a=3@5");
    store.compact(last).await.unwrap();
    let after = create(store, "/compact/b", "2").await;
    for watch in [&mut watch, &mut running] {
        assert_eq!(render_events(&events_until(watch, after).await, base), "+/compact/b=2@6");
    }
}
