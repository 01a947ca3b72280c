//! The scheduling queue. Counterpart of upstream's `PriorityQueue`.
//!
//! *Active* pods are scheduled next, in the order of the QueueSort plugin. Pods whose attempt failed wait in
//! *backoff*, unless no other pod is active. Pods that fit no node are *unschedulable* until a plugin that
//! rejected them reports, by its queueing hint, that an event may help, or until five minutes have passed.
//! Gated pods start as unschedulable. A plain data structure: time is an argument.

mod nominator;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1 as core;

pub use nominator::Nominator;

use crate::framework::{ClusterEvent, ObjectPair, PreEnqueue, Profile, QueueSort, Requeue};
use crate::metrics::Metrics;
use crate::state::{PodInfo, State};

/// How long a pod stays unschedulable without an event (upstream's
/// `DefaultPodMaxInUnschedulablePodsDuration`).
const POD_MAX_IN_UNSCHEDULABLE_PODS: SignedDuration = SignedDuration::from_mins(5);

/// A pod in the queue or in its scheduling cycle.
#[derive(Clone)]
pub struct QueuedPod {
    pub info: Arc<PodInfo>,
    pub object: Arc<core::Pod>,
    /// When it was last added to the queue.
    pub queued_at: Timestamp,
    /// When it first became active.
    pub initial_attempt: Option<Timestamp>,
    pub attempts: u32,
    /// When the current attempt started.
    pub attempt_started: Instant,
    /// Number of attempts in which no node fit.
    pub unschedulable_count: u32,
    /// Number of consecutive attempts that failed with an error.
    pub errors: u32,
    backoff_until: Option<Timestamp>,
    /// The plugins that rejected the pod in the last attempt.
    pub rejected_by: BTreeSet<&'static str>,
    /// The plugins that returned Pending in the last attempt.
    pub pending_on: BTreeSet<&'static str>,
    /// The PreEnqueue plugin that rejected the pod.
    pub gated_by: Option<&'static str>,
    /// Whether the last requeue was due to the timeout of unschedulable pods.
    pub timed_out: bool,
    timed_out_at: Option<Timestamp>,
}

/// The sub-queue that contains a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueuePosition {
    Active,
    Backoff,
    Unschedulable,
}

struct Entry {
    pod: Arc<QueuedPod>,
    position: QueuePosition,
    /// Heap entries with another sequence number are stale.
    sequence: u64,
}

struct ActiveEntry {
    pod: Arc<QueuedPod>,
    sequence: u64,
    sort: Arc<dyn QueueSort>,
}

impl Ord for ActiveEntry {
    /// Reversed: `BinaryHeap` pops the greatest element.
    fn cmp(&self, other: &ActiveEntry) -> Ordering {
        self.sort.compare(&other.pod, &self.pod).then(other.sequence.cmp(&self.sequence))
    }
}

