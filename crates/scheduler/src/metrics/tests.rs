use std::sync::Arc;

use super::*;
use crate::algorithm::NoExtenders;
use crate::config::Config;
use crate::engine::{Delta, Engine, Event};
use crate::framework::registry::IN_TREE_PLUGINS;
use crate::testing::{node, pod};

fn write_metrics(metrics: &Metrics) -> String {
    let mut out = String::new();
    metrics.write(&mut out);
    out
}

#[track_caller]
fn check(metrics: &Metrics, lines: &[&str]) {
    let out = write_metrics(metrics);
    for line in lines {
        assert!(out.lines().any(|found| found == *line), "{line}\n{out}");
    }
}

#[test]
fn writes_observed_metrics() {
    let metrics = Metrics::default();
    let profile: Arc<str> = "default-scheduler".into();
    metrics.observe_scheduling_algorithm(0.003);
    metrics.observe_extension_point(&profile, ("Filter", "Success", Duration::from_micros(150)));
    metrics.observe_plugin("NodeName", ("Filter", "Success", Duration::from_micros(16)));
    metrics.observe_queueing_hint("NodeName", "NodeAdd", true, Duration::from_micros(3));
    metrics.observe_event_handling("NodeAdd", Duration::from_micros(3));
    metrics.observe_permit_wait("Unschedulable", Duration::from_millis(3));
    metrics.observe_preemption(2);
    metrics.observe_victim_deletion(true, Duration::from_millis(3));
    check(
        &metrics,
        &[
            "# TYPE scheduler_scheduling_algorithm_duration_seconds histogram",
            "scheduler_scheduling_algorithm_duration_seconds_bucket{le=\"0.002\"} 0",
            "scheduler_scheduling_algorithm_duration_seconds_bucket{le=\"0.004\"} 1",
            "scheduler_preemption_victims_count 1",
            "scheduler_preemption_attempts_total 1",
            "scheduler_framework_extension_point_duration_seconds_bucket{extension_point=\"Filter\",profile=\"default-scheduler\",status=\"Success\",le=\"0.0001\"} 0",
            "scheduler_framework_extension_point_duration_seconds_bucket{extension_point=\"Filter\",profile=\"default-scheduler\",status=\"Success\",le=\"0.0002\"} 1",
            "scheduler_plugin_execution_duration_seconds_bucket{extension_point=\"Filter\",plugin=\"NodeName\",status=\"Success\",le=\"1e-05\"} 0",
            "scheduler_plugin_execution_duration_seconds_bucket{extension_point=\"Filter\",plugin=\"NodeName\",status=\"Success\",le=\"1.5000000000000002e-05\"} 0",
            "scheduler_plugin_execution_duration_seconds_bucket{extension_point=\"Filter\",plugin=\"NodeName\",status=\"Success\",le=\"2.2500000000000005e-05\"} 1",
            "scheduler_queueing_hint_execution_duration_seconds_count{event=\"NodeAdd\",hint=\"Queue\",plugin=\"NodeName\"} 1",
            "scheduler_event_handling_duration_seconds_count{event=\"NodeAdd\"} 1",
            "scheduler_permit_wait_duration_seconds_bucket{result=\"Unschedulable\",le=\"0.004\"} 1",
            "scheduler_preemption_goroutines_execution_total{result=\"success\"} 1",
        ],
    );
}

/// Three nodes, one of them unschedulable, with a pod that fits the other two and a pod that fits none.
#[test]
fn counts_plugin_evaluations() {
    let mut engine =
        Engine::new(&Config::with_defaults(), IN_TREE_PLUGINS, Arc::new(NoExtenders), 1).unwrap();
    let now = Timestamp::from_second(1_000_000).unwrap();
    for line in ["node a", "node b", "node c unschedulable"] {
        engine.handle(Event::Node(Delta { before: None, after: Some(Arc::new(node(line))) }), now);
    }
    for line in ["pod p cpu=1", "pod q cpu=99"] {
        engine.handle(Event::Pod(Delta { before: None, after: Some(Arc::new(pod(line))) }), now);
    }
    while engine.schedule_one(now) {}
    engine.update_metrics();
    let evaluation_line = |point: &str, plugin: &str, times: u32| {
        format!(
            "scheduler_plugin_evaluation_total{{extension_point=\"{point}\",plugin=\"{plugin}\",profile=\"default-scheduler\"}} {times}"
        )
    };
    check(
        &engine.metrics,
        &[
            &evaluation_line("PreFilter", "NodeResourcesFit", 2),
            // The first filter sees all three nodes, later ones only those that passed. Preemption does not
            // help the second pod.
            &evaluation_line("Filter", "NodeUnschedulable", 6),
            &evaluation_line("Filter", "NodeResourcesFit", 4),
            &evaluation_line("PreScore", "NodeResourcesFit", 1),
            &evaluation_line("Score", "NodeResourcesFit", 2),
            // The plugin returned Skip.
            &evaluation_line("PreFilter", "NodePorts", 0),
            &evaluation_line("Filter", "NodePorts", 0),
            "scheduler_schedule_attempts_total{profile=\"default-scheduler\",result=\"unschedulable\"} 1",
            "scheduler_scheduling_attempt_duration_seconds_count{profile=\"default-scheduler\",result=\"unschedulable\"} 1",
            "scheduler_pending_pods{queue=\"unschedulable\"} 1",
            "scheduler_cache_size{type=\"nodes\"} 3",
            "scheduler_cache_size{type=\"assumed_pods\"} 1",
            "scheduler_queue_incoming_pods_total{event=\"UnschedulablePodAdd\",queue=\"active\"} 2",
            "scheduler_unschedulable_pods{plugin=\"NodeResourcesFit\",profile=\"default-scheduler\"} 1",
            "scheduler_event_handling_duration_seconds_count{event=\"NodeAdd\"} 3",
            // The first attempt is sampled, and of its nodes only the first.
            "scheduler_plugin_execution_duration_seconds_count{extension_point=\"PreFilter\",plugin=\"NodePorts\",status=\"Skip\"} 1",
            "scheduler_plugin_execution_duration_seconds_count{extension_point=\"PreFilter\",plugin=\"NodeResourcesFit\",status=\"Success\"} 1",
            "scheduler_plugin_execution_duration_seconds_count{extension_point=\"Filter\",plugin=\"NodeResourcesFit\",status=\"Success\"} 1",
            "scheduler_plugin_execution_duration_seconds_count{extension_point=\"Score\",plugin=\"NodeResourcesFit\",status=\"Success\"} 1",
            "scheduler_plugin_execution_duration_seconds_count{extension_point=\"Reserve\",plugin=\"VolumeBinding\",status=\"Success\"} 1",
        ],
    );
}
