//! The watch cache: all objects and their recent changes in memory, fed by one watch on the store.
//!
//! A [`Shard`] holds the objects of one stored kind. Reads wait for the store only to learn which
//! revision they must see. Watchers read the shard's ring of events at their own pace, so a slow
//! watcher does not delay the others.

mod incremental_view;
mod label_index;
mod watch_notifier;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque, btree_map};
use std::ops::Bound;
use std::sync::{Arc, LazyLock, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::{Mutex, RwLock};
use store::{Revision, Store};
use tokio::sync::watch;

use crate::object::{Object, ObjectPosition};

pub use incremental_view::{IncrementalView, View};
pub use label_index::Labels;
use label_index::{LabelIndex, RecentLabels};
use watch_notifier::WatchNotifier;

/// Limits of the event ring of a kind, from which watchers resume; the first limit reached applies.
const MAX_RING_EVENTS: usize = 50_000;
const MAX_RING_BYTES: usize = 16 << 20;
/// Events are also dropped by age: they are kept no longer than the store keeps its history, so
/// that an idle cluster releases the memory of a busy hour.
const MAX_RING_AGE: Duration = Duration::from_secs(300);
/// The newest events are kept at any age, as upstream does, so that a watch of a quiet kind can
/// resume. The limit in bytes keeps a few large objects, allocated during a busy time, from pinning
/// that memory.
const MIN_RETAINED_EVENTS: EventRetention = EventRetention { events: 100, bytes: 64 << 10 };
/// Interval of expiry, while there are events that can expire.
const EXPIRY_INTERVAL: Duration = Duration::from_secs(60);
/// Limits for events that keep their encoded line, which is enough for watchers that keep up.
const MAX_ENCODED_EVENTS: usize = 10_000;
const MAX_ENCODED_BYTES: usize = 4 << 20;

/// How long a read waits for the cache to reach the revision it needs. Upstream: `blockTimeout`.
const FRESHNESS_DEADLINE: Duration = Duration::from_secs(3);

/// How many of the newest events are kept; the first limit reached applies.
#[derive(Clone, Copy, Default)]
pub struct EventRetention {
    events: usize,
    bytes: usize,
}

pub struct Cache {
    shards: RwLock<Shards>,
    revision: watch::Sender<Revision>,
}

#[derive(Default)]
struct Shards {
    by_prefix: HashMap<Arc<str>, Arc<Shard>>,
    /// Everything was loaded from the store at this revision, and every later change has been
    /// applied.
    loaded: Revision,
}

/// The objects of one stored kind.
pub struct Shard {
    state: RwLock<State>,
    recent_labels: RecentLabels,
    /// The position after the newest event. For subscribers inside of the process.
    next_sequence: watch::Sender<u64>,
    watchers: Arc<WatchNotifier>,
}

#[derive(Default)]
struct State {
    objects: Objects,
    objects_bytes: usize,
    label_index: LabelIndex,
    ring: VecDeque<Arc<Event>>,
    ring_bytes: usize,
    /// How many of the newest events may hold an encoded line, and the size of their objects.
    encoded_events: usize,
    encoded_bytes: usize,
    /// The position of the first event in the ring.
    first: u64,
    /// Every change after this revision is in the ring. Watches from an earlier revision get "too
    /// old resource version".
    floor: Revision,
    /// The revision of the newest change.
    last: Revision,
}

type Objects = BTreeMap<Arc<str>, Slot>;

/// The entries whose keys begin with `prefix`. A range compares keys only at its two ends; testing
/// the prefix of every key on the way would cost more than the rest of a list.
fn range_with_prefix<'a, T>(
    map: &'a BTreeMap<Arc<str>, T>,
    prefix: &str,
) -> btree_map::Range<'a, Arc<str>, T> {
    // `char::MAX` does not occur in names.
    let end = format!("{prefix}{}", char::MAX);
    map.range::<str, _>((Bound::Included(prefix), Bound::Excluded(end.as_str())))
}

