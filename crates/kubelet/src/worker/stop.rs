//! Stops containers: those of a pod concurrently, within their common grace period.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use k8s_openapi::api::core::v1::{Container, Pod, Probe};
use reconcile::{EventType, Object as _};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::Node;
use crate::pod::container as find;
use crate::pod::plan::{Stop, StopReason};
use crate::worker_state::PodWorkerState;

/// The time that each container has to stop, however long hooks and other containers have taken.
const MIN_GRACE_PERIOD: Duration = Duration::from_secs(2);
/// Delay after a failed stop.
const STOP_RETRY: Duration = Duration::from_secs(1);

/// Stops all containers. Those that could not be stopped are in the next plan again.
pub async fn stop_all(node: &Arc<Node>, pod: &Pod, stops: impl Iterator<Item = &Stop>) {
    let stop_order = StopOrder::default();
    let each = stops.map(|stop| async {
        let is_stopped = stop_one(node, pod, stop, &stop_order).await;
        stop_order.mark_stopped(&stop.id, is_stopped);
    });
    join_all(each).await;
}

async fn stop_one(node: &Arc<Node>, pod: &Pod, stop: &Stop, stop_order: &StopOrder) -> bool {
    let Stop { id, container, reason: why, after } = stop;
    let own = find(pod, container);
    let (grace, message) = node.with_pod_state(pod, |worker_state| {
        if *why == StopReason::Resized {
            worker_state.stopped_for_resize.insert(id.clone());
        }
        let started = worker_state.health.get(id).is_none_or(|health| health.started);
        (grace_period(pod, own.as_ref(), worker_state, started, *why), kill_message(container, started, *why))
    });
    crate::start_container::record_container_event(
        node,
        pod,
        container,
        EventType::Normal,
        "Killing",
        message,
    );
    let time = StopDeadline { started_at: Instant::now(), grace };
    let hook = own.as_ref().and_then(|own| own.lifecycle.as_ref()?.pre_stop.clone());
    if let Some((own, hook)) = own.as_ref().zip(hook.filter(|_| !grace.is_zero())) {
        let run = crate::hooks::run(node, pod, own, id, &hook);
        if let Ok(Err(error)) = tokio::time::timeout(grace, run).await {
            tracing::warn!(error, pod = %pod.key(), container, "pre-stop hook failed");
            let event_message = "PreStopHook failed".to_owned();
            crate::start_container::record_container_event(
                node,
                pod,
                container,
                EventType::Warning,
                "FailedPreStopHook",
                event_message,
            );
        }
    }
    if !stop_order.wait_for(after, time.remaining()).await {
        return false;
    }
    let stopped = node.runtime.stop_container(id, time.remaining().max(MIN_GRACE_PERIOD)).await;
    match &stopped {
        Ok(()) => drop(node.with_pod_state(pod, |worker_state| worker_state.health.remove(id))),
        Err(error) => {
            tracing::warn!(%error, pod = %pod.key(), container, "cannot stop a container");
            tokio::time::sleep(STOP_RETRY).await;
        }
    }
    stopped.is_ok()
}

/// The grace period of a container.
fn grace_period(
    pod: &Pod,
    own: Option<&Container>,
    worker_state: &PodWorkerState,
    started: bool,
    stop_reason: StopReason,
) -> Duration {
    let probe = own.and_then(|own| match started {
        true => own.liveness_probe.as_ref(),
        false => own.startup_probe.as_ref(),
    });
    let evicted =
        worker_state.termination_reason.as_ref().is_some_and(|(reason, _)| reason == crate::EVICTED_REASON);
    let grace = match stop_reason {
        // The shorter of both applies. An evicted pod has a second, because the node needs its
        // resources at once, unless a soft threshold has set another grace period.
        StopReason::PodTerminating => {
            let of_node = worker_state.grace_period_override.or(evicted.then_some(1));
            let of_deletion = pod.metadata.deletion_grace_period_seconds;
            of_node.into_iter().chain(of_deletion).min()
        }
        StopReason::Unhealthy => probe.and_then(|probe: &Probe| probe.termination_grace_period_seconds),
        StopReason::RestartAllContainers => Some(0),
        StopReason::SandboxLost | StopReason::SpecChanged | StopReason::Resized => None,
    };
    let of_pod = pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds);
    Duration::from_secs(u64::try_from(grace.or(of_pod).unwrap_or(30)).unwrap_or(0))
}

fn kill_message(container: &str, started: bool, reason: StopReason) -> String {
    match reason {
        StopReason::Unhealthy => {
            let kind = if started { "liveness" } else { "startup" };
            format!("Container {container} failed {kind} probe, will be restarted")
        }
        StopReason::SpecChanged => format!("Container {container} definition changed, will be restarted"),
        StopReason::Resized => format!("Container {container} resize requires restart"),
        StopReason::RestartAllContainers => "killing".to_owned(),
        _ => format!("Stopping container {container}"),
    }
}

/// The deadline of a stop.
struct StopDeadline {
    started_at: Instant,
    grace: Duration,
}

impl StopDeadline {
    /// What the hook and other containers have left of the grace period. Runtimes only support
    /// whole seconds, so the current one is not subtracted.
    fn remaining(&self) -> Duration {
        self.grace.saturating_sub(Duration::from_secs(self.started_at.elapsed().as_secs()))
    }
}

