//! What is counted, under upstream's names, with its labels and bounds.

use super::series::{Buckets, Metric, MetricKind};

const fn exponential_buckets(first: f64, count: usize) -> MetricKind {
    MetricKind::Histogram(Buckets { first, factor: 2.0, count })
}

/// Fine enough for what takes microseconds.
const SHORT_DURATION_BUCKETS: MetricKind =
    MetricKind::Histogram(Buckets { first: 0.00001, factor: 1.5, count: 20 });

macro_rules! metrics {
    ($($id:ident: $name:literal, $kind:expr, [$($label:literal),*], $help:literal;)*) => {
        $(pub static $id: Metric = Metric {
            name: concat!("scheduler_", $name),
            kind: $kind,
            labels: &[$($label),*],
            help: $help,
        };)*
    };
}

metrics! {
    ATTEMPTS: "schedule_attempts_total", MetricKind::Counter, ["profile", "result"],
        "Attempts to schedule pods, by result.";
    ATTEMPT_SECONDS: "scheduling_attempt_duration_seconds", exponential_buckets(0.001, 15), ["profile", "result"],
        "Time of an attempt, the binding included.";
    ALGORITHM_SECONDS: "scheduling_algorithm_duration_seconds", exponential_buckets(0.001, 15), [],
        "Time to choose a node.";
    EVENT_SECONDS: "event_handling_duration_seconds", exponential_buckets(0.0001, 12), ["event"],
        "Time to take note of a change.";
    VICTIMS: "preemption_victims", exponential_buckets(1.0, 7), [],
        "Pods that had to go for another.";
    PREEMPTIONS: "preemption_attempts_total", MetricKind::Counter, [],
        "Attempts to make room.";
    PREEMPTION_SECONDS: "preemption_goroutines_duration_seconds", exponential_buckets(0.01, 20), ["result"],
        "Time to remove the pods that had to go.";
    PREEMPTION_RUNS: "preemption_goroutines_execution_total", MetricKind::Counter, ["result"],
        "How often pods that had to go were removed.";
    PENDING: "pending_pods", MetricKind::Gauge, ["queue"],
        "Pods that wait, by queue.";
    TASKS: "goroutines", MetricKind::Gauge, ["operation"],
        "Tasks that run beside the choice of nodes.";
    SLI_SECONDS: "pod_scheduling_sli_duration_seconds", exponential_buckets(0.01, 20), ["attempts"],
        "Time until a pod had its node, over all attempts.";
    POD_ATTEMPTS: "pod_scheduling_attempts", exponential_buckets(1.0, 5), [],
        "Attempts until a pod had its node.";
    AFTER_FLUSH: "pod_scheduled_after_flush_total", MetricKind::Counter, [],
        "Pods that got a node when they were tried again only because of the time.";
    POINT_SECONDS: "framework_extension_point_duration_seconds", exponential_buckets(0.0001, 12),
        ["extension_point", "profile", "status"],
        "Time that all plugins of an extension point took.";
    PLUGIN_SECONDS: "plugin_execution_duration_seconds", SHORT_DURATION_BUCKETS, ["extension_point", "plugin", "status"],
        "Time that one plugin took at an extension point, in one attempt of ten.";
    PLUGIN_EVALUATIONS: "plugin_evaluation_total", MetricKind::Counter, ["extension_point", "plugin", "profile"],
        "How often a plugin was asked at an extension point.";
    HINT_SECONDS: "queueing_hint_execution_duration_seconds", SHORT_DURATION_BUCKETS, ["event", "hint", "plugin"],
        "Time that a plugin took to say whether a change helps a pod, one time of ten.";
    INCOMING: "queue_incoming_pods_total", MetricKind::Counter, ["event", "queue"],
        "Pods that came to a queue, by what brought them there.";
    PERMIT_SECONDS: "permit_wait_duration_seconds", exponential_buckets(0.001, 15), ["result"],
        "Time that pods were held back before they were bound.";
    CLAIM_CREATES: "resourceclaim_creates_total", MetricKind::Counter, ["status"],
        "Resource claims made for extended resources.";
    CACHE: "cache_size", MetricKind::Gauge, ["type"],
        "What the scheduler knows of, by type.";
    REJECTED: "unschedulable_pods", MetricKind::Gauge, ["plugin", "profile"],
        "Waiting pods by the plugins that turned them away.";
}
