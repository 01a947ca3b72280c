//! What the scheduler counts, under upstream's names, as Prometheus reads it.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use jiff::Timestamp;
use parking_lot::Mutex;

use crate::queue::QueuedPod;

/// Counters and histograms by name and labels.
#[derive(Default)]
pub struct Metrics {
    counters: Mutex<BTreeMap<(&'static str, String), u64>>,
    histograms: Mutex<BTreeMap<(&'static str, String), Histogram>>,
    /// How many pods wait, as the queue counted last: active, backing off, unschedulable, gated.
    pub pending: Mutex<[usize; 4]>,
}

/// Upper bounds of a histogram: a first one, doubled so many times less one.
struct Buckets {
    first: f64,
    count: u32,
}

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

    /// A plugin turned a pod away.
    pub fn rejected(&self, plugin: &str, profile: &str) {
        let labels = format!("plugin=\"{plugin}\",profile=\"{profile}\"");
        self.add("scheduler_unschedulable_pods", labels);
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
    }

    /// Appends everything in Prometheus' text form.
    pub fn write(&self, out: &mut String) {
        let mut last = "";
        for ((name, labels), value) in &*self.counters.lock() {
            if last != *name {
                let _ = writeln!(out, "# TYPE {name} counter");
                last = name;
            }
            let _ = writeln!(out, "{name}{} {value}", braced(labels));
        }
        for ((name, labels), histogram) in &*self.histograms.lock() {
            if last != *name {
                let _ = writeln!(out, "# TYPE {name} histogram");
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
        let _ = writeln!(out, "# TYPE scheduler_pending_pods gauge");
        for (queue, count) in ["active", "backoff", "unschedulable", "gated"].iter().zip(*self.pending.lock())
        {
            let _ = writeln!(out, "scheduler_pending_pods{{queue=\"{queue}\"}} {count}");
        }
    }
}

fn braced(labels: &str) -> String {
    if labels.is_empty() { String::new() } else { format!("{{{labels}}}") }
}
