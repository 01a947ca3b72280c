//! What the scheduler counts, under upstream's names, as Prometheus reads it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use jiff::Timestamp;
use parking_lot::Mutex;

use crate::queue::{Queue, QueuedPod, Tally};
use crate::state::State;

/// Counters and histograms by name and labels.
#[derive(Default)]
pub struct Metrics {
    counters: Mutex<BTreeMap<(&'static str, String), u64>>,
    histograms: Mutex<BTreeMap<(&'static str, String), Histogram>>,
    gauges: Mutex<Gauges>,
}

/// An extension point, what came of it, and how long it took.
pub type Ran = (&'static str, &'static str, Duration);

/// How things stood when it was last looked.
#[derive(Default)]
struct Gauges {
    /// Pods that are active, backing off, unschedulable, gated.
    pending: [usize; 4],
    /// Nodes, pods on nodes, and pods assumed to be there.
    cache: [usize; 3],
    queue: Tally,
}

/// What each is about.
const HELP: [(&str, &str); 12] = [
    (
        "scheduler_framework_extension_point_duration_seconds",
        "Time that all plugins of an extension point took.",
    ),
    ("scheduler_pending_pods", "Pods that wait, by queue."),
    ("scheduler_cache_size", "What the scheduler knows of, by type."),
    ("scheduler_unschedulable_pods", "Waiting pods by the plugins that turned them away."),
    ("scheduler_queue_incoming_pods_total", "Pods that came to a queue, by what brought them there."),
    ("scheduler_schedule_attempts_total", "Attempts to schedule pods, by result."),
    ("scheduler_scheduling_attempt_duration_seconds", "Time of an attempt, the binding included."),
    ("scheduler_scheduling_algorithm_duration_seconds", "Time to choose a node."),
    ("scheduler_preemption_attempts_total", "Attempts to make room."),
    ("scheduler_preemption_victims", "Pods that had to go for another."),
    ("scheduler_pod_scheduling_sli_duration_seconds", "Time until a pod had its node, over all attempts."),
    ("scheduler_pod_scheduling_attempts", "Attempts until a pod had its node."),
];

/// Upper bounds of a histogram: a first one, doubled so many times less one.
struct Buckets {
    first: f64,
    count: u32,
}

const SHORT_SECONDS: Buckets = Buckets { first: 0.0001, count: 12 };
const SECONDS: Buckets = Buckets { first: 0.001, count: 15 };
const LONG_SECONDS: Buckets = Buckets { first: 0.01, count: 20 };
const PODS: Buckets = Buckets { first: 1.0, count: 7 };
const ATTEMPTS: Buckets = Buckets { first: 1.0, count: 5 };

#[derive(Default)]
struct Histogram {
    bounds: Vec<f64>,
    counts: Vec<u64>,
    sum: f64,
    count: u64,
}

impl Histogram {
    fn observe(&mut self, buckets: &Buckets, value: f64) {
        if self.bounds.is_empty() {
            self.bounds = (0..buckets.count).map(|i| buckets.first * f64::from(1 << i)).collect();
            self.counts = vec![0; self.bounds.len()];
        }
        if let Some(at) = self.bounds.iter().position(|bound| value <= *bound) {
            self.counts[at] += 1;
        }
        self.sum += value;
        self.count += 1;
    }
}

impl Metrics {
    fn add(&self, name: &'static str, labels: String) {
        *self.counters.lock().entry((name, labels)).or_default() += 1;
    }

    fn observe(&self, name: &'static str, labels: String, buckets: &Buckets, value: f64) {
        self.histograms.lock().entry((name, labels)).or_default().observe(buckets, value);
    }

    /// A pod was tried in vain.
    pub fn attempted(&self, profile: &str, result: &str) {
        let labels = format!("profile=\"{profile}\",result=\"{result}\"");
        self.add("scheduler_schedule_attempts_total", labels);
    }

    /// How long all plugins of an extension point took, and what came of it: `Success`, `Unschedulable` or `Error`.
    pub fn ran(&self, profile: &str, (point, status, time): Ran) {
        let labels = format!("extension_point=\"{point}\",profile=\"{profile}\",status=\"{status}\"");
        let name = "scheduler_framework_extension_point_duration_seconds";
        self.observe(name, labels, &SHORT_SECONDS, time.as_secs_f64());
    }

    /// How things stand.
    pub fn look(&self, queue: &Queue, state: &State) {
        let cache = [state.order().len(), state.placed(), state.assumed()];
        *self.gauges.lock() = Gauges { pending: queue.lengths(), cache, queue: queue.tally.clone() };
    }

    /// Pods were asked to go.
    pub fn preempted(&self, victims: usize) {
        self.add("scheduler_preemption_attempts_total", String::new());
        self.observe("scheduler_preemption_victims", String::new(), &PODS, victims as f64);
    }

    /// How long the choice of a node took.
    pub fn chose(&self, seconds: f64) {
        self.observe("scheduler_scheduling_algorithm_duration_seconds", String::new(), &SECONDS, seconds);
    }

    /// A pod was bound.
    pub fn scheduled(&self, profile: &str, pod: &QueuedPod, begun: Timestamp, now: Timestamp) {
        self.attempted(profile, "scheduled");
        let seconds = |since: Timestamp| now.duration_since(since).as_secs_f64();
        let labels = format!("profile=\"{profile}\",result=\"scheduled\"");
        let name = "scheduler_scheduling_attempt_duration_seconds";
        self.observe(name, labels, &SECONDS, seconds(begun));
        let attempts = f64::from(pod.attempts);
        self.observe("scheduler_pod_scheduling_attempts", String::new(), &ATTEMPTS, attempts);
        if let Some(first) = pod.first_tried {
            let attempts = if pod.attempts >= 15 { "15+".to_owned() } else { pod.attempts.to_string() };
            let name = "scheduler_pod_scheduling_sli_duration_seconds";
            self.observe(name, format!("attempts=\"{attempts}\""), &LONG_SECONDS, seconds(first));
        }
        if pod.flushed {
            self.add("scheduler_pod_scheduled_after_flush_total", String::new());
        }
    }

    /// Appends everything in Prometheus' text form.
    pub fn write(&self, out: &mut String) {
        let mut last = "";
        for ((name, labels), value) in &*self.counters.lock() {
            if last != *name {
                begin(out, name, "counter");
                last = name;
            }
            let _ = writeln!(out, "{name}{} {value}", braced(labels));
        }
        for ((name, labels), histogram) in &*self.histograms.lock() {
            if last != *name {
                begin(out, name, "histogram");
                last = name;
            }
            let comma = if labels.is_empty() { "" } else { "," };
            let mut below = 0;
            for (bound, count) in histogram.bounds.iter().zip(&histogram.counts) {
                below += count;
                let _ = writeln!(out, "{name}_bucket{{{labels}{comma}le=\"{bound}\"}} {below}");
            }
            let _ = writeln!(out, "{name}_bucket{{{labels}{comma}le=\"+Inf\"}} {}", histogram.count);
            let _ = writeln!(out, "{name}_sum{} {}", braced(labels), histogram.sum);
            let _ = writeln!(out, "{name}_count{} {}", braced(labels), histogram.count);
        }
        self.write_gauges(out);
    }

    fn write_gauges(&self, out: &mut String) {
        let gauges = self.gauges.lock();
        let name = "scheduler_pending_pods";
        begin(out, name, "gauge");
        for (queue, count) in ["active", "backoff", "unschedulable", "gated"].iter().zip(gauges.pending) {
            let _ = writeln!(out, "{name}{{queue=\"{queue}\"}} {count}");
        }
        let name = "scheduler_cache_size";
        begin(out, name, "gauge");
        for (kind, count) in ["nodes", "pods", "assumed_pods"].iter().zip(gauges.cache) {
            let _ = writeln!(out, "{name}{{type=\"{kind}\"}} {count}");
        }
        let name = "scheduler_unschedulable_pods";
        begin(out, name, "gauge");
        for ((plugin, profile), count) in &gauges.queue.rejected {
            let _ = writeln!(out, "{name}{{plugin=\"{plugin}\",profile=\"{profile}\"}} {count}");
        }
        let name = "scheduler_queue_incoming_pods_total";
        begin(out, name, "counter");
        for ((queue, event), count) in &gauges.queue.incoming {
            let _ = writeln!(out, "{name}{{event=\"{event}\",queue=\"{queue}\"}} {count}");
        }
    }
}

/// Says what comes next.
fn begin(out: &mut String, name: &str, kind: &str) {
    if let Some((_, help)) = HELP.iter().find(|(known, _)| *known == name) {
        let _ = writeln!(out, "# HELP {name} {help}");
    }
    let _ = writeln!(out, "# TYPE {name} {kind}");
}

fn braced(labels: &str) -> String {
    if labels.is_empty() { String::new() } else { format!("{{{labels}}}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_counted_is_told() {
        let metrics = Metrics::default();
        metrics.attempted("default-scheduler", "unschedulable");
        metrics.chose(0.003);
        metrics.ran("default-scheduler", ("Filter", "Success", Duration::from_micros(150)));
        metrics.preempted(2);
        *metrics.gauges.lock() = Gauges {
            pending: [1, 2, 3, 4],
            cache: [5, 6, 7],
            queue: Tally {
                incoming: [(("active", "NodeAdd"), 8)].into(),
                rejected: [(("NodeName", "default-scheduler".into()), 9)].into(),
                ..Tally::default()
            },
        };
        let mut out = String::new();
        metrics.write(&mut out);
        for line in [
            "scheduler_schedule_attempts_total{profile=\"default-scheduler\",result=\"unschedulable\"} 1",
            "# TYPE scheduler_scheduling_algorithm_duration_seconds histogram",
            "scheduler_scheduling_algorithm_duration_seconds_bucket{le=\"0.002\"} 0",
            "scheduler_scheduling_algorithm_duration_seconds_bucket{le=\"0.004\"} 1",
            "scheduler_preemption_victims_count 1",
            "scheduler_framework_extension_point_duration_seconds_bucket{extension_point=\"Filter\",profile=\"default-scheduler\",status=\"Success\",le=\"0.0001\"} 0",
            "scheduler_framework_extension_point_duration_seconds_bucket{extension_point=\"Filter\",profile=\"default-scheduler\",status=\"Success\",le=\"0.0002\"} 1",
            "scheduler_pending_pods{queue=\"gated\"} 4",
            "scheduler_cache_size{type=\"assumed_pods\"} 7",
            "scheduler_queue_incoming_pods_total{event=\"NodeAdd\",queue=\"active\"} 8",
            "scheduler_unschedulable_pods{plugin=\"NodeName\",profile=\"default-scheduler\"} 9",
        ] {
            assert!(out.lines().any(|found| found == line), "{line}\n{out}");
        }
    }
}