/// An object with its label bits inline, so that a list by label skips most other objects without
/// touching them.
struct Slot {
    object: Arc<Object>,
    label_bits: u64,
}

impl Slot {
    fn new(object: Arc<Object>) -> Slot {
        Slot { label_bits: object.label_bits(), object }
    }
}

/// One change of one object.
#[derive(Debug)]
pub struct Event {
    pub revision: Revision,
    /// The object after the change; for a deletion, its last state.
    pub object: Arc<Object>,
    /// The object before the change; `None` if it is new.
    pub previous: Option<Arc<Object>>,
    pub deleted: bool,
    received_at: Instant,
    line: Mutex<EncodedLine>,
}

/// The event as a line of JSON for watchers without a selector, encoded once for all of them.
#[derive(Debug)]
enum EncodedLine {
    NotEncoded,
    Encoded(Bytes),
    /// No longer cached: a watcher that still needs the line encodes it itself.
    Expired,
}

/// The objects of a shard at one revision.
pub struct Snapshot {
    pub objects: Vec<Arc<Object>>,
    pub revision: Revision,
}

#[derive(Debug, thiserror::Error, PartialEq)]
pub enum CacheError {
    #[error("too old resource version: {requested} ({oldest})")]
    TooOld { requested: Revision, oldest: Revision },
    #[error("Too large resource version: {requested}, current: {current}")]
    TooLarge { requested: Revision, current: Revision },
}

/// The result of reading from the ring.
pub enum EventBatch {
    Events(Vec<Arc<Event>>),
    /// The watcher's position is no longer in the ring; it must list again.
    TooOld,
}

impl Cache {
    pub fn new() -> Arc<Cache> {
        Arc::new(Cache { shards: RwLock::default(), revision: watch::Sender::new(0) })
    }

    /// Loads everything and returns; from then on follows the store in the background until
    /// `shutdown`.
    pub async fn start(
        self: &Arc<Cache>,
        store: Arc<dyn Store>,
        shutdown: watch::Receiver<bool>,
    ) -> Result<(), store::Error> {
        let watch = self.load(&*store).await?;
        tokio::spawn(watch_store(self.clone(), store, watch, shutdown));
        tokio::spawn(run_event_expiry(Arc::downgrade(self), self.revision.subscribe()));
        Ok(())
    }

    pub fn revision(&self) -> Revision {
        *self.revision.borrow()
    }

    /// The shard of the stored kind under `prefix` (`/registry/pods/`), created if missing.
    pub fn shard(&self, prefix: &str) -> Arc<Shard> {
        if let Some(shard) = self.shards.read().by_prefix.get(prefix) {
            return shard.clone();
        }
        let mut shards = self.shards.write();
        let loaded = shards.loaded;
        shards.by_prefix.entry(prefix.into()).or_insert_with(|| Arc::new(Shard::new(loaded))).clone()
    }

    /// Waits until the cache contains every change up to `revision`.
    pub async fn wait_until_fresh(&self, revision: Revision) -> Result<(), CacheError> {
        if self.revision() >= revision {
            return Ok(());
        }
        let mut seen = self.revision.subscribe();
        let wait = seen.wait_for(|seen| *seen >= revision);
        match tokio::time::timeout(FRESHNESS_DEADLINE, wait).await {
            Ok(Ok(_)) => Ok(()),
            _ => Err(CacheError::TooLarge { requested: revision, current: self.revision() }),
        }
    }