impl PartialOrd for ActiveEntry {
    fn partial_cmp(&self, other: &ActiveEntry) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for ActiveEntry {
    fn eq(&self, other: &ActiveEntry) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for ActiveEntry {}

/// The plugins of a profile that the queue uses.
#[derive(Clone)]
struct QueueingRules {
    gates: Vec<(&'static str, Arc<dyn PreEnqueue>)>,
    queueing_hints: HashMap<&'static str, Arc<dyn Requeue>>,
}

/// The scheduling queue of all profiles.
pub struct SchedulingQueue {
    sort: Arc<dyn QueueSort>,
    rules: HashMap<Arc<str>, QueueingRules>,
    initial_backoff: SignedDuration,
    max_backoff: SignedDuration,
    pods: HashMap<Arc<str>, Entry>,
    active: BinaryHeap<ActiveEntry>,
    /// By the second in which the backoff ends.
    backoff: BTreeSet<(Timestamp, u64, Arc<str>)>,
    /// Pods that failed with an error. They are never popped before their backoff ends.
    error_backoff: BTreeSet<(Timestamp, u64, Arc<str>)>,
    unschedulable: BTreeSet<Arc<str>>,
    /// How many of the unschedulable pods are gated.
    gated: usize,
    last_sequence: u64,
    pub nominator: Nominator,
    pub counters: QueueCounters,
    pub metrics: Arc<Metrics>,
    /// Number of queueing hint calls; one of ten is timed.
    hint_calls: Cell<u64>,
}

/// Counters for metrics.
#[derive(Clone, Default)]
pub struct QueueCounters {
    /// Pods added, by queue and event.
    pub incoming: BTreeMap<(&'static str, &'static str), u64>,
    /// Pods in the queue, by plugin that rejected them and by scheduler name.
    pub rejected: BTreeMap<(&'static str, Arc<str>), usize>,
    /// Label of the event that currently moves pods.
    pub event: &'static str,
}

impl QueueCounters {
    fn count_incoming(&mut self, position: QueuePosition) {
        let position = match position {
            QueuePosition::Active => "active",
            QueuePosition::Backoff => "backoff",
            QueuePosition::Unschedulable => "unschedulable",
        };
        *self.incoming.entry((position, self.event)).or_default() += 1;
    }

    fn count_rejected(&mut self, pod: &QueuedPod, count: impl Fn(usize) -> usize) {
        for plugin in pod.rejected_by.iter().chain(&pod.pending_on) {
            let waiting = self.rejected.entry((*plugin, pod.info.scheduler_name.clone())).or_default();
            *waiting = count(*waiting);
        }
    }
}

/// How to requeue a pod after an event.
#[derive(Clone, Copy, PartialEq, Eq)]
enum QueueingStrategy {
    Skip,
    AfterBackoff,
    Immediately,
}

impl SchedulingQueue {
    /// Creates an empty queue. All profiles must use the same QueueSort plugin.
    pub fn new(profiles: &[Profile], initial: Duration, max: Duration) -> SchedulingQueue {
        let rules = profiles.iter().map(|profile| {
            let rules =
                QueueingRules { gates: profile.pre_enqueue.clone(), queueing_hints: profile.requeue.clone() };
            (profile.scheduler_name.clone(), rules)
        });
        let signed = |time: Duration| SignedDuration::try_from(time).unwrap_or(SignedDuration::MAX);
        SchedulingQueue {
            sort: profiles[0].queue_sort.clone(),
            rules: rules.collect(),
            initial_backoff: signed(initial),
            max_backoff: signed(max),
            pods: HashMap::new(),
            active: BinaryHeap::new(),
            backoff: BTreeSet::new(),
            error_backoff: BTreeSet::new(),
            unschedulable: BTreeSet::new(),
            gated: 0,
            last_sequence: 0,
            nominator: Nominator::default(),
            counters: QueueCounters::default(),
            metrics: Arc::default(),
            hint_calls: Cell::new(0),
        }
    }

    /// Adds a new pod without a node.
    pub fn add(&mut self, info: Arc<PodInfo>, object: Arc<core::Pod>, state: &State, now: Timestamp) {
        let pod = QueuedPod::new(info, object, now);
        self.nominator.add(&pod.info, None);
        self.counters.event = "UnschedulablePodAdd";
        self.activate(pod, state, now);
    }

    /// Updates a pod without a node. A pod in its scheduling cycle is not in the queue and not changed.
    pub fn update(&mut self, info: Arc<PodInfo>, object: Arc<core::Pod>, state: &State, now: Timestamp) {
        let Some(entry) = self.pods.get(&info.uid) else { return };
        let position = entry.position;
        let mut pod = (*entry.pod).clone();
        let old = std::mem::replace(&mut pod.info, info);
        pod.object = object;
        self.nominator.update(&old, &pod.info);
        self.counters.event = "UnschedulablePodUpdate";
        match position {
            QueuePosition::Active => self.insert(pod, QueuePosition::Active),
            QueuePosition::Backoff => self.insert(pod, QueuePosition::Backoff),
            QueuePosition::Unschedulable => {
                let change = ClusterEvent::Pod(ObjectPair { old: Some(&old), new: Some(&pod.info) });
                let hint = self.queueing_strategy(&pod, &change, state);
                self.requeue(pod, hint, state, now);
            }
        }
    }

    /// Removes a pod that was deleted or bound.
    pub fn remove(&mut self, uid: &str) {
        self.nominator.remove(uid);
        self.remove_entry(uid);
    }

    /// Returns the sub-queue that contains the pod; `None` if it is not queued.
    pub fn position(&self, uid: &str) -> Option<QueuePosition> {
        self.pods.get(uid).map(|entry| entry.position)
    }

    /// Returns a queued pod.
    pub fn get(&self, uid: &str) -> Option<&Arc<QueuedPod>> {
        self.pods.get(uid).map(|entry| &entry.pod)
    }

    /// Returns the number of active, backoff, unschedulable and gated pods.
    pub fn pending_pods(&self) -> [usize; 4] {
        let waiting = self.backoff.len() + self.error_backoff.len();
        let active = self.pods.len() - waiting - self.unschedulable.len();
        [active, waiting, self.unschedulable.len() - self.gated, self.gated]
    }

    /// Pops the next pod. If none is active, takes one from backoff (upstream's `SchedulerPopFromBackoffQ`).
    pub fn pop(&mut self) -> Option<QueuedPod> {
        while let Some(next) = self.active.pop() {
            let current = self.pods.get(&next.pod.info.uid);
            if current.is_some_and(|entry| {
                entry.position == QueuePosition::Active && entry.sequence == next.sequence
            }) {
                return self.start_attempt(&next.pod.info.uid);
            }
        }
        let uid = self.backoff.first()?.2.clone();
        self.start_attempt(&uid)
    }

    fn start_attempt(&mut self, uid: &Arc<str>) -> Option<QueuedPod> {
        let mut pod = self.remove_entry(uid)?;
        pod.attempts += 1;
        pod.attempt_started = Instant::now();
        Some(pod)
    }

    /// Returns a pod to the queue after a failed attempt. Without rejecting plugins the attempt failed with
    /// an error.
    pub fn add_unschedulable(&mut self, mut pod: QueuedPod, state: &State, now: Timestamp) {
        if pod.rejected_by.is_empty() && pod.pending_on.is_empty() {
            pod.errors += 1;
        } else {
            pod.unschedulable_count += 1;
            pod.errors = 0;
        }
        pod.queued_at = now;
        pod.backoff_until = None;
        pod.timed_out = false;
        pod.timed_out_at = None;
        let error = pod.rejected_by.is_empty() && pod.pending_on.is_empty();
        self.counters.event = "ScheduleAttemptFailure";
        self.requeue(
            pod,
            if error { QueueingStrategy::AfterBackoff } else { QueueingStrategy::Skip },
            state,
            now,
        );
    }

    /// Requeues the unschedulable pods that the event may help.
    pub fn move_all_to_active_or_backoff(
        &mut self,
        change: &ClusterEvent<'_>,
        state: &State,
        now: Timestamp,
    ) {
        self.move_all_to_active_or_backoff_except(change, state, now, "");
    }

    /// Like `move_all_to_active_or_backoff`, except for one pod.
    pub fn move_all_to_active_or_backoff_except(
        &mut self,
        change: &ClusterEvent<'_>,
        state: &State,
        now: Timestamp,
        except: &str,
    ) {
        let mut to_move = Vec::new();
        for uid in &self.unschedulable {
            let hint = self.queueing_strategy(&self.pods[uid].pod, change, state);
            if hint != QueueingStrategy::Skip && **uid != *except {
                to_move.push((uid.clone(), hint));
            }
        }
        self.counters.event = change.label();
        for (uid, hint) in to_move {
            if let Some(pod) = self.remove_entry(&uid) {
                self.requeue(pod, hint, state, now);
            }
        }
    }

    /// Makes a pod active immediately, unless it is gated.
    pub fn activate_by_uid(&mut self, uid: &str, state: &State, now: Timestamp) {
        self.counters.event = "ForceActivate";
        if let Some(pod) = self.remove_entry(uid) {
            self.activate(pod, state, now);
        }
    }

    /// Moves pods whose backoff or time limit has ended. Call it again at [`SchedulingQueue::next_deadline`].
    pub fn flush(&mut self, state: &State, now: Timestamp) {
        self.counters.event = "BackoffComplete";
        for errors in [false, true] {
            while let Some((until, _, uid)) = self.backoff_set(errors).first().cloned() {
                if until >= whole_second(now) {
                    break;
                }
                match self.remove_entry(&uid) {
                    // PreEnqueue plugins ran when the pod was moved to backoff.
                    Some(pod) => self.move_to_active(pod, now),
                    None => break,
                }
            }
        }
        let mut expired = Vec::new();
        for uid in &self.unschedulable {
            if now.duration_since(self.pods[uid].pod.last_queued()) > POD_MAX_IN_UNSCHEDULABLE_PODS {
                expired.push(uid.clone());
            }
        }
        self.counters.event = "UnschedulableTimeout";
        for uid in expired {
            if let Some(mut pod) = self.remove_entry(&uid) {
                pod.timed_out = true;
                pod.timed_out_at = Some(now);
                self.requeue(pod, QueueingStrategy::AfterBackoff, state, now);
            }
        }
    }

    /// When [`SchedulingQueue::flush`] must be called next.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        let second = SignedDuration::from_secs(1);
        let backoff_times = [&self.backoff, &self.error_backoff].into_iter().filter_map(|set| set.first());
        let backoff_times = backoff_times.filter_map(|(until, ..)| until.checked_add(second).ok());
        let oldest = self.unschedulable.iter().map(|uid| self.pods[uid].pod.last_queued()).min();
        let leftover = oldest.and_then(|seen| seen.checked_add(POD_MAX_IN_UNSCHEDULABLE_PODS + second).ok());
        backoff_times.chain(leftover).min()
    }

    fn backoff_set(&mut self, errors: bool) -> &mut BTreeSet<(Timestamp, u64, Arc<str>)> {
        if errors { &mut self.error_backoff } else { &mut self.backoff }
    }

    fn remove_entry(&mut self, uid: &str) -> Option<QueuedPod> {
        let entry = self.pods.remove(uid)?;
        self.counters.count_rejected(&entry.pod, |waiting| waiting.saturating_sub(1));
        match entry.position {
            // Its heap entry is stale now; `pop` skips it.
            QueuePosition::Active => {}
            QueuePosition::Backoff => {
                let until = entry.pod.backoff_until.unwrap_or_default();
                let key = (until, entry.sequence, entry.pod.info.uid.clone());
                self.backoff.remove(&key);
                self.error_backoff.remove(&key);
            }
            QueuePosition::Unschedulable => {
                self.unschedulable.remove(uid);
                self.gated -= usize::from(entry.pod.gated_by.is_some());
            }
        }
        Some(Arc::unwrap_or_clone(entry.pod))
    }

    fn insert(&mut self, pod: QueuedPod, position: QueuePosition) {
        let before = self.pods.get(&pod.info.uid).map(|entry| entry.position);
        self.remove_entry(&pod.info.uid);
        if before != Some(position) {
            self.counters.count_incoming(position);
        }
        self.counters.count_rejected(&pod, |waiting| waiting + 1);
        self.last_sequence += 1;
        let (sequence, uid, pod) = (self.last_sequence, pod.info.uid.clone(), Arc::new(pod));
        match position {
            QueuePosition::Active => {
                self.active.push(ActiveEntry { pod: pod.clone(), sequence, sort: self.sort.clone() })
            }
            QueuePosition::Backoff => {
                let errors = pod.rejected_by.is_empty() && pod.pending_on.is_empty();
                let until = pod.backoff_until.unwrap_or_default();
                self.backoff_set(errors).insert((until, sequence, uid.clone()));
            }
            QueuePosition::Unschedulable => {
                self.unschedulable.insert(uid.clone());
                self.gated += usize::from(pod.gated_by.is_some());
            }
        }
        self.pods.insert(uid, Entry { pod, position, sequence });
    }

    fn move_to_active(&mut self, mut pod: QueuedPod, now: Timestamp) {
        pod.initial_attempt.get_or_insert(now);
        self.insert(pod, QueuePosition::Active);
    }

    /// Makes a pod active, unless it is gated.
    fn activate(&mut self, mut pod: QueuedPod, state: &State, now: Timestamp) {
        if self.is_gated(&mut pod, state) {
            self.insert(pod, QueuePosition::Unschedulable);
        } else {
            self.move_to_active(pod, now);
        }
    }

    fn is_gated(&self, pod: &mut QueuedPod, state: &State) -> bool {
        let gates = self.rules.get(&*pod.info.scheduler_name).map_or(&[][..], |rules| &rules.gates);
        let closed = gates.iter().find(|(_, gate)| !gate.pre_enqueue(&pod.info, state).is_success());
        pod.gated_by = closed.map(|(name, _)| *name);
        if let Some(name) = pod.gated_by {
            pod.rejected_by.insert(name);
            pod.timed_out = false;
        }
        pod.gated_by.is_some()
    }

    fn requeue(&mut self, mut pod: QueuedPod, hint: QueueingStrategy, state: &State, now: Timestamp) {
        if hint == QueueingStrategy::Skip {
            return self.insert(pod, QueuePosition::Unschedulable);
        }
        let until = self.backoff_until(&mut pod);
        if hint == QueueingStrategy::AfterBackoff && until.is_some_and(|until| until >= whole_second(now)) {
            let position = if self.is_gated(&mut pod, state) {
                QueuePosition::Unschedulable
            } else {
                QueuePosition::Backoff
            };
            return self.insert(pod, position);
        }
        self.activate(pod, state, now);
    }

    /// When the pod's backoff ends; doubles with each failure.
    fn backoff_until(&self, pod: &mut QueuedPod) -> Option<Timestamp> {
        let count = if pod.errors > 0 { pod.errors } else { pod.unschedulable_count };
        let shift = count.checked_sub(1)?.min(30);
        let time =
            self.initial_backoff.checked_mul(1 << shift).unwrap_or(self.max_backoff).min(self.max_backoff);
        let until = pod.queued_at.checked_add(time).unwrap_or(Timestamp::MAX);
        Some(*pod.backoff_until.get_or_insert(whole_second(until)))
    }

    fn queueing_strategy(
        &self,
        pod: &QueuedPod,
        change: &ClusterEvent<'_>,
        state: &State,
    ) -> QueueingStrategy {
        if pod.rejected_by.is_empty() && pod.pending_on.is_empty()
            || matches!(change, ClusterEvent::ForceActivate)
        {
            return QueueingStrategy::AfterBackoff;
        }
        let Some(rules) = self.rules.get(&*pod.info.scheduler_name) else {
            return QueueingStrategy::AfterBackoff;
        };
        let should_queue = |name: &&'static str| -> bool {
            let Some(hint) = rules.queueing_hints.get(name) else { return true };
            let number = self.hint_calls.replace(self.hint_calls.get().wrapping_add(1));
            if !number.is_multiple_of(10) {
                return hint.is_schedulable_after_change(&pod.info, change, state);
            }
            let started = Instant::now();
            let should_queue = hint.is_schedulable_after_change(&pod.info, change, state);
            self.metrics.observe_queueing_hint(name, change.label(), should_queue, started.elapsed());
            should_queue
        };
        if let Some(gate) = pod.gated_by {
            return if should_queue(&gate) { QueueingStrategy::AfterBackoff } else { QueueingStrategy::Skip };
        }
        if pod.pending_on.iter().any(should_queue) {
            return QueueingStrategy::Immediately;
        }
        if pod.rejected_by.iter().any(should_queue) {
            QueueingStrategy::AfterBackoff
        } else {
            QueueingStrategy::Skip
        }
    }
}

impl QueuedPod {
    /// A pod before its first attempt.
    pub fn new(info: Arc<PodInfo>, object: Arc<core::Pod>, now: Timestamp) -> QueuedPod {
        QueuedPod {
            info,
            object,
            queued_at: now,
            initial_attempt: None,
            attempts: 0,
            attempt_started: Instant::now(),
            unschedulable_count: 0,
            errors: 0,
            backoff_until: None,
            rejected_by: BTreeSet::new(),
            pending_on: BTreeSet::new(),
            gated_by: None,
            timed_out: false,
            timed_out_at: None,
        }
    }

    fn last_queued(&self) -> Timestamp {
        self.timed_out_at.map_or(self.queued_at, |timed_out_at| timed_out_at.max(self.queued_at))
    }
}

/// Rounds down to the second, as upstream's `backoffQOrderingWindowDuration`: pods whose backoff ends in the
/// same second are ordered by priority.
fn whole_second(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}
