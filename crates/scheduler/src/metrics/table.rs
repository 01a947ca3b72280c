//! Definitions of the metrics: upstream's names, labels and buckets.

use super::series::{Buckets, Metric, MetricKind};

const fn exponential_buckets(first: f64, count: usize) -> MetricKind {
    MetricKind::Histogram(Buckets { first, factor: 2.0, count })
}

/// Buckets for durations in the range of microseconds.
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
        "Number of attempts to schedule pods, by the result. 'unschedulable' means a pod could not be scheduled, while 'error' means an internal scheduler problem.";
    ATTEMPT_SECONDS: "scheduling_attempt_duration_seconds", exponential_buckets(0.001, 15), ["profile", "result"],
        "Scheduling attempt latency in seconds (scheduling algorithm + binding)";
    ALGORITHM_SECONDS: "scheduling_algorithm_duration_seconds", exponential_buckets(0.001, 15), [],
        "Scheduling algorithm latency in seconds";
    EVENT_SECONDS: "event_handling_duration_seconds", exponential_buckets(0.0001, 12), ["event"],
        "Event handling latency in seconds.";
    VICTIMS: "preemption_victims", exponential_buckets(1.0, 7), [],
        "Number of selected preemption victims";
    PREEMPTIONS: "preemption_attempts_total", MetricKind::Counter, [],
        "Total preemption attempts in the cluster till now";
    PREEMPTION_SECONDS: "preemption_goroutines_duration_seconds", exponential_buckets(0.01, 20), ["result"],
        "Duration in seconds for running goroutines for the preemption.";
    PREEMPTION_RUNS: "preemption_goroutines_execution_total", MetricKind::Counter, ["result"],
        "Number of preemption goroutines executed.";
    PENDING: "pending_pods", MetricKind::Gauge, ["queue"],
        "Number of pending pods, by the queue type. 'active' means number of pods in activeQ; 'backoff' means number of pods in backoffQ; 'unschedulable' means number of pods in unschedulablePods that the scheduler attempted to schedule and failed; 'gated' is the number of unschedulable pods that the scheduler never attempted to schedule because they are gated.";
    TASKS: "goroutines", MetricKind::Gauge, ["operation"],
        "Number of running goroutines split by the work they do such as binding.";
    SLI_SECONDS: "pod_scheduling_sli_duration_seconds", exponential_buckets(0.01, 20), ["attempts"],
        "E2e latency for a pod being scheduled, from the time the pod enters the scheduling queue and might involve multiple scheduling attempts.";
    POD_ATTEMPTS: "pod_scheduling_attempts", exponential_buckets(1.0, 5), [],
        "Number of attempts to successfully schedule a pod.";
    AFTER_FLUSH: "pod_scheduled_after_flush_total", MetricKind::Counter, [],
        "Number of pods that were successfully scheduled after being flushed from unschedulablePods due to timeout.";
    POINT_SECONDS: "framework_extension_point_duration_seconds", exponential_buckets(0.0001, 12),
        ["extension_point", "profile", "status"],
        "Latency for running all plugins of a specific extension point.";
    PLUGIN_SECONDS: "plugin_execution_duration_seconds", SHORT_DURATION_BUCKETS, ["extension_point", "plugin", "status"],
        "Duration for running a plugin at a specific extension point.";
    PLUGIN_EVALUATIONS: "plugin_evaluation_total", MetricKind::Counter, ["extension_point", "plugin", "profile"],
        "Number of attempts to schedule pods by each plugin and the extension point (available only in PreFilter, Filter, PreScore, and Score).";
    HINT_SECONDS: "queueing_hint_execution_duration_seconds", SHORT_DURATION_BUCKETS, ["event", "hint", "plugin"],
        "Latency for running a queueing hint function of a plugin.";
    INCOMING: "queue_incoming_pods_total", MetricKind::Counter, ["event", "queue"],
        "Number of pods added to scheduling queues by event and queue type.";
    PERMIT_SECONDS: "permit_wait_duration_seconds", exponential_buckets(0.001, 15), ["result"],
        "Duration of waiting on permit.";
    CLAIM_CREATES: "resourceclaim_creates_total", MetricKind::Counter, ["status"],
        "Number of ResourceClaims creation requests within scheduler";
    CACHE: "cache_size", MetricKind::Gauge, ["type"],
        "Number of nodes, pods, and assumed (bound) pods in the scheduler cache.";
    REJECTED: "unschedulable_pods", MetricKind::Gauge, ["plugin", "profile"],
        "The number of unschedulable pods broken down by plugin name. A pod will increment the gauge for all plugins that caused it to not schedule and so this metric have meaning only when broken down by plugin.";
}