/// Which of the concurrently stopped containers have stopped, by container ID; `false` if the stop
/// failed.
#[derive(Default)]
struct StopOrder(watch::Sender<BTreeMap<String, bool>>);

impl StopOrder {
    fn mark_stopped(&self, id: &str, is_stopped: bool) {
        self.0.send_modify(|stop_order| {
            stop_order.insert(id.to_owned(), is_stopped);
        });
    }

    /// Waits for other containers to stop, at most for `time`. Returns `false` if one of them
    /// failed, which has to be stopped first in another attempt.
    async fn wait_for(&self, after: &[String], time: Duration) -> bool {
        let is_known = |stop_order: &BTreeMap<String, bool>| {
            let mut results = after.iter().map(|id| stop_order.get(id));
            results.clone().all(|stopped| stopped.is_some()) || results.any(|stopped| stopped == Some(&false))
        };
        let mut stop_order = self.0.subscribe();
        let _ = tokio::time::timeout(time, stop_order.wait_for(is_known)).await;
        let stop_order = stop_order.borrow();
        !after.iter().any(|id| stop_order.get(id) == Some(&false))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Containers that are stopped concurrently: name, which ones it waits for, how many seconds
    /// its stop takes (`None`: it fails at once), and when it is stopped and what is left of the
    /// ten seconds then.
    type StopCase = (&'static str, &'static [&'static str], Option<u64>, Option<(u64, u64)>);

    #[tokio::test(start_paused = true)]
    async fn sidecars_get_the_remaining_grace_period() {
        let check = async |containers: &[StopCase]| {
            let (stop_order, started_at) = (StopOrder::default(), Instant::now());
            let each = containers.iter().map(|(name, after, takes, expected)| {
                let stop_order = &stop_order;
                async move {
                    let time = StopDeadline { started_at, grace: Duration::from_secs(10) };
                    let after: Vec<String> = after.iter().map(|id| (*id).to_owned()).collect();
                    let may_go = stop_order.wait_for(&after, time.remaining()).await;
                    let found = may_go.then(|| {
                        (started_at.elapsed().as_secs(), time.remaining().max(MIN_GRACE_PERIOD).as_secs())
                    });
                    assert_eq!(found, *expected, "{name} of {containers:?}");
                    if may_go {
                        tokio::time::sleep(Duration::from_secs(takes.unwrap_or(0))).await;
                    }
                    stop_order.mark_stopped(name, may_go && takes.is_some());
                }
            });
            join_all(each).await;
        };
        let at_once = Some((0, 10));
        check(&[("a", &[], Some(10), at_once), ("b", &[], Some(10), at_once)]).await;
        check(&[
            ("d", &["e", "a", "b"], Some(1), Some((6, 4))),
            ("e", &["a", "b"], Some(2), Some((4, 6))),
            ("a", &[], Some(4), at_once),
            ("b", &[], Some(3), at_once),
        ])
        .await;
        // A container that takes all the time leaves the minimum to those that wait for it.
        check(&[("d", &["a"], Some(1), Some((10, 2))), ("a", &[], Some(11), at_once)]).await;
        // A container that could not be stopped is retried before its sidecar.
        check(&[("d", &["a", "b"], Some(1), None), ("a", &[], None, at_once), ("b", &[], Some(3), at_once)])
            .await;
    }

    #[test]
    fn grace_period_follows_the_stop_reason() {
        let check = |metadata: serde_json::Value,
                     worker_state: &PodWorkerState,
                     started: bool,
                     reason: StopReason,
                     expected: u64| {
            let probe = |seconds: i64| json!({"terminationGracePeriodSeconds": seconds});
            let own = json!({"name": "a", "livenessProbe": probe(5), "startupProbe": probe(6)});
            let spec = json!({"terminationGracePeriodSeconds": 20, "containers": [own]});
            let pod: Pod =
                serde_json::from_value(json!({"metadata": metadata, "spec": spec})).expect("a pod");
            let found = grace_period(&pod, find(&pod, "a").as_ref(), worker_state, started, reason);
            assert_eq!(found.as_secs(), expected, "{metadata} {started} {reason:?}");
        };
        let (none, deleted) = (PodWorkerState::default(), || json!({"deletionGracePeriodSeconds": 9}));
        check(json!({}), &none, true, StopReason::PodTerminating, 20);
        check(deleted(), &none, true, StopReason::PodTerminating, 9);
        check(json!({}), &none, true, StopReason::Unhealthy, 5);
        check(json!({}), &none, false, StopReason::Unhealthy, 6);
        check(json!({}), &none, true, StopReason::SandboxLost, 20);
        check(json!({}), &none, true, StopReason::RestartAllContainers, 0);
        let evicted = PodWorkerState {
            termination_reason: Some((crate::EVICTED_REASON.into(), String::new())),
            ..PodWorkerState::default()
        };
        check(json!({}), &evicted, true, StopReason::PodTerminating, 1);
        check(
            deleted(),
            &PodWorkerState { grace_period_override: Some(3), ..evicted },
            true,
            StopReason::PodTerminating,
            3,
        );
    }
}
