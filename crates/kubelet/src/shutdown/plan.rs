//! The order in which pods are terminated in a node shutdown, and their grace periods. Pure.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;

/// The priority of critical pods (`system-cluster-critical`).
const CRITICAL_PRIORITY: i32 = 2_000_000_000;

/// The grace period of pods from a priority on; upstream's `shutdownGracePeriodByPodPriority`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PriorityGracePeriod {
    pub priority: i32,
    pub seconds: i64,
}

/// The periods for a total grace period and the part of it that is for critical pods.
pub fn periods(all: i64, critical: i64) -> Vec<PriorityGracePeriod> {
    if all <= 0 || critical > all || critical < 0 {
        return Vec::new();
    }
    vec![
        PriorityGracePeriod { priority: 0, seconds: all - critical },
        PriorityGracePeriod { priority: CRITICAL_PRIORITY, seconds: critical },
    ]
}

/// Pods that are terminated together.
#[derive(Debug)]
pub struct ShutdownGroup {
    /// The grace period of the whole group.
    pub seconds: i64,
    /// Each pod with its own grace period.
    pub pods: Vec<(Arc<Pod>, i64)>,
}

/// The groups in order, lowest priority first. Groups without pods are omitted.
pub fn shutdown_groups(periods: &[PriorityGracePeriod], pods: &[Arc<Pod>]) -> Vec<ShutdownGroup> {
    let mut periods = periods.to_vec();
    periods.sort_by_key(|period| period.priority);
    let mut groups: Vec<ShutdownGroup> =
        periods.iter().map(|period| ShutdownGroup { seconds: period.seconds, pods: Vec::new() }).collect();
    for pod in pods {
        let spec = pod.spec.as_ref();
        let priority = spec.and_then(|spec| spec.priority).unwrap_or(0);
        // The last period that begins at or below the priority, or else the first.
        let at = periods.iter().rposition(|period| period.priority <= priority).unwrap_or(0);
        let Some(group) = groups.get_mut(at) else { continue };
        let own = spec.and_then(|spec| spec.termination_grace_period_seconds).unwrap_or(30);
        group.pods.push((pod.clone(), own.min(group.seconds)));
    }
    groups.retain(|group| !group.pods.is_empty());
    groups
}

#[cfg(test)]
mod tests {
    use reconcile::Object as _;
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn check(periods: &[PriorityGracePeriod], pods: &[(&str, i32, i64)], expected: &str) {
        let pods: Vec<Arc<Pod>> = pods
            .iter()
            .map(|(name, priority, grace)| {
                let spec =
                    json!({"containers": [], "priority": priority, "terminationGracePeriodSeconds": grace});
                let pod = json!({"metadata": {"name": name}, "spec": spec});
                Arc::new(serde_json::from_value(pod).expect("a pod"))
            })
            .collect();
        let groups = shutdown_groups(periods, &pods).into_iter().map(|group| {
            let pods: Vec<String> =
                group.pods.iter().map(|(pod, seconds)| format!("{} {seconds}s", pod.name())).collect();
            format!("within {}s: {}", group.seconds, pods.join(", "))
        });
        assert_eq!(groups.collect::<Vec<_>>().join("; "), expected);
    }

    #[test]
    fn low_priority_pods_terminate_first() {
        let two = periods(30, 10);
        check(
            &two,
            &[("dns", 2_000_000_000, 30), ("web", 0, 5), ("db", 1000, 300), ("batch", -5, 1)],
            "within 20s: web 5s, db 20s, batch 1s; within 10s: dns 10s",
        );
        check(&two, &[("dns", 2_000_001_000, 3)], "within 10s: dns 3s");
        check(&periods(0, 0), &[("web", 0, 5)], "");
        assert!(periods(5, 10).is_empty());
        let three = [(100, 10), (10, 20), (1000, 30)]
            .map(|(priority, seconds)| PriorityGracePeriod { priority, seconds });
        check(
            &three,
            &[("a", 5, 60), ("b", 10, 60), ("c", 99, 60), ("d", 100, 60), ("e", 5000, 60)],
            "within 20s: a 20s, b 20s, c 20s; within 10s: d 10s; within 30s: e 30s",
        );
    }
}
