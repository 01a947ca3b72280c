//! Rolling updates of DaemonSets.

use std::sync::Arc;

use api::intstr::RoundingMode;
use k8s_openapi::api::apps::v1::{DaemonSetSpec, RollingUpdateDaemonSet};
use k8s_openapi::api::core::v1::Pod;
use reconcile::Object as _;

use super::plan::NodesToDaemonPods;
use super::pods::NodeDecision;
use crate::percent;

/// The old pods to delete, and the nodes to create new pods on before the old ones are deleted.
pub(super) fn plan(daemon_pods: &NodesToDaemonPods<'_>) -> (Vec<Arc<Pod>>, Vec<String>) {
    let desired = i32::try_from(daemon_pods.desired()).unwrap_or(i32::MAX);
    let (surge, mut unavailable) = limits(daemon_pods.snapshot.spec, desired);
    if surge > 0 {
        return create_within_max_surge(daemon_pods, surge);
    }
    if desired > 0 && unavailable == 0 {
        unavailable = 1;
    }
    (delete_within_max_unavailable(daemon_pods, unavailable), Vec::new())
}

/// Whether a node may temporarily have two pods.
pub(super) fn allows_surge(spec: &DaemonSetSpec) -> bool {
    limits(spec, 1).0 > 0
}

/// `maxSurge` and `maxUnavailable` as counts.
fn limits(spec: &DaemonSetSpec, desired: i32) -> (usize, usize) {
    let strategy =
        spec.update_strategy.as_ref().filter(|strategy| strategy.type_.as_deref() == Some("RollingUpdate"));
    let Some(RollingUpdateDaemonSet { max_surge, max_unavailable }) =
        strategy.and_then(|strategy| strategy.rolling_update.as_ref())
    else {
        return (0, 0);
    };
    let count = |value: &Option<_>| {
        let scaled = value.as_ref().and_then(|value| percent::scaled_value(value, desired, RoundingMode::Up));
        usize::try_from(scaled.unwrap_or(0)).unwrap_or(0)
    };
    (count(max_surge), count(max_unavailable))
}

type NewAndOldPod<'a> = (Option<&'a Arc<Pod>>, Option<&'a Arc<Pod>>);

/// The new and the old pod of a node. Returns `None` if there are several of one kind, which must be pruned
/// before the rollout continues.
fn new_and_old_pod<'a>(daemon_pods: &NodesToDaemonPods<'a>, name: &str) -> Option<NewAndOldPod<'a>> {
    let here = daemon_pods.pods.get(name).into_iter().flatten().filter(|pod| !pod.is_deleting()).copied();
    let (new, old): (Vec<_>, Vec<_>) = here.partition(|pod| daemon_pods.is_new(pod));
    (new.len() < 2 && old.len() < 2).then(|| (new.first().copied(), old.first().copied()))
}

/// All nodes that have pods or should have one.
fn node_names<'a>(daemon_pods: &NodesToDaemonPods<'a>) -> Vec<&'a str> {
    let desired = daemon_pods
        .decision_by_node
        .iter()
        .filter(|(_, decision)| **decision == NodeDecision::Run)
        .map(|(name, _)| *name);
    let mut names: Vec<&str> = daemon_pods.pods.keys().copied().chain(desired).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// Deletes unavailable old pods at once, and available ones within `maxUnavailable`.
fn delete_within_max_unavailable(daemon_pods: &NodesToDaemonPods<'_>, limit: usize) -> Vec<Arc<Pod>> {
    let (mut unavailable, mut broken, mut candidates) = (0, Vec::new(), Vec::new());
    for name in node_names(daemon_pods) {
        match new_and_old_pod(daemon_pods, name) {
            Some((Some(new), None)) => unavailable += usize::from(!daemon_pods.is_available(new)),
            Some((None, Some(old))) if daemon_pods.is_available(old) => candidates.push(old.clone()),
            Some((None, Some(old))) => {
                unavailable += 1;
                broken.push(old.clone());
            }
            _ => unavailable += 1,
        }
    }
    candidates.truncate(limit.saturating_sub(unavailable));
    broken.extend(candidates);
    broken
}

/// Creates new pods next to old ones within `maxSurge`, and deletes old pods whose replacement is available.
fn create_within_max_surge(
    daemon_pods: &NodesToDaemonPods<'_>,
    limit: usize,
) -> (Vec<Arc<Pod>>, Vec<String>) {
    let (mut delete, mut create, mut candidates, mut misscheduled) = (vec![], vec![], vec![], vec![]);
    let (mut surge, mut available) = (0, 0);
    for name in node_names(daemon_pods) {
        let Some((new, old)) = new_and_old_pod(daemon_pods, name) else {
            surge += 1;
            continue;
        };
        available += usize::from(old.or(new).is_some_and(|pod| daemon_pods.is_available(pod)));
        let Some(old) = old else { continue };
        let should_run = daemon_pods.decision_by_node.get(name) == Some(&NodeDecision::Run);
        match (new, daemon_pods.is_available(old)) {
            (Some(new), _) if daemon_pods.is_available(new) => delete.push(old.clone()),
            (Some(_), _) => surge += 1,
            (None, false) if should_run => create.push(name.to_owned()),
            (None, false) => delete.push(old.clone()),
            (None, true) if should_run => candidates.push(name.to_owned()),
            (None, true) => misscheduled.push(old.clone()),
        }
    }
    // Pods on nodes that should no longer run one are deleted only as new pods become available elsewhere.
    misscheduled.truncate(available.saturating_sub(daemon_pods.desired()));
    delete.extend(misscheduled);
    candidates.truncate(limit.saturating_sub(surge));
    create.extend(candidates);
    (delete, create)
}
