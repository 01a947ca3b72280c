//! Estimates the seats of a request: one, except for large lists and for changes with many watches.
//! Upstream: `flowcontrol/request`.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use api::Resource;
use api::selector::FieldSelector;
use parking_lot::Mutex;

use super::queue_set::WorkEstimate;
use crate::request::{Query, Target};

/// Bytes of a list per seat. Lists are encoded while they are sent, so at most `MAX_LIST_BYTES` are
/// in memory at a time.
const BYTES_PER_SEAT: u64 = 100_000;
const MAX_LIST_BYTES: u64 = 1_000_000;
const MAX_LIST_SEATS: u64 = 100;
/// One seat per this many watches of a change, for this long per event. Upstream assumes 5 ms
/// (`eventAdditionalDuration`); sending an event costs this server a fifth of that.
const WATCHERS_PER_SEAT: u64 = 10;
const WATCH_EVENT_NANOS: u64 = 1_000_000;
const MAX_MUTATION_SEATS: u64 = 10;

/// The estimate for a list or for the initial events of a watch, given the stored count and bytes
/// of the resource.
pub fn estimate_list(
    verb: &str,
    single: bool,
    query: &Query,
    (count, bytes): (u64, u64),
    max_seats: u64,
) -> WorkEstimate {
    if verb == "watch" {
        let version = query.get("resourceVersion");
        if query.flag("sendInitialEvents") != Some(true) && !matches!(version, "" | "0") {
            return WorkEstimate::with_seats(1);
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
    let seat_limit = if max_seats == 0 { MAX_LIST_SEATS } else { max_seats.min(MAX_LIST_SEATS) };
    WorkEstimate::with_seats(bytes.div_ceil(BYTES_PER_SEAT).clamp(1, seat_limit))
}

/// The estimate for a change that this many watches receive.
pub fn estimate_mutation(watchers: usize, max_seats: u64) -> WorkEstimate {
    let watchers = watchers as u64;
    if watchers < WATCHERS_PER_SEAT {
        return WorkEstimate::with_seats(1);
    }
    let seats = watchers.div_ceil(WATCHERS_PER_SEAT);
    let seat_limit = if max_seats == 0 { MAX_MUTATION_SEATS } else { max_seats.min(MAX_MUTATION_SEATS) };
    let last_seats = seats.min(seat_limit);
    // The same amount of work with fewer seats for a longer time.
    WorkEstimate {
        initial_seats: 1,
        final_seats: last_seats,
        additional_latency: seats * WATCH_EVENT_NANOS / last_seats,
    }
}

/// Counts active watches by resource, namespace and object name. Upstream: `WatchTracker`.
#[derive(Default)]
pub struct WatchTracker {
    total: AtomicUsize,
    counts: Mutex<HashMap<WatchKey, usize>>,
}

/// A resource (the address of its row), namespace and name.
type WatchKey = (usize, String, String);

/// One registered watch, until dropped.
pub struct WatchRegistration {
    watchers: Arc<WatchTracker>,
    key: WatchKey,
}

fn resource_id(resource: &'static Resource) -> usize {
    std::ptr::from_ref(resource) as usize
}

impl WatchTracker {
    /// Counts a watch, unless it selects the pods of a single node: it receives few of the changes.
    pub fn register_watch(
        self: &Arc<WatchTracker>,
        target: &Target,
        name: &str,
        query: &Query,
    ) -> Option<WatchRegistration> {
        if target.resource.plural == "pods"
            && FieldSelector::parse(query.get("fieldSelector"))
                .is_ok_and(|fields| fields.exact("spec.nodeName").is_some_and(|node| !node.is_empty()))
        {
            return None;
        }
        let key = (resource_id(target.resource), target.namespace.clone(), name.to_owned());
        *self.counts.lock().entry(key.clone()).or_default() += 1;
        self.total.fetch_add(1, Ordering::Relaxed);
        Some(WatchRegistration { watchers: self.clone(), key })
    }

    /// How many watches receive a change to `target`.
    pub fn interested_watch_count(&self, target: &Target) -> usize {
        if self.total.load(Ordering::Relaxed) < WATCHERS_PER_SEAT as usize {
            return 0;
        }
        let counts = self.counts.lock();
        let mut key = (resource_id(target.resource), String::new(), String::new());
        let count = |key: &WatchKey| counts.get(key).copied().unwrap_or(0);
        let mut watch_count = count(&key);
        if !target.namespace.is_empty() {
            key.1.clone_from(&target.namespace);
            watch_count += count(&key);
        }
        if !target.name.is_empty() {
            key.2.clone_from(&target.name);
            watch_count += count(&key);
        }
        watch_count
    }
}

impl Drop for WatchRegistration {
    fn drop(&mut self) {
        let mut counts = self.watchers.counts.lock();
        if let Some(count) = counts.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.key);
            }
        }
        self.watchers.total.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(verb: &str, query: &str, stored: (u64, u64), max: u64, seats: u64) {
        assert_eq!(
            estimate_list(verb, false, &Query::parse(query), stored, max),
            WorkEstimate::with_seats(seats),
            "{verb} {query}"
        );
    }

    #[test]
    fn list_seats_follow_response_size() {
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
        assert_eq!(
            estimate_list("list", true, &Query::default(), (10, 3_000_000), 8),
            WorkEstimate::with_seats(3)
        );
    }

    #[test]
    fn mutation_seats_follow_watch_count() {
        assert_eq!(estimate_mutation(9, 8), WorkEstimate::with_seats(1));
        assert_eq!(
            estimate_mutation(25, 8),
            WorkEstimate { initial_seats: 1, final_seats: 3, additional_latency: WATCH_EVENT_NANOS }
        );
        assert_eq!(
            estimate_mutation(1000, 8),
            WorkEstimate { initial_seats: 1, final_seats: 8, additional_latency: 12_500_000 }
        );
        assert_eq!(
            estimate_mutation(1000, 0),
            WorkEstimate { initial_seats: 1, final_seats: 10, additional_latency: 10_000_000 }
        );
    }

    #[test]
    fn counts_registered_watches_until_dropped() {
        let watchers = Arc::new(WatchTracker::default());
        let pods = api::resource_table::find_resource("", "v1", "pods").unwrap();
        let pod =
            |namespace: &str, name: &str| Target { name: name.into(), ..Target::collection(pods, namespace) };
        let none = Query::default();
        let node = Query::parse("fieldSelector=spec.nodeName%3Dn");
        assert!(watchers.register_watch(&pod("", ""), "", &node).is_none());
        let all_namespaces: Vec<_> =
            (0..8).map(|_| watchers.register_watch(&pod("", ""), "", &none)).collect();
        let inside: Vec<_> = (0..4).map(|_| watchers.register_watch(&pod("a", ""), "", &none)).collect();
        let one = watchers.register_watch(&pod("a", ""), "x", &none);
        let watch_counts = [pod("a", "x"), pod("a", "y"), pod("b", "x"), pod("a", "")]
            .map(|pod| watchers.interested_watch_count(&pod));
        assert_eq!(watch_counts, [13, 12, 8, 12]);
        drop((all_namespaces, inside, one));
        assert_eq!(watchers.interested_watch_count(&pod("a", "x")), 0);
        assert!(watchers.counts.lock().is_empty());
    }
}
