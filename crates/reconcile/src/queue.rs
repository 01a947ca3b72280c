//! Work queue of a controller, like client-go's `workqueue`: deduplicates keys, gives a key to one worker at
//! a time and delays failed keys with exponential backoff. No I/O; time is an argument.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::hash::Hash;
use std::time::Duration;

use tokio::time::Instant;

/// Delay after the first failure; doubled with each further failure.
const BASE_DELAY: Duration = Duration::from_millis(5);
/// Upper limit of the delay after a failure.
const MAX_DELAY: Duration = Duration::from_secs(80);

/// A deduplicating work queue with delays and per-key backoff.
#[derive(Debug)]
pub struct WorkQueue<K> {
    ready: VecDeque<K>,
    /// The keys in `ready`, and those to be queued again once their worker is done.
    dirty: HashSet<K>,
    /// The keys being processed, with the deadline that each had when it was taken.
    processing: HashMap<K, Option<Instant>>,
    waiting: BTreeSet<(Instant, K)>,
    waiting_until: HashMap<K, Instant>,
    failures: HashMap<K, u32>,
}

impl<K> Default for WorkQueue<K> {
    fn default() -> WorkQueue<K> {
        WorkQueue {
            ready: VecDeque::new(),
            dirty: HashSet::new(),
            processing: HashMap::new(),
            waiting: BTreeSet::new(),
            waiting_until: HashMap::new(),
            failures: HashMap::new(),
        }
    }
}

impl<K: Clone + Eq + Hash + Ord> WorkQueue<K> {
    /// Queues `key`. Returns `false` if it is queued already.
    pub fn add(&mut self, key: K) -> bool {
        if !self.dirty.insert(key.clone()) {
            return false;
        }
        if !self.processing.contains_key(&key) {
            self.ready.push_back(key);
        }
        true
    }

    /// Queues `key` at some time. The earliest deadline of a key wins.
    pub fn add_at(&mut self, key: K, at: Instant) {
        if let Some(earlier) = self.waiting_until.get(&key) {
            if *earlier <= at {
                return;
            }
            self.waiting.remove(&(*earlier, key.clone()));
        }
        self.waiting_until.insert(key.clone(), at);
        self.waiting.insert((at, key));
    }

    /// Takes the next key. The caller must call [`WorkQueue::done`] when it has processed the key.
    pub fn take(&mut self, now: Instant) -> Option<K> {
        while let Some((at, key)) = self.waiting.first() {
            if *at > now {
                break;
            }
            let key = key.clone();
            self.waiting.pop_first();
            self.waiting_until.remove(&key);
            self.add(key);
        }
        let key = self.ready.pop_front()?;
        self.dirty.remove(&key);
        // Keep the deadline while the key is processed: `done` schedules it again unless `forget` is called.
        let scheduled_at = self.waiting_until.remove(&key);
        if let Some(at) = scheduled_at {
            self.waiting.remove(&(at, key.clone()));
        }
        self.processing.insert(key.clone(), scheduled_at);
        Some(key)
    }

