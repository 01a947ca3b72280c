//! Decides which pods are orphaned. Does no I/O.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Node, Pod};
use reconcile::Object;

use crate::{node, pod};

/// How long a pod's node must be missing before the pod is deleted.
const NODE_QUARANTINE: SignedDuration = SignedDuration::from_secs(40);
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

#[derive(Debug, PartialEq)]
pub enum Action {
    Nothing,
    /// Delete the pod at once, because no kubelet will terminate it.
    Delete,
    /// Delete the pod at once, if a live read confirms that its node does not exist.
    DeleteWithNode,
    RecheckAt(Timestamp),
}

/// Decides on a pod. `node` is the pod's node; if it does not exist, `missing_since` is when that was first
/// noticed.
pub fn plan(pod: &Pod, node: Option<&Node>, missing_since: Timestamp, now: Timestamp) -> Action {
    let is_deleting = pod.is_deleting();
    match node {
        _ if pod::node(pod).is_empty() => {
            if is_deleting {
                Action::Delete
            } else {
                Action::Nothing
            }
        }
        Some(node) => {
            let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_deref()).unwrap_or_default();
            let out_of_service = taints.iter().any(|taint| taint.key == OUT_OF_SERVICE);
            let lost = is_deleting && out_of_service && !node::is_ready(node);
            if lost { Action::Delete } else { Action::Nothing }
        }
        None => match missing_since.checked_add(NODE_QUARANTINE).unwrap_or(now) {
            end if end > now => Action::RecheckAt(end),
            _ => Action::DeleteWithNode,
        },
    }
}

/// Terminated pods above the threshold, evicted ones first, then the oldest.
pub fn terminated_over_threshold(pods: &[Arc<Pod>], threshold: usize) -> Vec<Arc<Pod>> {
    let mut terminated: Vec<&Arc<Pod>> = pods.iter().filter(|pod| pod::is_terminal(pod)).collect();
    let surplus = terminated.len().saturating_sub(threshold);
    if surplus == 0 {
        return Vec::new();
    }
    let evicted = |pod: &Pod| {
        let reason = pod.status.as_ref().and_then(|status| status.reason.as_deref());
        pod::phase(pod) == "Failed" && reason == Some("Evicted")
    };
    terminated.sort_by_key(|pod| {
        let created = pod.metadata.creation_timestamp.as_ref().map(|time| time.0);
        (!evicted(pod), created, pod.name().to_owned())
    });
    terminated.into_iter().take(surplus).cloned().collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn check(pod: &str, node: Option<&str>, missing_since: i64, expected: &str) {
        let mut value = json!({"metadata": {"name": "p"}, "spec": {"containers": []}});
        for word in pod.split_whitespace() {
            match word {
                "deleted" => value["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z"),
                _ => value["spec"]["nodeName"] = json!("n"),
            }
        }
        let pod: Pod = serde_json::from_value(value).expect("a pod");
        let node: Option<Node> = node.map(|words| {
            let ready = if words.contains("unready") { "False" } else { "True" };
            let taints = if words.contains("out") { json!([{"key": OUT_OF_SERVICE, "effect": "NoExecute"}]) } else { json!([]) };
            serde_json::from_value(json!({"metadata": {"name": "n"}, "spec": {"taints": taints}, "status": {"conditions": [{"type": "Ready", "status": ready}]}})).expect("a node")
        });
        let now = Timestamp::from_second(1000).expect("a time");
        let missing_since = Timestamp::from_second(1000 - missing_since).expect("a time");
        let found = match plan(&pod, node.as_ref(), missing_since, now) {
            Action::Nothing => "nothing".to_owned(),
            Action::Delete => "delete".to_owned(),
            Action::DeleteWithNode => "delete with node".to_owned(),
            Action::RecheckAt(at) => format!("in {}", at.as_second() - 1000),
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn deletes_orphaned_and_out_of_service_pods() {
        check("", None, 100, "nothing");
        check("deleted", None, 0, "delete");
        check("bound", Some("ready"), 0, "nothing");
        check("bound deleted", Some("unready"), 0, "nothing");
        check("bound deleted", Some("ready out"), 0, "nothing");
        check("bound", Some("unready out"), 0, "nothing");
        check("bound deleted", Some("unready out"), 0, "delete");
        check("bound", None, 0, "in 40");
        check("bound", None, 39, "in 1");
        check("bound", None, 40, "delete with node");
    }

    #[test]
    fn deletes_evicted_then_oldest_terminated_pods() {
        let pod = |name: &str, phase: &str, second: i64, reason: &str| {
            let created = Timestamp::from_second(second).expect("a time").to_string();
            let value = json!({"metadata": {"name": name, "creationTimestamp": created}, "status": {"phase": phase, "reason": reason}});
            Arc::new(serde_json::from_value::<Pod>(value).expect("a pod"))
        };
        let pods = [
            pod("a", "Succeeded", 3, ""),
            pod("b", "Failed", 2, ""),
            pod("c", "Running", 1, ""),
            pod("d", "Failed", 9, "Evicted"),
        ];
        let names = |threshold: usize| {
            terminated_over_threshold(&pods, threshold)
                .iter()
                .map(|pod| pod.name().to_owned())
                .collect::<Vec<_>>()
                .join(",")
        };
        assert_eq!([names(3), names(2), names(1), names(0)].join(" "), " d d,b d,b,a");
    }

    proptest! {
        /// Only terminated pods are deleted, exactly as many as exceed the threshold.
        #[test]
        fn deletes_only_terminated_pods_over_threshold(phases in prop::collection::vec(0..4usize, 0..20), threshold in 0..10usize) {
            let pod = |(i, phase): (usize, &usize)| {
                let phase = ["Pending", "Running", "Succeeded", "Failed"][*phase];
                let value = json!({"metadata": {"name": format!("p{i}")}, "status": {"phase": phase}});
                Arc::new(serde_json::from_value::<Pod>(value).expect("a pod"))
            };
            let mut pods: Vec<_> = phases.iter().enumerate().map(pod).collect();
            let deleted = terminated_over_threshold(&pods, threshold);
            prop_assert!(deleted.iter().all(|pod| pod::is_terminal(pod)));
            pods.retain(|pod| deleted.iter().all(|deleted| deleted.name() != pod.name()));
            let terminated = pods.iter().filter(|pod| pod::is_terminal(pod)).count();
            prop_assert!(terminated <= threshold && (deleted.is_empty() || terminated == threshold));
            prop_assert!(terminated_over_threshold(&pods, threshold).is_empty());
        }
    }
}
