//! What the scheduler counts, under upstream's names, as Prometheus reads it.
//!
//! The list is in [`table`]. Upstream has a few more that tell of its own workings, which are others here: events kept
//! while a pod is tried, choices kept for the next pod, calls that are merged.

mod series;
pub mod stopwatch;
mod table;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use Word::{Fixed, Given};
use jiff::Timestamp;
use series::{NONE, Series, Word};

use crate::framework::Profile;
use crate::queue::{Queue, QueuedPod};
use crate::state::State;

/// Everything that is counted.
#[derive(Default)]
pub struct Metrics {
    series: Series,
    /// Bindings on their way.
    binding: AtomicU64,
}

/// An extension point, what came of it, and how long it took.
pub type Ran = (&'static str, &'static str, Duration);

impl Metrics {
    /// A pod was tried. `pod` knows since when.
    pub fn attempted(&self, profile: &Arc<str>, result: &'static str, pod: &QueuedPod) {
        let words = [Given(profile.clone()), Fixed(result), NONE];
        self.series.observe(&table::ATTEMPT_SECONDS, words.clone(), pod.begun.elapsed().as_secs_f64());
        self.series.add(&table::ATTEMPTS, words);
    }

    /// How long all plugins of an extension point took, and what came of it: `Success`, `Unschedulable` or `Error`.
    pub fn ran(&self, profile: &Arc<str>, (point, status, time): Ran) {
        let words = [Fixed(point), Given(profile.clone()), Fixed(status)];
        self.series.observe(&table::POINT_SECONDS, words, time.as_secs_f64());
    }

    /// How long one plugin took.
    pub fn plugin_ran(&self, plugin: &'static str, (point, status, time): Ran) {
        let words = [Fixed(point), Fixed(plugin), Fixed(status)];
        self.series.observe(&table::PLUGIN_SECONDS, words, time.as_secs_f64());
    }

    /// How long a plugin took to say whether an event helps a pod.
    pub fn hinted(&self, plugin: &'static str, event: &'static str, helps: bool, time: Duration) {
        let hint = if helps { "Queue" } else { "QueueSkip" };
        let words = [Fixed(event), Fixed(hint), Fixed(plugin)];
        self.series.observe(&table::HINT_SECONDS, words, time.as_secs_f64());
    }

    /// How long it took to take note of an event.
    pub fn handled(&self, event: &'static str, time: Duration) {
        self.series.observe(&table::EVENT_SECONDS, [Fixed(event), NONE, NONE], time.as_secs_f64());
    }

    /// How things stand.
    pub fn look(&self, queue: &Queue, state: &State, profiles: impl Iterator<Item = Arc<Profile>>) {
        let count = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
        for (name, pods) in ["active", "backoff", "unschedulable", "gated"].into_iter().zip(queue.lengths()) {
            self.series.set(&table::PENDING, [Fixed(name), NONE, NONE], count(pods));
        }
        let known = [state.order().len(), state.placed(), state.assumed()];
        for (kind, number) in ["nodes", "pods", "assumed_pods"].into_iter().zip(known) {
            self.series.set(&table::CACHE, [Fixed(kind), NONE, NONE], count(number));
        }
        for ((plugin, profile), pods) in &queue.tally.rejected {
            self.series.set(&table::REJECTED, [Fixed(plugin), Given(profile.clone()), NONE], count(*pods));
        }
        for ((queue, event), pods) in &queue.tally.incoming {
            self.series.set(&table::INCOMING, [Fixed(event), Fixed(queue), NONE], *pods);
        }
        let binding = self.binding.load(Ordering::Relaxed);
        self.series.set(&table::TASKS, [Fixed("binding"), NONE, NONE], binding);
        for profile in profiles {
            for (point, plugin, times) in profile.asked() {
                let words = [Fixed(point), Fixed(plugin), Given(profile.scheduler_name.clone())];
                self.series.set(&table::PLUGIN_ASKED, words, times);
            }
        }
    }

    /// A binding began.
    pub fn binding_begins(&self) {
        self.binding.fetch_add(1, Ordering::Relaxed);
    }

    /// A binding ended, whatever came of it.
    pub fn binding_ends(&self) {
        self.binding.fetch_sub(1, Ordering::Relaxed);
    }

    /// A pod was held back before it was bound.
    pub fn waited(&self, result: &'static str, time: Duration) {
        self.series.observe(&table::PERMIT_SECONDS, [Fixed(result), NONE, NONE], time.as_secs_f64());
    }

    /// Pods were asked to go.
    pub fn preempted(&self, victims: usize) {
        self.series.add(&table::PREEMPTIONS, [NONE; 3]);
        self.series.observe(&table::VICTIMS, [NONE; 3], victims as f64);
    }

    /// They were removed, or one of them could not be.
    pub fn removed(&self, all: bool, time: Duration) {
        let words = [Fixed(if all { "success" } else { "error" }), NONE, NONE];
        self.series.observe(&table::PREEMPTION_SECONDS, words.clone(), time.as_secs_f64());
        self.series.add(&table::PREEMPTION_RUNS, words);
    }

    /// A claim for extended resources was made, or could not be.
    pub fn claim_made(&self, made: bool) {
        let status = if made { "success" } else { "failure" };
        self.series.add(&table::CLAIMS_MADE, [Fixed(status), NONE, NONE]);
    }

    /// How long the choice of a node took.
    pub fn chose(&self, seconds: f64) {
        self.series.observe(&table::CHOICE_SECONDS, [NONE; 3], seconds);
    }

    /// A pod was bound.
    pub fn scheduled(&self, profile: &Arc<str>, pod: &QueuedPod, now: Timestamp) {
        self.attempted(profile, "scheduled", pod);
        self.series.observe(&table::POD_ATTEMPTS, [NONE; 3], f64::from(pod.attempts));
        if let Some(first) = pod.first_tried {
            let attempts = if pod.attempts >= 15 { "15+".to_owned() } else { pod.attempts.to_string() };
            let seconds = now.duration_since(first).as_secs_f64();
            self.series.observe(&table::SLI_SECONDS, [Given(attempts.into()), NONE, NONE], seconds);
        }
        if pod.flushed {
            self.series.add(&table::AFTER_FLUSH, [NONE; 3]);
        }
    }

    /// Appends everything in Prometheus' text form.
    pub fn write(&self, out: &mut String) {
        self.series.write(out);
    }
}