    /// The earliest deadline of a waiting key.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.waiting.first().map(|(at, _)| *at)
    }

    /// Ends the processing of `key`. It is queued again if it was added meanwhile.
    pub fn done(&mut self, key: &K) {
        if let Some(Some(at)) = self.processing.remove(key) {
            self.add_at(key.clone(), at);
        }
        if self.dirty.contains(key) {
            self.ready.push_back(key.clone());
        }
    }

    /// Resets the backoff of `key`.
    pub fn succeeded(&mut self, key: &K) {
        self.failures.remove(key);
    }

    /// Drops the backoff and the deadline that `key` had when it was taken, for an object that does not
    /// exist. Deadlines set since then stay: they may belong to a new object of this name.
    pub fn forget(&mut self, key: &K) {
        self.failures.remove(key);
        if let Some(scheduled_at) = self.processing.get_mut(key) {
            *scheduled_at = None;
        }
    }

    /// Queues `key` again after its backoff, which doubles with each failure.
    pub fn failed(&mut self, key: &K, now: Instant) {
        let failures = self.failures.entry(key.clone()).or_default();
        let delay = BASE_DELAY.saturating_mul(1 << (*failures).min(20)).min(MAX_DELAY);
        *failures += 1;
        self.add_at(key.clone(), now + delay);
    }

    /// The number of ready keys.
    pub fn len(&self) -> usize {
        self.ready.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ready.is_empty()
    }

    /// Whether no key is ready or being processed. Keys with a later deadline do not count.
    pub fn is_idle(&self) -> bool {
        self.ready.is_empty() && self.processing.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[tokio::test(start_paused = true)]
    async fn key_is_queued_once_and_queued_again_when_added_while_processing() {
        let now = Instant::now();
        let mut queue = WorkQueue::default();
        assert!(queue.add("a"));
        assert!(!queue.add("a"));
        assert_eq!(queue.take(now), Some("a"));
        assert_eq!(queue.take(now), None);
        assert!(queue.add("a"));
        assert_eq!(queue.take(now), None, "a key is processed by one worker at a time");
        queue.done(&"a");
        assert_eq!(queue.take(now), Some("a"));
        queue.done(&"a");
        assert_eq!(queue.take(now), None);
    }

    #[tokio::test(start_paused = true)]
    async fn failures_use_exponential_backoff_until_success() {
        let now = Instant::now();
        let mut queue = WorkQueue::default();
        let mut wait_times = Vec::new();
        for _ in 0..20 {
            queue.failed(&"a", now);
            let at = queue.next_deadline().unwrap();
            wait_times.push((at - now).as_millis());
            assert_eq!(queue.take(at), Some("a"));
            queue.done(&"a");
        }
        assert_eq!(wait_times[..4], [5, 10, 20, 40]);
        assert_eq!(wait_times[19], 80_000);
        queue.succeeded(&"a");
        queue.failed(&"a", now);
        assert_eq!(queue.next_deadline(), Some(now + BASE_DELAY));
    }

    #[tokio::test(start_paused = true)]
    async fn earliest_deadline_wins() {
        let now = Instant::now();
        let later = |seconds| now + Duration::from_secs(seconds);
        let mut queue = WorkQueue::default();
        queue.add_at("a", later(9));
        queue.add_at("a", later(3));
        queue.add_at("a", later(5));
        assert_eq!(queue.next_deadline(), Some(later(3)));
        assert_eq!(queue.take(later(2)), None);
        assert_eq!(queue.take(later(3)), Some("a"));
        assert_eq!(queue.next_deadline(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn forget_clears_scheduled_retry() {
        let now = Instant::now();
        let later = |seconds| now + Duration::from_secs(seconds);
        let mut queue = WorkQueue::default();
        queue.add_at("a", later(9));
        queue.add("a");
        assert_eq!(queue.take(now), Some("a"));
        queue.done(&"a");
        assert_eq!(queue.next_deadline(), Some(later(9)), "the deadline set before processing is restored");
        queue.add("a");
        assert_eq!(queue.take(now), Some("a"));
        queue.add_at("a", later(20));
        queue.forget(&"a");
        queue.done(&"a");
        assert_eq!(queue.next_deadline(), Some(later(20)), "a deadline set during processing is kept");
        assert_eq!(queue.take(later(20)), Some("a"));
        queue.forget(&"a");
        queue.done(&"a");
        assert_eq!((queue.next_deadline(), queue.is_idle()), (None, true));
    }

    proptest! {
        /// A key added after it was last taken is always taken again, and never by two workers at the same
        /// time.
        #[test]
        fn no_key_is_lost_or_processed_concurrently(steps in prop::collection::vec((0..4u8, 0..3u8), 0..200)) {
            let now = Instant::now();
            let mut queue: WorkQueue<u8> = WorkQueue::default();
            let mut working: Vec<u8> = Vec::new();
            let mut pending: HashSet<u8> = HashSet::new();
            for (step, key) in steps {
                match step {
                    0 => { queue.add(key); pending.insert(key); }
                    1 => { queue.add_at(key, now); pending.insert(key); }
                    2 => if let Some(key) = queue.take(now) {
                        prop_assert!(!working.contains(&key));
                        working.push(key);
                        pending.remove(&key);
                    },
                    _ => if let Some(key) = working.pop() { queue.done(&key) },
                }
            }
            while let Some(key) = working.pop() { queue.done(&key) }
            while let Some(key) = queue.take(now) { pending.remove(&key); queue.done(&key) }
            prop_assert!(pending.is_empty());
        }
    }
}