    async fn load(self: &Arc<Cache>, store: &dyn Store) -> Result<store::Watch, store::Error> {
        let mut objects: HashMap<Arc<str>, Objects> = HashMap::new();
        let mut from: Option<String> = None;
        let mut at = None;
        let revision = loop {
            let page = store.list(REGISTRY_PREFIX, from.as_deref(), 5_000, at).await?;
            at = Some(page.revision);
            // The next page starts at the smallest key after the last one.
            from = page.entries.last().map(|entry| format!("{}\0", entry.key));
            for entry in page.entries {
                let Some(prefix) = prefix_of(&entry.key) else { continue };
                let shard = match objects.get_mut(prefix) {
                    Some(shard) => shard,
                    None => objects.entry(prefix.into()).or_default(),
                };
                if let Some(object) = object_of(entry) {
                    shard.insert(object.key.clone(), Slot::new(object));
                }
            }
            if page.remaining == 0 {
                break page.revision;
            }
        };
        self.reset(objects, revision);
        let (cache, runtime) = (self.clone(), tokio::runtime::Handle::current());
        let listener = move |batch| {
            // The store may call the listener outside of the runtime, and notifying watchers spawns
            // a task.
            let _inside = runtime.enter();
            cache.apply(batch);
        };
        store.watch(REGISTRY_PREFIX, revision, Box::new(listener)).await
    }

    fn reset(&self, mut objects: HashMap<Arc<str>, Objects>, revision: Revision) {
        let mut shards = self.shards.write();
        shards.loaded = revision;
        for (prefix, shard) in &shards.by_prefix {
            // A reload: there may be a gap, so watchers are expired and must list again.
            shard.reset(objects.remove(prefix).unwrap_or_default(), revision);
        }
        for (prefix, objects) in objects {
            let shard = Shard::new(revision);
            shard.reset(objects, revision);
            shards.by_prefix.insert(prefix, Arc::new(shard));
        }
        self.revision.send_replace(revision);
    }

    fn apply(&self, batch: Vec<store::Event>) {
        let mut last_revision = 0;
        let mut changed: Vec<Arc<Shard>> = Vec::new();
        for event in batch {
            last_revision = event.revision();
            let prefix = match &event {
                store::Event::Progress(_) => None,
                store::Event::Put { entry, .. } => prefix_of(&entry.key),
                store::Event::Delete { key, .. } => prefix_of(key),
            };
            let Some(shard) = prefix.map(|prefix| self.shard(prefix)) else { continue };
            match event {
                store::Event::Put { entry, .. } => {
                    if let Some(object) = object_of(entry) {
                        shard.put(object);
                    }
                }
                store::Event::Delete { key, revision } => shard.delete(&key, revision),
                store::Event::Progress(_) => {}
            }
            if !changed.iter().any(|other| Arc::ptr_eq(other, &shard)) {
                changed.push(shard);
            }
        }
        self.revision.send_if_modified(|revision| {
            let newer = last_revision > *revision;
            *revision = last_revision.max(*revision);
            newer
        });
        // Notify watchers once per batch, after the cache's revision includes it.
        for shard in changed {
            shard.notify();
        }
    }
}

/// The key prefix of all objects in the store.
pub const REGISTRY_PREFIX: &str = "/registry/";

async fn watch_store(
    cache: Arc<Cache>,
    store: Arc<dyn Store>,
    mut watch: store::Watch,
    mut shutdown: watch::Receiver<bool>,
) {
    loop {
        tokio::select! {
            () = watch.ended() => match cache.load(&*store).await {
                Ok(new_watch) => watch = new_watch,
                Err(error) => {
                    tracing::warn!(%error, "cannot watch the store, retrying");
                    tokio::time::sleep(Duration::from_millis(500)).await;
                }
            },
            () = wait_for_shutdown(&mut shutdown) => {
                cache.shards.read().by_prefix.values().for_each(|shard| shard.watchers.notify());
                return;
            }
        }
    }
}

/// Expires old events as long as the cache exists.
async fn run_event_expiry(cache: Weak<Cache>, mut revision: watch::Receiver<Revision>) {
    // Sleeps while nothing in the cluster changes.
    while revision.changed().await.is_ok() {
        let mut left = true;
        while left {
            tokio::time::sleep(EXPIRY_INTERVAL).await;
            let Some(cache) = cache.upgrade() else { return };
            let shards: Vec<_> = cache.shards.read().by_prefix.values().cloned().collect();
            left =
                shards.iter().filter(|shard| shard.expire_events(MAX_RING_AGE, MIN_RETAINED_EVENTS)).count()
                    > 0;
        }
    }
}

