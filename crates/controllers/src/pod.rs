//! Helpers to read the status of pods, and their order of deletion.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodCondition, PodStatus};
use reconcile::Object as _;

/// The annotation with the deletion cost of a pod.
const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";

/// The phase, `""` if it is not set.
pub fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
}

/// The name of the pod's node, `""` if it is not scheduled.
pub fn node(pod: &Pod) -> &str {
    pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default()
}

pub fn condition<'a>(pod: &'a Pod, kind: &str) -> Option<&'a PodCondition> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == kind)
}

/// Whether the phase is `Succeeded` or `Failed`.
pub fn is_terminal(pod: &Pod) -> bool {
    matches!(phase(pod), "Succeeded" | "Failed")
}

/// Neither terminal nor being deleted.
pub fn is_active(pod: &Pod) -> bool {
    !is_terminal(pod) && !pod.is_deleting()
}

/// Being deleted and not terminal yet.
pub fn is_terminating(pod: &Pod) -> bool {
    !is_terminal(pod) && pod.is_deleting()
}

pub fn is_ready(pod: &Pod) -> bool {
    condition(pod, "Ready").is_some_and(|condition| condition.status == "True")
}

/// Since when the pod is ready. `None` if it is not ready or the time is not set.
pub fn ready_since(pod: &Pod) -> Option<Timestamp> {
    let ready = condition(pod, "Ready").filter(|condition| condition.status == "True")?;
    ready.last_transition_time.as_ref().map(|time| time.0)
}

/// Whether the pod has been ready for at least `min_ready_seconds`.
pub fn is_available(pod: &Pod, min_ready_seconds: i32, now: Timestamp) -> bool {
    is_ready(pod)
        && (min_ready_seconds == 0
            || available_at(pod, min_ready_seconds).is_some_and(|available| available <= now))
}

/// When a ready pod becomes or became available. `None` if it is not ready.
pub fn available_at(pod: &Pod, min_ready_seconds: i32) -> Option<Timestamp> {
    let pause = SignedDuration::from_secs(min_ready_seconds.into());
    ready_since(pod).map(|since| since.checked_add(pause).unwrap_or(Timestamp::MAX))
}

/// When the next one of these pods becomes available, if nothing changes.
pub fn next_available(pods: &[Arc<Pod>], min_ready_seconds: i32, now: Timestamp) -> Option<Timestamp> {
    let times = pods.iter().filter_map(|pod| available_at(pod, min_ready_seconds));
    times.filter(|time| *time > now).min()
}

/// Sorts pods so that the first ones are deleted first.
///
/// Order as upstream's `ActivePodsWithRanks`: unscheduled before scheduled; pending before unknown before
/// running; not ready before ready; lower deletion cost first; nodes with more active pods of `related`
/// first; ready for a shorter time, more restarts, created later. Times are compared by their logarithm, so
/// that pods of about the same age are ordered by UID, which is random.
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

/// The deletion cost in the annotation. 0 if it is missing or invalid by upstream's rules (no leading `+`
/// or zeros).
pub fn deletion_cost(pod: &Pod) -> i32 {
    let Some(text) = pod.annotation(DELETION_COST) else { return 0 };
    let has_valid_prefix =
        text == "0" || text.starts_with(|first: char| first == '-' || ('1'..='9').contains(&first));
    if has_valid_prefix { text.parse().unwrap_or(0) } else { 0 }
}

/// The binary logarithm of an age in nanoseconds. A missing time counts as youngest.
fn age_bucket(time: Option<Timestamp>, now: Timestamp) -> i64 {
    let Some(time) = time else { return -2 };
    match u128::try_from(now.duration_since(time).as_nanos()) {
        Ok(age) if age > 0 => age.ilog2().into(),
        _ => -1,
    }
}

/// The maximum restart count of a container, and of a sidecar.
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
