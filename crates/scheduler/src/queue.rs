//! Pods that wait to be scheduled.
//!
//! *Active* pods are tried next, in the order of the profile's sort plugin. Pods that failed wait a while in
//! *backoff*, unless nobody else wants the scheduler's time. Pods that no node was found for are
//! *unschedulable* until a change comes that a plugin which turned them away says may help, or until five
//! minutes have passed. Gated pods are unschedulable from the start. A plain data structure: time is an
//! argument.

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

use crate::framework::{Change, Pair, PreEnqueue, Profile, QueueSort, Requeue};
use crate::metrics::Metrics;
use crate::state::{PodInfo, State};

/// How long a pod is left unschedulable without any event.
const LEFTOVER: SignedDuration = SignedDuration::from_mins(5);

/// A pod that waits, or is being tried.
#[derive(Clone)]
pub struct QueuedPod {
    pub info: Arc<PodInfo>,
    pub object: Arc<core::Pod>,
    /// When it was last put in the queue.
    pub queued_at: Timestamp,
    /// When it was first ready to be tried.
    pub first_tried: Option<Timestamp>,
    pub attempts: u32,
    /// When it was last tried.
    pub begun: Instant,
    /// How often no node was found.
    pub unschedulable_count: u32,
    /// How often in a row something went wrong.
    pub errors: u32,
    backoff_until: Option<Timestamp>,
    /// Who turned it away the last time.
    pub rejected_by: BTreeSet<&'static str>,
    /// Who let it wait for something outside.
    pub pending_on: BTreeSet<&'static str>,
    /// Who keeps it out of the queue.
    pub gated_by: Option<&'static str>,
    /// Was last tried again only because of the time.
    pub flushed: bool,
    flushed_at: Option<Timestamp>,
}

/// Where a pod waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Active,
    Backoff,
    Unschedulable,
}

struct Entry {
    pod: Arc<QueuedPod>,
    place: Place,
    /// What is in the heaps with another ticket is out of date.
    ticket: u64,
}

struct Ready {
    pod: Arc<QueuedPod>,
    ticket: u64,
    sort: Arc<dyn QueueSort>,
}

impl Ord for Ready {
    /// The first to go is the greatest.
    fn cmp(&self, other: &Ready) -> Ordering {
        self.sort.compare(&other.pod, &self.pod).then(other.ticket.cmp(&self.ticket))
    }
}