/// Waits for the shutdown signal.
pub async fn wait_for_shutdown(shutdown: &mut watch::Receiver<bool>) {
    // An error means that the sender is gone, which is treated as shutdown.
    let _ = shutdown.wait_for(|stop| *stop).await;
}

static CORE_RESOURCES: LazyLock<HashSet<&'static str>> = LazyLock::new(|| {
    api::RESOURCES.iter().filter(|row| row.group.is_empty()).map(|row| row.plural).collect()
});

/// The key prefix of the stored kind of a key: `/registry/pods/` or `/registry/apps/deployments/`.
///
/// Keys of core kinds have no group. This is unambiguous because no core plural is also a group
/// name.
fn prefix_of(key: &str) -> Option<&str> {
    let rest = key.strip_prefix(REGISTRY_PREFIX)?;
    let (first, after) = rest.split_once('/')?;
    let length =
        if CORE_RESOURCES.contains(first) { first.len() + 1 } else { first.len() + 1 + after.find('/')? + 1 };
    key.get(..REGISTRY_PREFIX.len() + length)
}

/// Group and plural of the stored kind of a key.
pub fn kind_of(key: &str) -> Option<(&str, &str)> {
    let kind = prefix_of(key)?.strip_prefix(REGISTRY_PREFIX)?.trim_end_matches('/');
    Some(kind.split_once('/').unwrap_or(("", kind)))
}

fn object_of(entry: store::Entry) -> Option<Arc<Object>> {
    match Object::new(entry.key, entry.value, entry.revision) {
        Ok(object) => Some(Arc::new(object)),
        Err(error) => {
            tracing::error!(%error, "cannot decode a stored object, omitting it from responses");
            None
        }
    }
}

impl Shard {
    fn new(floor: Revision) -> Shard {
        Shard {
            state: RwLock::new(State { floor, last: floor, ..State::default() }),
            recent_labels: RecentLabels::default(),
            next_sequence: watch::Sender::new(0),
            watchers: WatchNotifier::new(),
        }
    }

    pub fn get(&self, key: &str) -> Option<Arc<Object>> {
        self.state.read().objects.get(key).map(|slot| slot.object.clone())
    }

    pub fn len(&self) -> usize {
        self.state.read().objects.len()
    }

    /// Number of objects and their size in bytes.
    pub fn object_stats(&self) -> (u64, u64) {
        let state = self.state.read();
        (state.objects.len() as u64, state.objects_bytes as u64)
    }

    /// All objects whose keys begin with `prefix`. `known` is a revision that the cache has reached
    /// before.
    pub fn snapshot(&self, prefix: &str, known: Revision) -> Snapshot {
        let state = self.state.read();
        Snapshot { objects: state.objects_with_prefix(prefix), revision: known.max(state.last) }
    }

    /// The same, restricted to objects with these labels.
    pub fn snapshot_with_labels(&self, prefix: &str, known: Revision, labels: &Labels) -> Snapshot {
        let state = self.state.read();
        let revision = known.max(state.last);
        if let Some(objects) = state.label_index.find(prefix, labels) {
            return Snapshot { objects, revision };
        }
        let mut seen = 0;
        let slots = range_with_prefix(&state.objects, prefix).map(|(_, slot)| slot).inspect(|_| seen += 1);
        let objects: Vec<_> =
            slots.filter(|slot| labels.matches(slot)).map(|slot| slot.object.clone()).collect();
        drop(state);
        // The read lock is released, so objects may have changed. That does not matter: the new
        // index is built from the current objects under the write lock.
        if self.recent_labels.should_index(labels, objects.len(), seen) {
            let mut state = self.state.write();
            let State { objects, label_index, .. } = &mut *state;
            label_index.add(labels, objects.values());
        }
        Snapshot { objects, revision }
    }

