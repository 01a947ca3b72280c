//! What controllers ask about pods: phase, readiness, availability, and which one to miss least.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodCondition, PodStatus};
use reconcile::Object as _;

/// The annotation that says how dear a pod is to its set.
const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";

/// `""` where the status does not say.
pub fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
}

/// The node the pod is on, `""` while there is none.
pub fn node(pod: &Pod) -> &str {
    pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default()
}

pub fn condition<'a>(pod: &'a Pod, kind: &str) -> Option<&'a PodCondition> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == kind)
}

/// Succeeded or failed: nothing of it will run again.
pub fn is_terminal(pod: &Pod) -> bool {
    matches!(phase(pod), "Succeeded" | "Failed")
}

/// Neither over nor going away.
pub fn is_active(pod: &Pod) -> bool {
    !is_terminal(pod) && !pod.is_deleting()
}

/// Going away and not yet over.
pub fn is_terminating(pod: &Pod) -> bool {
    !is_terminal(pod) && pod.is_deleting()
}

pub fn is_ready(pod: &Pod) -> bool {
    condition(pod, "Ready").is_some_and(|condition| condition.status == "True")
}

/// Since when the pod is ready; `None` where it is not or does not say.
pub fn ready_since(pod: &Pod) -> Option<Timestamp> {
    let ready = condition(pod, "Ready").filter(|condition| condition.status == "True")?;
    ready.last_transition_time.as_ref().map(|time| time.0)
}

/// Ready for at least this long.
pub fn is_available(pod: &Pod, min_ready_seconds: i32, now: Timestamp) -> bool {
    is_ready(pod)
        && (min_ready_seconds == 0
            || available_at(pod, min_ready_seconds).is_some_and(|available| available <= now))
}

/// When a ready pod becomes, or became, available; `None` where it is not ready.
pub fn available_at(pod: &Pod, min_ready_seconds: i32) -> Option<Timestamp> {
    let pause = SignedDuration::from_secs(min_ready_seconds.into());
    ready_since(pod).map(|since| since.checked_add(pause).unwrap_or(Timestamp::MAX))
}

/// When the first of these pods becomes available without anything else happening.
pub fn next_available(pods: &[Arc<Pod>], min_ready_seconds: i32, now: Timestamp) -> Option<Timestamp> {
    let times = pods.iter().filter_map(|pod| available_at(pod, min_ready_seconds));
    times.filter(|time| *time > now).min()
}

/// Sorts pods so that the one to delete first comes first.
///
/// Upstream's rules: not on a node before on one; pending before unknown before running; not ready before
/// ready; cheap before dear; on a node with more active pods of `related` before on one with fewer; ready for
/// a shorter time, restarted more often, created later. Times count by orders of magnitude, so that pods of
/// about the same age go in an order that tells nothing (their uids).
pub fn sort_for_deletion(pods: &mut [Arc<Pod>], related: &[Arc<Pod>], now: Timestamp) {
    let mut active_on_node: HashMap<&str, usize> = HashMap::new();
    for pod in related.iter().filter(|pod| is_active(pod)) {
        *active_on_node.entry(node(pod)).or_default() += 1;
    }
    pods.sort_by_cached_key(|pod| {
        let phase = match phase(pod) {
            "Running" => 2,
            "Unknown" => 1,
            _ => 0,
        };
        let ready = is_ready(pod);
        let ready_for = ready.then(|| age_bucket(ready_since(pod), now));
        let created = pod.metadata.creation_timestamp.as_ref().map(|time| time.0);
        let rank = Reverse(active_on_node.get(node(pod)).copied().unwrap_or(0));
        let (restarts, sidecar_restarts) = restarts(pod);
        (
            (!node(pod).is_empty(), phase, ready, deletion_cost(pod)),
            (rank, ready_for, Reverse(restarts), Reverse(sidecar_restarts), age_bucket(created, now)),
            pod.uid().to_owned(),
        )
    });
}

/// The cost a pod's annotation states; 0 without one and for what is no number as upstream takes it.
pub fn deletion_cost(pod: &Pod) -> i32 {
    let Some(text) = pod.annotation(DELETION_COST) else { return 0 };
    let has_valid_prefix =
        text == "0" || text.starts_with(|first: char| first == '-' || ('1'..='9').contains(&first));
    if has_valid_prefix { text.parse().unwrap_or(0) } else { 0 }
}

/// The order of magnitude of an age; no time at all is younger than any.
fn age_bucket(time: Option<Timestamp>, now: Timestamp) -> i64 {
    let Some(time) = time else { return -2 };
    match u128::try_from(now.duration_since(time).as_nanos()) {
        Ok(age) if age > 0 => age.ilog2().into(),
        _ => -1,
    }
}

/// The most restarts of one container, and of one sidecar.
fn restarts(pod: &Pod) -> (i32, i32) {
    let Some(status) = &pod.status else { return (0, 0) };
    let max_restarts = |statuses: &Option<Vec<ContainerStatus>>, counts: &dyn Fn(&str) -> bool| {
        let statuses = statuses.iter().flatten().filter(|status| counts(&status.name));
        statuses.map(|status| status.restart_count).max().unwrap_or(0)
    };
    let init = pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten());
    let sidecars: Vec<&str> = init
        .filter(|container| container.restart_policy.as_deref() == Some("Always"))
        .map(|container| container.name.as_str())
        .collect();
    let PodStatus { container_statuses, init_container_statuses, .. } = status;
    (
        max_restarts(container_statuses, &|_| true),
        max_restarts(init_container_statuses, &|name| sidecars.contains(&name)),
    )
}

#[cfg(test)]
mod tests;
