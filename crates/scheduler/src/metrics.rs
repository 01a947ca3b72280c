//! Metrics of the scheduler, under upstream's names.
//!
//! The list is in [`table`]. Not implemented are upstream's metrics of parts that do not exist here:
//! in-flight events of the queue, pod batching and the asynchronous API dispatcher.

pub mod plugin_timer;
mod series;
mod table;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use LabelValue::{Shared, Static};
use jiff::Timestamp;
use series::{LabelValue, NO_LABEL, Series};

use crate::framework::Profile;
use crate::queue::{QueuedPod, SchedulingQueue};
use crate::state::State;

/// All metrics of the scheduler.
#[derive(Default)]
pub struct Metrics {
    series: Series,
    /// Number of binding cycles in progress.
    binding: AtomicU64,
}

/// Extension point, status and duration.
pub type ExtensionPointRun = (&'static str, &'static str, Duration);

impl Metrics {
    /// Records an attempt and its result. `pod` has the start time.
    pub fn observe_attempt(&self, profile: &Arc<str>, result: &'static str, pod: &QueuedPod) {
        let label_values = [Shared(profile.clone()), Static(result), NO_LABEL];
        self.series.observe(
            &table::ATTEMPT_SECONDS,
            label_values.clone(),
            pod.attempt_started.elapsed().as_secs_f64(),
        );
        self.series.add(&table::ATTEMPTS, label_values);
    }

    /// Records the duration of all plugins of an extension point. The status is `Success`, `Unschedulable` or
    /// `Error`.
    pub fn observe_extension_point(&self, profile: &Arc<str>, (point, status, time): ExtensionPointRun) {
        let label_values = [Static(point), Shared(profile.clone()), Static(status)];
        self.series.observe(&table::POINT_SECONDS, label_values, time.as_secs_f64());
    }

    /// Records the duration of one plugin.
    pub fn observe_plugin(&self, plugin: &'static str, (point, status, time): ExtensionPointRun) {
        let label_values = [Static(point), Static(plugin), Static(status)];
        self.series.observe(&table::PLUGIN_SECONDS, label_values, time.as_secs_f64());
    }

    /// Records the duration and result of a queueing hint.
    pub fn observe_queueing_hint(
        &self,
        plugin: &'static str,
        event: &'static str,
        should_queue: bool,
        time: Duration,
    ) {
        let hint = if should_queue { "Queue" } else { "QueueSkip" };
        let label_values = [Static(event), Static(hint), Static(plugin)];
        self.series.observe(&table::HINT_SECONDS, label_values, time.as_secs_f64());
    }

    /// Records the duration of event handling.
    pub fn observe_event_handling(&self, event: &'static str, time: Duration) {
        self.series.observe(&table::EVENT_SECONDS, [Static(event), NO_LABEL, NO_LABEL], time.as_secs_f64());
    }

    /// Updates the gauges.
    pub fn update(
        &self,
        queue: &SchedulingQueue,
        state: &State,
        profiles: impl Iterator<Item = Arc<Profile>>,
    ) {
        let count = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
        for (name, pods) in
            ["active", "backoff", "unschedulable", "gated"].into_iter().zip(queue.pending_pods())
        {
            self.series.set(&table::PENDING, [Static(name), NO_LABEL, NO_LABEL], count(pods));
        }
        let known = [state.order().len(), state.pod_count(), state.assumed_count()];
        for (kind, number) in ["nodes", "pods", "assumed_pods"].into_iter().zip(known) {
            self.series.set(&table::CACHE, [Static(kind), NO_LABEL, NO_LABEL], count(number));
        }
        for ((plugin, profile), pods) in &queue.counters.rejected {
            self.series.set(
                &table::REJECTED,
                [Static(plugin), Shared(profile.clone()), NO_LABEL],
                count(*pods),
            );
        }
        for ((queue, event), pods) in &queue.counters.incoming {
            self.series.set(&table::INCOMING, [Static(event), Static(queue), NO_LABEL], *pods);
        }
        let binding = self.binding.load(Ordering::Relaxed);
        self.series.set(&table::TASKS, [Static("binding"), NO_LABEL, NO_LABEL], binding);
        for profile in profiles {
            for (point, plugin, times) in profile.evaluations() {
                let label_values = [Static(point), Static(plugin), Shared(profile.scheduler_name.clone())];
                self.series.set(&table::PLUGIN_EVALUATIONS, label_values, times);
            }
        }
    }

    /// A binding cycle started.
    pub fn binding_started(&self) {
        self.binding.fetch_add(1, Ordering::Relaxed);
    }

    /// A binding cycle ended, successfully or not.
    pub fn binding_finished(&self) {
        self.binding.fetch_sub(1, Ordering::Relaxed);
    }

    /// Records how long a pod waited at Permit.
    pub fn observe_permit_wait(&self, result: &'static str, time: Duration) {
        self.series.observe(&table::PERMIT_SECONDS, [Static(result), NO_LABEL, NO_LABEL], time.as_secs_f64());
    }

    /// Records a preemption.
    pub fn observe_preemption(&self, victims: usize) {
        self.series.add(&table::PREEMPTIONS, [NO_LABEL; 3]);
        self.series.observe(&table::VICTIMS, [NO_LABEL; 3], victims as f64);
    }

    /// Records the deletion of victims; `all` if every one was deleted.
    pub fn observe_victim_deletion(&self, all: bool, time: Duration) {
        let label_values = [Static(if all { "success" } else { "error" }), NO_LABEL, NO_LABEL];
        self.series.observe(&table::PREEMPTION_SECONDS, label_values.clone(), time.as_secs_f64());
        self.series.add(&table::PREEMPTION_RUNS, label_values);
    }

    /// Records the creation of a ResourceClaim for extended resources.
    pub fn count_claim_create(&self, created: bool) {
        let status = if created { "success" } else { "failure" };
        self.series.add(&table::CLAIM_CREATES, [Static(status), NO_LABEL, NO_LABEL]);
    }

    /// Records the duration of the scheduling algorithm.
    pub fn observe_scheduling_algorithm(&self, seconds: f64) {
        self.series.observe(&table::ALGORITHM_SECONDS, [NO_LABEL; 3], seconds);
    }

    /// Records that a pod was bound.
    pub fn observe_scheduled(&self, profile: &Arc<str>, pod: &QueuedPod, now: Timestamp) {
        self.observe_attempt(profile, "scheduled", pod);
        self.series.observe(&table::POD_ATTEMPTS, [NO_LABEL; 3], f64::from(pod.attempts));
        if let Some(first) = pod.initial_attempt {
            let attempts = if pod.attempts >= 15 { "15+".to_owned() } else { pod.attempts.to_string() };
            let seconds = now.duration_since(first).as_secs_f64();
            self.series.observe(&table::SLI_SECONDS, [Shared(attempts.into()), NO_LABEL, NO_LABEL], seconds);
        }
        if pod.timed_out {
            self.series.add(&table::AFTER_FLUSH, [NO_LABEL; 3]);
        }
    }

    /// Appends all metrics in the Prometheus text format.
    pub fn write(&self, out: &mut String) {
        self.series.write(out);
    }
}
