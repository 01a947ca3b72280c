//! The cells of pods: the `STATUS` summary and restart counts.

use jiff::Timestamp;
use serde_json::Value;

use super::row::AgeText;
use super::text::{is_condition_true, is_deleting, or_default, timestamp};
use crate::json::JsonExt;

pub fn ready(pod: &Value) -> String {
    let summary = PodSummary::from_pod(pod);
    format!("{}/{}", summary.ready, summary.total)
}

pub fn status(pod: &Value) -> String {
    let status = pod.at("status");
    if is_deleting(pod) {
        // The node of the pod is unreachable, so the state of the pod is unknown.
        if status.text("reason") == "NodeLost" {
            return "Unknown".to_owned();
        }
        if !matches!(status.text("phase"), "Succeeded" | "Failed") {
            return "Terminating".to_owned();
        }
    }
    PodSummary::from_pod(pod).reason
}

pub fn restarts(pod: &Value) -> AgeText {
    let RestartCount { count, last } = PodSummary::from_pod(pod).restarts;
    match last {
        Some(_) if count != 0 => AgeText { prefix: format!("{count} ("), since: last, suffix: " ago)" },
        _ => count.to_string().into(),
    }
}

pub fn ip(pod: &Value) -> String {
    let status = pod.at("status");
    let first = status.items("podIPs").first().map_or("", |ip| ip.text("ip"));
    or_default(if first.is_empty() { status.text("podIP") } else { first }.to_owned(), "<none>")
}

pub fn readiness_gates(pod: &Value) -> String {
    let gates = pod.at("spec").items("readinessGates");
    if gates.is_empty() {
        return "<none>".to_owned();
    }
    let ready_count = gates.iter().filter(|gate| is_condition_true(pod, gate.text("conditionType"))).count();
    format!("{ready_count}/{}", gates.len())
}

struct PodSummary {
    ready: usize,
    total: usize,
    reason: String,
    restarts: RestartCount,
}

impl PodSummary {
    fn from_pod(pod: &Value) -> PodSummary {
        let (spec, status) = (pod.at("spec"), pod.at("status"));
        let sidecars = spec.items("initContainers").iter().filter(|container| is_sidecar(container)).count();
        let mut summary = PodSummary {
            ready: 0,
            total: spec.items("containers").len() + sidecars,
            reason: pod_reason(status),
            restarts: RestartCount::default(),
        };
        let sidecar_restarts = summary.add_init_containers(spec, status);
        if let Some(restarts) = sidecar_restarts {
            summary.restarts = restarts;
            summary.add_containers(pod, status);
        }
        summary
    }
}

impl PodSummary {
    /// Stops at the first init container that is not done. Once the pod is initialized, only the
    /// restarts of its sidecars count; these are returned.
    fn add_init_containers(&mut self, spec: &Value, status: &Value) -> Option<RestartCount> {
        let mut sidecar_restarts = RestartCount::default();
        let mut waiting = false;
        for (i, container) in status.items("initContainerStatuses").iter().enumerate() {
            let name = container.text("name");
            let own = spec.items("initContainers").iter().rfind(|own| own.text("name") == name);
            let sidecar = own.is_some_and(is_sidecar);
            self.restarts.add(container);
            if sidecar {
                sidecar_restarts.add(container);
            }
            let terminated = container.path("state.terminated");
            if !terminated.is_null() && terminated.int("exitCode").unwrap_or(0) == 0 {
                continue;
            }
            if sidecar && container.flag("started") {
                self.ready += usize::from(container.flag("ready"));
                continue;
            }
            let waiting_reason = container.path("state.waiting").text("reason");
            self.reason = if !terminated.is_null() {
                format!("Init:{}", termination_reason(terminated))
            } else if !waiting_reason.is_empty() && waiting_reason != "PodInitializing" {
                format!("Init:{waiting_reason}")
            } else {
                format!("Init:{i}/{}", spec.items("initContainers").len())
            };
            waiting = true;
            break;
        }
        let initialized = status
            .items("conditions")
            .iter()
            .find(|condition| condition.text("type") == "Initialized")
            .is_some_and(|condition| condition.text("status") == "True");
        (!waiting || initialized).then_some(sidecar_restarts)
    }

    fn add_containers(&mut self, pod: &Value, status: &Value) {
        let mut running = false;
        let mut failure = None;
        // In reverse order, so that the first container determines the reason.
        for container in status.items("containerStatuses").iter().rev() {
            self.restarts.add(container);
            let state = container.at("state");
            let waiting_reason = state.at("waiting").text("reason");
            if !waiting_reason.is_empty() {
                self.reason = waiting_reason.to_owned();
            } else if state.has("terminated") {
                let terminated = state.at("terminated");
                self.reason = termination_reason(terminated);
                if terminated.int("exitCode").unwrap_or(0) != 0 {
                    failure = Some(self.reason.clone());
                }
            } else if container.flag("ready") && state.has("running") {
                running = true;
                self.ready += 1;
            }
        }
        if self.reason == "Completed" {
            if running && is_condition_true(pod, "Ready") {
                self.reason = "Running".to_owned();
            } else if let Some(failure) = failure {
                self.reason = failure;
            } else if running {
                self.reason = "NotReady".to_owned();
            }
        }
    }
}

/// The number of restarts, and the finish time of the latest terminated container.
#[derive(Default)]
struct RestartCount {
    count: i64,
    last: Option<Timestamp>,
}

impl RestartCount {
    fn add(&mut self, container: &Value) {
        self.count = self.count.saturating_add(container.int("restartCount").unwrap_or(0));
        self.last = self.last.max(timestamp(container.path("lastState.terminated.finishedAt")));
    }
}

fn is_sidecar(container: &Value) -> bool {
    container.text("restartPolicy") == "Always"
}

fn pod_reason(status: &Value) -> String {
    let gated = status.items("conditions").iter().any(|condition| {
        condition.text("type") == "PodScheduled" && condition.text("reason") == "SchedulingGated"
    });
    let reason = status.text("reason");
    let word = if gated {
        "SchedulingGated"
    } else if reason.is_empty() {
        status.text("phase")
    } else {
        reason
    };
    word.to_owned()
}

fn termination_reason(terminated: &Value) -> String {
    let signal = terminated.int("signal").unwrap_or(0);
    match terminated.text("reason") {
        "" if signal != 0 => format!("Signal:{signal}"),
        "" => format!("ExitCode:{}", terminated.int("exitCode").unwrap_or(0)),
        reason => reason.to_owned(),
    }
}