    /// Like `snapshot`, with the position from which a watch continues without a gap.
    pub fn snapshot_and_position(&self, prefix: &str, known: Revision) -> (Snapshot, u64) {
        let state = self.state.read();
        let snapshot =
            Snapshot { objects: state.objects_with_prefix(prefix), revision: known.max(state.last) };
        (snapshot, state.first + state.ring.len() as u64)
    }

    /// The position of the first event after `revision`.
    pub fn position_after(&self, revision: Revision) -> Result<u64, CacheError> {
        let state = self.state.read();
        if revision < state.floor {
            return Err(CacheError::TooOld { requested: revision, oldest: state.floor });
        }
        let older = state.ring.partition_point(|event| event.revision <= revision);
        Ok(state.first + older as u64)
    }

    /// The position after the newest event.
    pub fn position(&self) -> u64 {
        let state = self.state.read();
        state.first + state.ring.len() as u64
    }

    /// For consumers inside of the process, notified at once.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.next_sequence.subscribe()
    }

    /// For watchers, of which there may be many: notifications are coalesced. They are also woken
    /// on shutdown.
    pub fn subscribe_watcher(&self) -> watch::Receiver<()> {
        self.watchers.subscribe()
    }

    /// At most `limit` events, starting at `position`.
    pub fn events_from(&self, position: u64, limit: usize) -> EventBatch {
        let state = self.state.read();
        let Some(skip) = position.checked_sub(state.first) else { return EventBatch::TooOld };
        EventBatch::Events(state.ring.iter().skip(skip as usize).take(limit).cloned().collect())
    }

    fn put(&self, object: Arc<Object>) {
        let mut state = self.state.write();
        let slot = Slot::new(object.clone());
        let all = state.objects.len();
        state.label_index.put(&slot, all);
        let previous = state.objects.insert(object.key.clone(), slot).map(|slot| slot.object);
        state.objects_bytes += object.size();
        state.objects_bytes -= previous.as_ref().map_or(0, |previous| previous.size());
        let revision = object.revision;
        state.push(Event::new(revision, object, previous, false));
    }

    fn delete(&self, key: &str, revision: Revision) {
        let mut state = self.state.write();
        if let Some(Slot { object, .. }) = state.objects.remove(key) {
            state.objects_bytes -= object.size();
            state.label_index.remove(key);
            let previous = Some(object.clone());
            state.push(Event::new(revision, object, previous, true));
        }
    }

    /// Replaces all objects and expires all watchers.
    fn reset(&self, objects: Objects, revision: Revision) {
        let mut state = self.state.write();
        // Skip one position, so that every position a watcher may hold is before `first`.
        let first = state.first + state.ring.len() as u64 + 1;
        let objects_bytes = objects.values().map(|slot| slot.object.size()).sum();
        *state = State { objects, objects_bytes, first, floor: revision, last: revision, ..State::default() };
        drop(state);
        self.notify();
    }

    /// Drops events older than `age` except the newest ones; returns whether there will be more to
    /// drop later.
    pub fn expire_events(&self, age: Duration, retention: EventRetention) -> bool {
        let now = Instant::now();
        let is_old = |event: &Event| now.saturating_duration_since(event.received_at) >= age;
        let mut state = self.state.write();
        let retained = state.retained_count(retention);
        let mut old = Vec::new();
        while state.ring.len() > retained && state.ring.front().is_some_and(|oldest| is_old(oldest)) {
            old.extend(state.pop());
        }
        while state.oldest_encoded().is_some_and(|oldest| is_old(oldest)) {
            state.drop_oldest_encoded();
        }
        // Release the capacity that a burst of events needed.
        if state.ring.capacity() / 4 > state.ring.len() {
            state.ring.shrink_to_fit();
        }
        let more = state.ring.len() > retained || state.encoded_events > 0;
        // Drop the events outside of the lock: freeing many objects takes time.
        drop(state);
        drop(old);
        more
    }

    /// Wakes subscribers and watchers.
    fn notify(&self) {
        self.next_sequence.send_replace(self.position());
        self.watchers.notify();
    }
}