impl PartialOrd for Ready {
    fn partial_cmp(&self, other: &Ready) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Ready {
    fn eq(&self, other: &Ready) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Ready {}

/// What the queue asks of a profile.
#[derive(Clone)]
struct Rules {
    gates: Vec<(&'static str, Arc<dyn PreEnqueue>)>,
    hints: HashMap<&'static str, Arc<dyn Requeue>>,
}

/// The queue of all profiles.
pub struct Queue {
    sort: Arc<dyn QueueSort>,
    rules: HashMap<Arc<str>, Rules>,
    initial_backoff: SignedDuration,
    max_backoff: SignedDuration,
    pods: HashMap<Arc<str>, Entry>,
    active: BinaryHeap<Ready>,
    /// By the second they are done.
    backoff: BTreeSet<(Timestamp, u64, Arc<str>)>,
    /// The same for pods that failed by an error, which must wait in any case.
    error_backoff: BTreeSet<(Timestamp, u64, Arc<str>)>,
    unschedulable: BTreeSet<Arc<str>>,
    /// How many of those a gate keeps out.
    gated: usize,
    tickets: u64,
    pub nominator: Nominator,
    pub tally: Tally,
    pub metrics: Arc<Metrics>,
    /// How many hints plugins gave; one of ten is timed.
    hints: Cell<u64>,
}

/// What is counted of a queue.
#[derive(Clone, Default)]
pub struct Tally {
    /// How often pods came to a place, by that and by why they did.
    pub incoming: BTreeMap<(&'static str, &'static str), u64>,
    /// How many waiting pods each plugin has turned away, by that and by scheduler.
    pub rejected: BTreeMap<(&'static str, Arc<str>), usize>,
    /// Why pods are moved just now.
    pub cause: &'static str,
}

impl Tally {
    fn came(&mut self, place: Place) {
        let place = match place {
            Place::Active => "active",
            Place::Backoff => "backoff",
            Place::Unschedulable => "unschedulable",
        };
        *self.incoming.entry((place, self.cause)).or_default() += 1;
    }

    fn count_rejected(&mut self, pod: &QueuedPod, count: impl Fn(usize) -> usize) {
        for plugin in pod.rejected_by.iter().chain(&pod.pending_on) {
            let waiting = self.rejected.entry((*plugin, pod.info.scheduler_name.clone())).or_default();
            *waiting = count(*waiting);
        }
    }
}

/// What a change means for a pod.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hint {
    Skip,
    AfterBackoff,
    Now,
}

impl Queue {
    /// An empty queue for these profiles, which must agree on how to sort.
    pub fn new(profiles: &[Profile], initial: Duration, max: Duration) -> Queue {
        let rules = profiles.iter().map(|profile| {
            let rules = Rules { gates: profile.pre_enqueue.clone(), hints: profile.requeue.clone() };
            (profile.scheduler_name.clone(), rules)
        });
        let signed = |time: Duration| SignedDuration::try_from(time).unwrap_or(SignedDuration::MAX);
        Queue {
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
            tickets: 0,
            nominator: Nominator::default(),
            tally: Tally::default(),
            metrics: Arc::default(),
            hints: Cell::new(0),
        }
    }

    /// A pod without a node came.
    pub fn add(&mut self, info: Arc<PodInfo>, object: Arc<core::Pod>, state: &State, now: Timestamp) {
        let pod = QueuedPod::new(info, object, now);
        self.nominator.add(&pod.info, None);
        self.tally.cause = "UnschedulablePodAdd";
        self.activate(pod, state, now);
    }

    /// A pod without a node changed. One that is being tried is not in the queue and left alone.
    pub fn update(&mut self, info: Arc<PodInfo>, object: Arc<core::Pod>, state: &State, now: Timestamp) {
        let Some(entry) = self.pods.get(&info.uid) else { return };
        let place = entry.place;
        let mut pod = (*entry.pod).clone();
        let old = std::mem::replace(&mut pod.info, info);
        pod.object = object;
        self.nominator.update(&old, &pod.info);
        self.tally.cause = "UnschedulablePodUpdate";
        match place {
            Place::Active => self.put(pod, Place::Active),
            Place::Backoff => self.put(pod, Place::Backoff),
            Place::Unschedulable => {
                let change = Change::Pod(Pair { old: Some(&old), new: Some(&pod.info) });
                let hint = self.hint(&pod, &change, state);
                self.requeue(pod, hint, state, now);
            }
        }
    }

    /// A pod went, or was bound.
    pub fn remove(&mut self, uid: &str) {
        self.nominator.remove(uid);
        self.take(uid);
    }

    /// Whether a pod is in the queue, and where.
    pub fn place(&self, uid: &str) -> Option<Place> {
        self.pods.get(uid).map(|entry| entry.place)
    }

    /// A pod in the queue.
    pub fn get(&self, uid: &str) -> Option<&Arc<QueuedPod>> {
        self.pods.get(uid).map(|entry| &entry.pod)
    }

    /// How many pods are active, in backoff, unschedulable and gated.
    pub fn lengths(&self) -> [usize; 4] {
        let waiting = self.backoff.len() + self.error_backoff.len();
        let active = self.pods.len() - waiting - self.unschedulable.len();
        [active, waiting, self.unschedulable.len() - self.gated, self.gated]
    }

    /// The next pod to be tried. If none is active, one that is in backoff.
    pub fn pop(&mut self) -> Option<QueuedPod> {
        while let Some(next) = self.active.pop() {
            let current = self.pods.get(&next.pod.info.uid);
            if current.is_some_and(|entry| entry.place == Place::Active && entry.ticket == next.ticket) {
                return self.tried(&next.pod.info.uid);
            }
        }
        let uid = self.backoff.first()?.2.clone();
        self.tried(&uid)
    }

    fn tried(&mut self, uid: &Arc<str>) -> Option<QueuedPod> {
        let mut pod = self.take(uid)?;
        pod.attempts += 1;
        pod.begun = Instant::now();
        Some(pod)
    }

    /// No node was found for a pod, or something went wrong if nobody turned it away.
    pub fn failed(&mut self, mut pod: QueuedPod, state: &State, now: Timestamp) {
        if pod.rejected_by.is_empty() && pod.pending_on.is_empty() {
            pod.errors += 1;
        } else {
            pod.unschedulable_count += 1;
            pod.errors = 0;
        }
        pod.queued_at = now;
        pod.backoff_until = None;
        pod.flushed = false;
        pod.flushed_at = None;
        let error = pod.rejected_by.is_empty() && pod.pending_on.is_empty();
        self.tally.cause = "ScheduleAttemptFailure";
        self.requeue(pod, if error { Hint::AfterBackoff } else { Hint::Skip }, state, now);
    }

    /// Something changed: pods it may help are tried again.
    pub fn wake(&mut self, change: &Change<'_>, state: &State, now: Timestamp) {
        self.wake_except(change, state, now, "");
    }

    /// The same, without one pod.
    pub fn wake_except(&mut self, change: &Change<'_>, state: &State, now: Timestamp, but: &str) {
        let mut helped = Vec::new();
        for uid in &self.unschedulable {
            let hint = self.hint(&self.pods[uid].pod, change, state);
            if hint != Hint::Skip && **uid != *but {
                helped.push((uid.clone(), hint));
            }
        }
        self.tally.cause = change.label();
        for (uid, hint) in helped {
            if let Some(pod) = self.take(&uid) {
                self.requeue(pod, hint, state, now);
            }
        }
    }

    /// Tries a pod again at once, wherever it waits.
    pub fn activate_by_uid(&mut self, uid: &str, state: &State, now: Timestamp) {
        self.tally.cause = "ForceActivate";
        if let Some(pod) = self.take(uid) {
            self.activate(pod, state, now);
        }
    }

    /// Moves pods whose time has come. To be called again at [`Queue::next_deadline`].
    pub fn tick(&mut self, state: &State, now: Timestamp) {
        self.tally.cause = "BackoffComplete";
        for errors in [false, true] {
            while let Some((until, _, uid)) = self.backoff_set(errors).first().cloned() {
                if until >= whole_second(now) {
                    break;
                }
                match self.take(&uid) {
                    // The gates were asked when it went to backoff.
                    Some(pod) => self.make_ready(pod, now),
                    None => break,
                }
            }
        }
        let mut left = Vec::new();
        for uid in &self.unschedulable {
            if now.duration_since(self.pods[uid].pod.last_seen()) > LEFTOVER {
                left.push(uid.clone());
            }
        }
        self.tally.cause = "UnschedulableTimeout";
        for uid in left {
            if let Some(mut pod) = self.take(&uid) {
                pod.flushed = true;
                pod.flushed_at = Some(now);
                self.requeue(pod, Hint::AfterBackoff, state, now);
            }
        }
    }

    /// When [`Queue::tick`] has something to do next.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        let second = SignedDuration::from_secs(1);
        let backoffs = [&self.backoff, &self.error_backoff].into_iter().filter_map(|set| set.first());
        let backoffs = backoffs.filter_map(|(until, ..)| until.checked_add(second).ok());
        let oldest = self.unschedulable.iter().map(|uid| self.pods[uid].pod.last_seen()).min();
        let leftover = oldest.and_then(|seen| seen.checked_add(LEFTOVER + second).ok());
        backoffs.chain(leftover).min()
    }

    fn backoff_set(&mut self, errors: bool) -> &mut BTreeSet<(Timestamp, u64, Arc<str>)> {
        if errors { &mut self.error_backoff } else { &mut self.backoff }
    }

    fn take(&mut self, uid: &str) -> Option<QueuedPod> {
        let entry = self.pods.remove(uid)?;
        self.tally.count_rejected(&entry.pod, |waiting| waiting.saturating_sub(1));
        match entry.place {
            // Its ticket in the heap is out of date now.
            Place::Active => {}
            Place::Backoff => {
                let until = entry.pod.backoff_until.unwrap_or_default();
                let key = (until, entry.ticket, entry.pod.info.uid.clone());
                self.backoff.remove(&key);
                self.error_backoff.remove(&key);
            }
            Place::Unschedulable => {
                self.unschedulable.remove(uid);
                self.gated -= usize::from(entry.pod.gated_by.is_some());
            }
        }
        Some(Arc::unwrap_or_clone(entry.pod))
    }

    fn put(&mut self, pod: QueuedPod, place: Place) {
        let before = self.pods.get(&pod.info.uid).map(|entry| entry.place);
        self.take(&pod.info.uid);
        if before != Some(place) {
            self.tally.came(place);
        }
        self.tally.count_rejected(&pod, |waiting| waiting + 1);
        self.tickets += 1;
        let (ticket, uid, pod) = (self.tickets, pod.info.uid.clone(), Arc::new(pod));
        match place {
            Place::Active => self.active.push(Ready { pod: pod.clone(), ticket, sort: self.sort.clone() }),
            Place::Backoff => {
                let errors = pod.rejected_by.is_empty() && pod.pending_on.is_empty();
                let until = pod.backoff_until.unwrap_or_default();
                self.backoff_set(errors).insert((until, ticket, uid.clone()));
            }
            Place::Unschedulable => {
                self.unschedulable.insert(uid.clone());
                self.gated += usize::from(pod.gated_by.is_some());
            }
        }
        self.pods.insert(uid, Entry { pod, place, ticket });
    }

    fn make_ready(&mut self, mut pod: QueuedPod, now: Timestamp) {
        pod.first_tried.get_or_insert(now);
        self.put(pod, Place::Active);
    }

    /// To the active pods, unless a gate is closed.
    fn activate(&mut self, mut pod: QueuedPod, state: &State, now: Timestamp) {
        if self.is_gated(&mut pod, state) {
            self.put(pod, Place::Unschedulable);
        } else {
            self.make_ready(pod, now);
        }
    }

    fn is_gated(&self, pod: &mut QueuedPod, state: &State) -> bool {
        let gates = self.rules.get(&*pod.info.scheduler_name).map_or(&[][..], |rules| &rules.gates);
        let closed = gates.iter().find(|(_, gate)| !gate.pre_enqueue(&pod.info, state).is_success());
        pod.gated_by = closed.map(|(name, _)| *name);
        if let Some(name) = pod.gated_by {
            pod.rejected_by.insert(name);
            pod.flushed = false;
        }
        pod.gated_by.is_some()
    }

    fn requeue(&mut self, mut pod: QueuedPod, hint: Hint, state: &State, now: Timestamp) {
        if hint == Hint::Skip {
            return self.put(pod, Place::Unschedulable);
        }
        let until = self.backoff_until(&mut pod);
        if hint == Hint::AfterBackoff && until.is_some_and(|until| until >= whole_second(now)) {
            let place = if self.is_gated(&mut pod, state) { Place::Unschedulable } else { Place::Backoff };
            return self.put(pod, place);
        }
        self.activate(pod, state, now);
    }

    /// When the pod has waited long enough; doubles with every failure.
    fn backoff_until(&self, pod: &mut QueuedPod) -> Option<Timestamp> {
        let count = if pod.errors > 0 { pod.errors } else { pod.unschedulable_count };
        let shift = count.checked_sub(1)?.min(30);
        let time =
            self.initial_backoff.checked_mul(1 << shift).unwrap_or(self.max_backoff).min(self.max_backoff);
        let until = pod.queued_at.checked_add(time).unwrap_or(Timestamp::MAX);
        Some(*pod.backoff_until.get_or_insert(whole_second(until)))
    }

    fn hint(&self, pod: &QueuedPod, change: &Change<'_>, state: &State) -> Hint {
        if pod.rejected_by.is_empty() && pod.pending_on.is_empty() || matches!(change, Change::Anything) {
            return Hint::AfterBackoff;
        }
        let Some(rules) = self.rules.get(&*pod.info.scheduler_name) else { return Hint::AfterBackoff };
        let helps = |name: &&'static str| -> bool {
            let Some(hint) = rules.hints.get(name) else { return true };
            let number = self.hints.replace(self.hints.get().wrapping_add(1));
            if !number.is_multiple_of(10) {
                return hint.helps(&pod.info, change, state);
            }
            let begun = Instant::now();
            let helps = hint.helps(&pod.info, change, state);
            self.metrics.hinted(name, change.label(), helps, begun.elapsed());
            helps
        };
        if let Some(gate) = pod.gated_by {
            return if helps(&gate) { Hint::AfterBackoff } else { Hint::Skip };
        }
        if pod.pending_on.iter().any(helps) {
            return Hint::Now;
        }
        if pod.rejected_by.iter().any(helps) { Hint::AfterBackoff } else { Hint::Skip }
    }
}

impl QueuedPod {
    /// A pod that was never tried.
    pub fn new(info: Arc<PodInfo>, object: Arc<core::Pod>, now: Timestamp) -> QueuedPod {
        QueuedPod {
            info,
            object,
            queued_at: now,
            first_tried: None,
            attempts: 0,
            begun: Instant::now(),
            unschedulable_count: 0,
            errors: 0,
            backoff_until: None,
            rejected_by: BTreeSet::new(),
            pending_on: BTreeSet::new(),
            gated_by: None,
            flushed: false,
            flushed_at: None,
        }
    }

    fn last_seen(&self) -> Timestamp {
        self.flushed_at.map_or(self.queued_at, |flushed| flushed.max(self.queued_at))
    }
}

/// Pods whose backoff ends in the same second are tried by priority.
fn whole_second(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}
