//! How many seats a request takes: one, unless it is a list of much or a change that many watch.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use api::Resource;
use api::selector::FieldSelector;
use parking_lot::Mutex;

use super::queues::Work;
use crate::request::{Query, Target};

/// A seat for so many bytes of a list; of what is sent as it is made, this much stands in memory at most.
const BYTES_PER_SEAT: u64 = 100_000;
const MAX_LIST_BYTES: u64 = 1_000_000;
const MAX_LIST_SEATS: u64 = 100;
/// A seat for so many watchers of a change, for so long. Upstream says 5 ms; telling a watcher costs this
/// server a fifth of what it costs upstream.
const WATCHERS_PER_SEAT: u64 = 10;
const TELLING: u64 = 1_000_000;
const MAX_CHANGE_SEATS: u64 = 10;

/// The seats of a list or of the beginning of a watch, of a kind with so many objects of so many bytes.
pub fn list(verb: &str, single: bool, query: &Query, (count, bytes): (u64, u64), max_seats: u64) -> Work {
    if verb == "watch" {
        let version = query.get("resourceVersion");
        if query.flag("sendInitialEvents") != Some(true) && !matches!(version, "" | "0") {
            return Work::of(1);
        }
    }
    let limit = query.int("limit").ok().flatten().and_then(|limit| u64::try_from(limit).ok());
    let objects = match limit {
        _ if single => 1,
        Some(limit) if limit > 0 => limit.min(count),
        _ => count,
    };
    let size = bytes.checked_div(count).unwrap_or(0);
    let bytes = objects.saturating_mul(size).min(MAX_LIST_BYTES);
    let most = if max_seats == 0 { MAX_LIST_SEATS } else { max_seats.min(MAX_LIST_SEATS) };
    Work::of(bytes.div_ceil(BYTES_PER_SEAT).clamp(1, most))
}

/// The seats of a change that so many watch.
pub fn change(watchers: usize, max_seats: u64) -> Work {
    let watchers = watchers as u64;
    if watchers < WATCHERS_PER_SEAT {
        return Work::of(1);
    }
    let seats = watchers.div_ceil(WATCHERS_PER_SEAT);
    let most = if max_seats == 0 { MAX_CHANGE_SEATS } else { max_seats.min(MAX_CHANGE_SEATS) };
    let last_seats = seats.min(most);
    // As much work, but narrower and longer.
    Work { seats: 1, last_seats, linger: seats * TELLING / last_seats }
}

/// Who watches what: kinds, namespaces and single objects.
#[derive(Default)]
pub struct Watchers {
    all: AtomicUsize,
    kinds: Mutex<HashMap<Key, usize>>,
}

/// A kind, by the address of its row, and what of it.
type Key = (usize, String, String);

/// One watch, until dropped.
pub struct Watching {
    watchers: Arc<Watchers>,
    key: Key,
}

fn kind(resource: &'static Resource) -> usize {
    std::ptr::from_ref(resource) as usize
}

impl Watchers {
    /// Counts a watch, unless it sees the pods of one node only: few changes are for it.
    pub fn watch(self: &Arc<Watchers>, target: &Target, name: &str, query: &Query) -> Option<Watching> {
        if target.resource.plural == "pods"
            && FieldSelector::parse(query.get("fieldSelector"))
                .is_ok_and(|fields| fields.exact("spec.nodeName").is_some_and(|node| !node.is_empty()))
        {
            return None;
        }
        let key = (kind(target.resource), target.namespace.clone(), name.to_owned());
        *self.kinds.lock().entry(key.clone()).or_default() += 1;
        self.all.fetch_add(1, Ordering::Relaxed);
        Some(Watching { watchers: self.clone(), key })
    }

    /// How many are told of a change to `target`.
    pub fn of(&self, target: &Target) -> usize {
        if self.all.load(Ordering::Relaxed) < WATCHERS_PER_SEAT as usize {
            return 0;
        }
        let kinds = self.kinds.lock();
        let mut key = (kind(target.resource), String::new(), String::new());
        let count = |key: &Key| kinds.get(key).copied().unwrap_or(0);
        let mut told = count(&key);
        if !target.namespace.is_empty() {
            key.1.clone_from(&target.namespace);
            told += count(&key);
        }
        if !target.name.is_empty() {
            key.2.clone_from(&target.name);
            told += count(&key);
        }
        told
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        let mut kinds = self.watchers.kinds.lock();
        if let Some(count) = kinds.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                kinds.remove(&self.key);
            }
        }
        self.watchers.all.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(verb: &str, query: &str, stored: (u64, u64), max: u64, seats: u64) {
        assert_eq!(list(verb, false, &Query::parse(query), stored, max), Work::of(seats), "{verb} {query}");
    }

    #[test]
    fn lists() {
        check("list", "", (0, 0), 8, 1);
        check("list", "", (100, 300_000), 8, 3);
        check("list", "", (10_000, 30_000_000), 0, 10);
        check("list", "", (10_000, 30_000_000), 8, 8);
        check("list", "limit=100", (10_000, 30_000_000), 8, 3);
        check("list", "limit=x", (10_000, 30_000_000), 8, 8);
        check("watch", "resourceVersion=7", (10_000, 30_000_000), 8, 1);
        check("watch", "resourceVersion=7&sendInitialEvents=true", (10_000, 30_000_000), 8, 8);
        check("watch", "resourceVersion=0", (10_000, 30_000_000), 8, 8);
        check("watch", "", (100, 300_000), 8, 3);
        assert_eq!(list("list", true, &Query::default(), (10, 3_000_000), 8), Work::of(3));
    }

    #[test]
    fn changes() {
        assert_eq!(change(9, 8), Work::of(1));
        assert_eq!(change(25, 8), Work { seats: 1, last_seats: 3, linger: TELLING });
        assert_eq!(change(1000, 8), Work { seats: 1, last_seats: 8, linger: 12_500_000 });
        assert_eq!(change(1000, 0), Work { seats: 1, last_seats: 10, linger: 10_000_000 });
    }

    #[test]
    fn watchers_are_counted_while_they_watch() {
        let watchers = Arc::new(Watchers::default());
        let pods = api::table::find("", "v1", "pods").unwrap();
        let pod =
            |namespace: &str, name: &str| Target { name: name.into(), ..Target::collection(pods, namespace) };
        let none = Query::default();
        let node = Query::parse("fieldSelector=spec.nodeName%3Dn");
        assert!(watchers.watch(&pod("", ""), "", &node).is_none());
        let everywhere: Vec<_> = (0..8).map(|_| watchers.watch(&pod("", ""), "", &none)).collect();
        let inside: Vec<_> = (0..4).map(|_| watchers.watch(&pod("a", ""), "", &none)).collect();
        let one = watchers.watch(&pod("a", ""), "x", &none);
        let told = [pod("a", "x"), pod("a", "y"), pod("b", "x"), pod("a", "")].map(|pod| watchers.of(&pod));
        assert_eq!(told, [13, 12, 8, 12]);
        drop((everywhere, inside, one));
        assert_eq!(watchers.of(&pod("a", "x")), 0);
        assert!(watchers.kinds.lock().is_empty());
    }
}