impl State {
    fn objects_with_prefix(&self, prefix: &str) -> Vec<Arc<Object>> {
        range_with_prefix(&self.objects, prefix).map(|(_, slot)| slot.object.clone()).collect()
    }

    fn push(&mut self, event: Event) {
        self.last = event.revision;
        self.ring_bytes += event.retained_bytes();
        self.encoded_bytes += event.object.size();
        self.encoded_events += 1;
        self.ring.push_back(Arc::new(event));
        while self.encoded_bytes > MAX_ENCODED_BYTES && self.encoded_events > 1
            || self.encoded_events > MAX_ENCODED_EVENTS
        {
            self.drop_oldest_encoded();
        }
        while self.ring.len() > MAX_RING_EVENTS
            || self.ring_bytes > MAX_RING_BYTES && self.ring.len() > self.encoded_events
        {
            self.pop();
        }
    }

    /// The oldest event that may hold an encoded line.
    fn oldest_encoded(&self) -> Option<&Arc<Event>> {
        self.ring.get(self.ring.len().checked_sub(self.encoded_events)?)
    }

    fn drop_oldest_encoded(&mut self) {
        let Some(oldest) = self.oldest_encoded() else { return };
        *oldest.line.lock() = EncodedLine::Expired;
        self.encoded_bytes -= oldest.object.size();
        self.encoded_events -= 1;
    }

    /// How many of the newest events are kept at any age.
    fn retained_count(&self, retention: EventRetention) -> usize {
        let sizes = self
            .ring
            .iter()
            .rev()
            .take(retention.events)
            .map(|event| event.retained_bytes() + event.object.size());
        let fit = sizes.scan(0, |all, size| {
            *all += size;
            (*all <= retention.bytes).then_some(())
        });
        fit.count()
    }

    /// Removes the oldest event.
    fn pop(&mut self) -> Option<Arc<Event>> {
        let old = self.ring.pop_front()?;
        self.ring_bytes -= old.retained_bytes();
        self.first += 1;
        self.floor = old.revision;
        if self.encoded_events > self.ring.len() {
            self.encoded_events -= 1;
            self.encoded_bytes -= old.object.size();
        }
        Some(old)
    }
}

impl Event {
    fn new(revision: Revision, object: Arc<Object>, previous: Option<Arc<Object>>, deleted: bool) -> Event {
        let (received_at, line) = (Instant::now(), Mutex::new(EncodedLine::NotEncoded));
        Event { revision, object, previous, deleted, received_at, line }
    }

    /// The memory that is only referenced by the event: itself and the previous version of the
    /// object.
    fn retained_bytes(&self) -> usize {
        self.previous.as_ref().map_or(0, |previous| previous.size()) + 256
    }

    /// The event type for a watcher without a selector.
    pub fn kind(&self) -> &'static str {
        match (self.deleted, &self.previous) {
            (true, _) => "DELETED",
            (false, None) => "ADDED",
            (false, Some(_)) => "MODIFIED",
        }
    }

    /// The encoded line for a watcher without a selector.
    pub fn line(&self) -> Bytes {
        let build = || json_line(self.kind(), &self.object, self.revision);
        let mut line = self.line.lock();
        match &*line {
            EncodedLine::Encoded(bytes) => bytes.clone(),
            EncodedLine::Expired => build(),
            EncodedLine::NotEncoded => {
                let bytes = build();
                *line = EncodedLine::Encoded(bytes.clone());
                bytes
            }
        }
    }
}

/// `{"type":"ADDED","object":{…}}` and a newline.
pub fn json_line(kind: &str, object: &Object, revision: Revision) -> Bytes {
    let mut line = Vec::with_capacity(object.size() + 80);
    line.extend_from_slice(b"{\"type\":\"");
    line.extend_from_slice(kind.as_bytes());
    line.extend_from_slice(b"\",\"object\":");
    object.write_json(ObjectPosition::Root, revision, &mut line);
    line.extend_from_slice(b"}\n");
    line.into()
}

#[cfg(test)]
mod tests;
