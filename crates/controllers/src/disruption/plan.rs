//! Computes the status of a PodDisruptionBudget. Does no I/O.

use std::collections::BTreeMap;
use std::sync::Arc;

use api::intstr::RoundingMode;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use reconcile::Object as _;

use crate::{percent, pod, selector};

/// How long an allowed eviction may take to delete the pod. After that it is assumed to have failed.
const DELETION_TIMEOUT: SignedDuration = SignedDuration::from_secs(120);

/// The condition of a pod that is about to be evicted.
pub const DISRUPTION_TARGET: &str = "DisruptionTarget";

/// Replica counts of the pods' controllers, by UID.
pub type ControllerScale = BTreeMap<String, i32>;

/// One action to take.
#[derive(Debug, PartialEq)]
pub enum Action {
    Normal(&'static str, String),
    Warn(&'static str, String),
    /// A warning event about a pod that was expected to be deleted.
    WarnPod(Arc<Pod>, String),
    WriteStatus(Box<PodDisruptionBudgetStatus>),
    RequeueAt(Timestamp),
}

/// Whether the expected number of pods depends on the scale of the pods' controllers.
pub fn needs_controller_scale(budget: &PodDisruptionBudget) -> bool {
    let Some(spec) = &budget.spec else { return false };
    spec.max_unavailable.is_some() || matches!(spec.min_available, Some(IntOrString::String(_)))
}

/// Plans the actions for a budget whose selector matches `pods`. If `controller_scale` is an error, no
/// disruption is allowed.
pub fn plan(
    budget: &PodDisruptionBudget,
    pods: &[Arc<Pod>],
    controller_scale: Result<ControllerScale, String>,
    now: Timestamp,
) -> Vec<Action> {
    let mut actions = Vec::new();
    if pods.is_empty() {
        actions.push(Action::Normal("NoPods", "No matching pods found".to_owned()));
    }
    let expected =
        controller_scale.and_then(|controller_scale| expected_counts(budget, pods, &controller_scale));
    let status = match expected {
        Ok((expected, desired)) => {
            if needs_controller_scale(budget) && pods.iter().any(|pod| pod.controller().is_none()) {
                actions.push(Action::Warn("UnmanagedPods", no_controller_message(budget)));
            }
            let disrupted = pending_disruptions(budget, pods, now, &mut actions);
            status(budget, pods, (expected, desired), disrupted, now)
        }
        Err(error) => {
            let message = format!("Failed to calculate the number of expected pods: {error}");
            actions.push(Action::Warn("CalculateExpectedPodCountFailed", message));
            failed_status(budget, error, now)
        }
    };
    if budget.status.as_ref() != Some(&status) {
        actions.push(Action::WriteStatus(Box::new(status)));
    }
    actions
}

/// When the `DisruptionTarget` condition of a pod becomes stale. `None` if there is nothing to clear. The
/// kubelet's own condition is kept, because termination by the kubelet may take any time.
pub fn stale_at(pod: &Pod) -> Option<Timestamp> {
    let condition = pod::condition(pod, DISRUPTION_TARGET)?;
    let by_kubelet = condition.reason.as_deref() == Some("TerminationByKubelet");
    if condition.status != "True" || by_kubelet || pod.is_deleting() || pod::is_terminal(pod) {
        return None;
    }
    let since = condition.last_transition_time.as_ref().map_or(Timestamp::UNIX_EPOCH, |time| time.0);
    Some(since.checked_add(DELETION_TIMEOUT).unwrap_or(Timestamp::MAX))
}

/// The expected number of pods, and the desired number of healthy ones.
fn expected_counts(
    budget: &PodDisruptionBudget,
    pods: &[Arc<Pod>],
    controller_scale: &ControllerScale,
) -> Result<(i32, i32), String> {
    let total = controller_scale.values().copied().fold(0, i32::saturating_add);
    let part = |value: &IntOrString| {
        percent::scaled_value(value, total, RoundingMode::Up)
            .ok_or_else(|| "invalid value for IntOrString".to_owned())
    };
    let spec = budget.spec.as_ref();
    match spec.map(|spec| (&spec.max_unavailable, &spec.min_available)) {
        Some((Some(most), _)) => Ok((total, total.saturating_sub(part(most)?).max(0))),
        Some((_, Some(IntOrString::Int(least)))) => {
            Ok((i32::try_from(pods.len()).unwrap_or(i32::MAX), *least))
        }
        Some((_, Some(least))) => Ok((total, part(least)?)),
        _ => Ok((0, 0)),
    }
}

/// The allowed evictions whose pods are not deleted yet.
fn pending_disruptions(
    budget: &PodDisruptionBudget,
    pods: &[Arc<Pod>],
    now: Timestamp,
    actions: &mut Vec<Action>,
) -> BTreeMap<String, Time> {
    let known = budget.status.as_ref().and_then(|status| status.disrupted_pods.as_ref());
    let mut disrupted = BTreeMap::new();
    let mut next = None;
    for pod in pods.iter().filter(|pod| !pod.is_deleting()) {
        let Some(since) = known.and_then(|known| known.get(pod.name())) else { continue };
        let until = since.0.checked_add(DELETION_TIMEOUT).unwrap_or(Timestamp::MAX);
        if until < now {
            // Upstream formats the namespace twice, and the message is kept identical.
            let namespace = budget.namespace();
            let message =
                format!("Pod was expected by PDB {namespace}/{namespace} to be deleted but it wasn't");
            actions.push(Action::WarnPod(pod.clone(), message));
        } else {
            next = next.into_iter().chain([until]).min();
            disrupted.insert(pod.name().to_owned(), since.clone());
        }
    }
    actions.extend(next.map(Action::RequeueAt));
    disrupted
}

fn status(
    budget: &PodDisruptionBudget,
    pods: &[Arc<Pod>],
    (expected, desired): (i32, i32),
    disrupted: BTreeMap<String, Time>,
    now: Timestamp,
) -> PodDisruptionBudgetStatus {
    let is_healthy =
        |pod: &&Arc<Pod>| !pod.is_deleting() && !disrupted.contains_key(pod.name()) && pod::is_ready(pod);
    let healthy = i32::try_from(pods.iter().filter(is_healthy).count()).unwrap_or(i32::MAX);
    let spare = healthy.saturating_sub(desired);
    // A budget without pods allows no disruption, otherwise an eviction could precede the first sync.
    let allowed = if expected <= 0 { 0 } else { spare.max(0) };
    let is_allowed = match allowed > 0 {
        true => ("True", "SufficientPods", String::new()),
        false => ("False", "InsufficientPods", String::new()),
    };
    PodDisruptionBudgetStatus {
        current_healthy: Some(healthy),
        desired_healthy: Some(desired),
        expected_pods: Some(expected),
        disruptions_allowed: Some(allowed),
        disrupted_pods: Some(disrupted).filter(|disrupted| !disrupted.is_empty()),
        observed_generation: budget.metadata.generation,
        conditions: conditions(budget, is_allowed, budget.metadata.generation, now),
    }
}

/// The status if the expected count is unknown: no disruption is allowed.
fn failed_status(budget: &PodDisruptionBudget, error: String, now: Timestamp) -> PodDisruptionBudgetStatus {
    let before = budget.status.clone().unwrap_or_default();
    let conditions = conditions(budget, ("False", "SyncFailed", error), before.observed_generation, now);
    PodDisruptionBudgetStatus { disruptions_allowed: Some(0), conditions, ..before }
}

fn conditions(
    budget: &PodDisruptionBudget,
    (status, reason, message): (&str, &str, String),
    observed_generation: Option<i64>,
    now: Timestamp,
) -> Option<Vec<Condition>> {
    let mut conditions = budget.status.as_ref().and_then(|status| status.conditions.clone());
    let all = conditions.get_or_insert_default();
    let known = all.iter_mut().find(|condition| condition.type_ == "DisruptionAllowed");
    let since = match &known {
        Some(known) if known.status == status => known.last_transition_time.clone(),
        _ => Time(now),
    };
    let condition = Condition {
        type_: "DisruptionAllowed".to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message,
        observed_generation,
        last_transition_time: since,
    };
    match known {
        Some(known) => *known = condition,
        None => all.push(condition),
    }
    conditions
}

fn no_controller_message(budget: &PodDisruptionBudget) -> String {
    let selector = budget.spec.as_ref().and_then(|spec| spec.selector.as_ref());
    format!(
        "Pods selected by this PodDisruptionBudget (selector: {}) were found to be unmanaged. As a result, the \
         status of the PDB cannot be calculated correctly, which may result in undefined behavior. To account \
         for these pods please set \".spec.minAvailable\" field of the PDB to an integer value.",
        selector::format_selector(selector)
    )
}

#[cfg(test)]
mod tests;
