//! Computes the desired replica count and the status of a HorizontalPodAutoscaler. Does no I/O.

mod behavior;
mod replicas;
mod usage;

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::autoscaling::v2::{
    HorizontalPodAutoscaler, HorizontalPodAutoscalerCondition, HorizontalPodAutoscalerSpec,
    HorizontalPodAutoscalerStatus, MetricStatus,
};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use reconcile::{EventType, Key, Object as _};

pub use behavior::History;

const SCALING_ALLOWED: &str = "AbleToScale";
const SCALING_ACTIVE: &str = "ScalingActive";
const SCALING_LIMITED: &str = "ScalingLimited";

/// The current values of one metric, in thousandths.
#[derive(Clone, Debug, PartialEq)]
pub enum MetricValues {
    /// A value per pod, by pod name.
    Pods(BTreeMap<String, PodMetric>),
    /// One value for all pods together.
    Total(i64),
}

/// The value of a metric for one pod.
#[derive(Clone, Debug, PartialEq)]
pub struct PodMetric {
    pub value: i64,
    pub at: Timestamp,
    /// The length of the measurement.
    pub window: SignedDuration,
}

/// The current state of the scale target.
pub struct ScaleTarget<'a> {
    /// The replica counts of the scale's spec and status.
    pub replicas: i32,
    pub running: i32,
    /// The selector in the scale's status.
    pub selector: &'a str,
    /// The pods that the selector matches, or why it cannot be parsed.
    pub pods: Result<Vec<Arc<Pod>>, String>,
    /// All autoscalers that select some of these pods, including this one.
    pub autoscalers: Vec<Key>,
}

/// The result of a sync. The caller first applies `rescale` and calls [`Decision::record_rescale`], then
/// emits the events and updates the status.
#[derive(Debug)]
pub struct Decision {
    pub status: HorizontalPodAutoscalerStatus,
    pub events: Vec<(EventType, &'static str, String)>,
    pub rescale: Option<Rescale>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Rescale {
    pub from: i32,
    pub to: i32,
    pub reason: String,
}

/// Whether metrics are fetched. Scaling is disabled at zero replicas, and a count out of bounds is corrected
/// without metrics.
pub fn needs_metrics(spec: &HorizontalPodAutoscalerSpec, replicas: i32) -> bool {
    replicas != 0 && (min_replicas(spec)..=spec.max_replicas).contains(&replicas)
}

/// The decision when the scale of the target cannot be fetched.
pub fn get_scale_failed(hpa: &HorizontalPodAutoscaler, error: &str, now: Timestamp) -> Decision {
    let mut decision = Decision::new(hpa);
    decision.events.push((EventType::Warning, "FailedGetScale", error.to_owned()));
    let message = format!("the HPA controller was unable to get the target's current scale: {error}");
    decision.set_condition(SCALING_ALLOWED, false, "FailedGetScale", message, now);
    decision
}

/// Computes the desired replica count. `metric_values` holds the values of the spec's metrics in order and
/// is ignored if [`needs_metrics`] is false.
pub fn compute_decision(
    hpa: &HorizontalPodAutoscaler,
    target: &ScaleTarget<'_>,
    metric_values: Vec<Result<MetricValues, String>>,
    history: &mut History,
    now: Timestamp,
) -> Decision {
    let mut decision = Decision::new(hpa);
    let spec = &hpa.spec;
    let message = "the HPA controller was able to get the target's current scale";
    decision.set_condition(SCALING_ALLOWED, true, "SucceededGetScale", message.to_owned(), now);
    history.record_initial(target.replicas, now);

    let (mut metrics, current) = (None, target.replicas);
    let (desired, reason) = if current == 0 {
        let message = "scaling is disabled since the replica count of the target is zero";
        decision.set_condition(SCALING_ACTIVE, false, "ScalingDisabled", message.to_owned(), now);
        (0, String::new())
    } else if current > spec.max_replicas {
        (spec.max_replicas, "Current number of replicas above Spec.MaxReplicas".to_owned())
    } else if current < min_replicas(spec) {
        (min_replicas(spec), "Current number of replicas below Spec.MinReplicas".to_owned())
    } else {
        let mut statuses = Vec::new();
        let recommended =
            compute_replicas_for_metrics(&mut decision, hpa, spec, target, metric_values, &mut statuses, now);
        metrics = Some(statuses).filter(|statuses| !statuses.is_empty());
        match recommended {
            Some((recommended, metric)) => {
                let reason = match recommended.cmp(&current) {
                    std::cmp::Ordering::Greater => format!("{metric} above target"),
                    std::cmp::Ordering::Less => "All metrics below target".to_owned(),
                    std::cmp::Ordering::Equal => String::new(),
                };
                (
                    behavior::normalize_desired_replicas(
                        &mut decision,
                        spec,
                        history,
                        current,
                        recommended,
                        now,
                    ),
                    reason,
                )
            }
            None => {
                decision.status.current_replicas = non_zero(current);
                decision.status.current_metrics = metrics;
                return decision;
            }
        }
    };
    decision.status.current_replicas = non_zero(current);
    decision.status.desired_replicas = desired;
    decision.status.current_metrics = metrics;
    if desired != current {
        decision.rescale = Some(Rescale { from: current, to: desired, reason });
    }
    decision
}

impl Decision {
    fn new(hpa: &HorizontalPodAutoscaler) -> Decision {
        let status = hpa.status.clone().unwrap_or_default();
        let status = HorizontalPodAutoscalerStatus { observed_generation: None, ..status };
        Decision { status, events: Vec::new(), rescale: None }
    }

    /// Records the result of the scale update.
    pub fn record_rescale(
        &mut self,
        hpa: &HorizontalPodAutoscaler,
        rescale: &Rescale,
        result: Result<(), String>,
        history: &mut History,
        now: Timestamp,
    ) {
        let Rescale { from, to, reason } = rescale;
        match result {
            Ok(()) => {
                let message = format!("the HPA controller was able to update the target scale to {to}");
                self.set_condition(SCALING_ALLOWED, true, "SucceededRescale", message, now);
                let message = format!("New size: {to}; reason: {reason}");
                self.events.push((EventType::Normal, "SuccessfulRescale", message));
                self.status.last_scale_time = Some(Time(now));
                if hpa.spec.behavior.is_some() {
                    history.record_scale_event(*from, *to, now);
                }
            }
            Err(error) => {
                let message = format!("New size: {to}; reason: {reason}; error: {error}");
                self.events.push((EventType::Warning, "FailedRescale", message));
                let message = format!("the HPA controller was unable to update the target scale: {error}");
                self.set_condition(SCALING_ALLOWED, false, "FailedUpdateScale", message, now);
                self.status.desired_replicas =
                    hpa.status.as_ref().map_or(0, |status| status.desired_replicas);
            }
        }
    }

    fn set_condition(&mut self, kind: &str, is_true: bool, reason: &str, message: String, now: Timestamp) {
        let conditions = self.status.conditions.get_or_insert_default();
        let status = if is_true { "True" } else { "False" };
        let known = conditions.iter_mut().find(|condition| condition.type_ == kind);
        let since = match &known {
            Some(known) if known.status == status => known.last_transition_time.clone(),
            _ => Some(Time(now)),
        };
        let condition = HorizontalPodAutoscalerCondition {
            type_: kind.to_owned(),
            status: status.to_owned(),
            reason: Some(reason.to_owned()),
            message: Some(message),
            last_transition_time: since,
        };
        match known {
            Some(known) => *known = condition,
            None => conditions.push(condition),
        }
    }
}

/// The largest replica count that any metric recommends, and the name of that metric. Returns `None` if no
/// metric is valid, or if some are invalid and the valid ones would scale down.
fn compute_replicas_for_metrics(
    decision: &mut Decision,
    hpa: &HorizontalPodAutoscaler,
    spec: &HorizontalPodAutoscalerSpec,
    target: &ScaleTarget<'_>,
    metric_values: Vec<Result<MetricValues, String>>,
    statuses: &mut Vec<MetricStatus>,
    now: Timestamp,
) -> Option<(i32, String)> {
    let pods = match target_pods(target) {
        Ok(pods) => pods,
        Err((event, reason, event_message, message)) => {
            decision.events.push((EventType::Warning, event, event_message.clone()));
            decision.set_condition(SCALING_ACTIVE, false, reason, message, now);
            decision.events.push((EventType::Warning, "FailedComputeMetricsReplicas", event_message));
            return None;
        }
    };
    let calculator = replicas::ReplicaCalculator { spec, target, pods, namespace: hpa.namespace(), now };
    let (mut best, mut first_failure, mut failures): (Option<(i32, String)>, _, usize) = (None, None, 0);
    let metrics = spec.metrics.as_deref().unwrap_or_default();
    for (metric, reading) in metrics.iter().zip(metric_values) {
        match replicas::compute_replicas_for_metric(&calculator, metric, reading) {
            Ok(metric_replicas) => {
                statuses.push(metric_replicas.status);
                if best.as_ref().is_none_or(|(size, _)| *size == 0 || metric_replicas.replicas > *size) {
                    best = Some((metric_replicas.replicas, metric_replicas.metric));
                }
            }
            Err(failure) => {
                statuses.push(MetricStatus::default());
                decision.events.push((EventType::Warning, failure.reason, failure.message.clone()));
                failures += 1;
                first_failure.get_or_insert(failure);
            }
        }
    }
    let error = first_failure.as_ref().map(|failure| {
        let (total, error) = (metrics.len(), &failure.error);
        format!("invalid metrics ({failures} invalid out of {total}), first error is: {error}")
    });
    let would_shrink = best.as_ref().is_none_or(|(size, _)| *size < target.replicas);
    if failures >= metrics.len() || (failures > 0 && would_shrink) {
        if let (Some(failure), Some(error)) = (first_failure, error) {
            let message = format!("the HPA was unable to compute the replica count: {}", failure.message);
            decision.set_condition(SCALING_ACTIVE, false, failure.reason, message, now);
            decision.events.push((EventType::Warning, "FailedComputeMetricsReplicas", error));
        }
        return None;
    }
    let (size, metric) = best?;
    let message = format!("the HPA was able to successfully calculate a replica count from {metric}");
    decision.set_condition(SCALING_ACTIVE, true, "ValidMetricFound", message, now);
    Some((size, metric))
}

type SelectorError = (&'static str, &'static str, String, String);

/// The target's pods, or an error if the selector is missing, invalid or shared with another autoscaler.
fn target_pods<'a>(target: &'a ScaleTarget<'_>) -> Result<&'a [Arc<Pod>], SelectorError> {
    if target.selector.is_empty() {
        let message = "the HPA target's scale is missing a selector".to_owned();
        return Err(("SelectorRequired", "InvalidSelector", "selector is required".to_owned(), message));
    }
    let pods = target.pods.as_ref().map_err(|error| {
        let event_message =
            format!("couldn't convert selector into a corresponding internal selector object: {error}");
        ("InvalidSelector", "InvalidSelector", event_message.clone(), event_message)
    })?;
    if target.autoscalers.len() > 1 {
        let names: Vec<String> = target.autoscalers.iter().map(Key::to_string).collect();
        let (selector, names) = (target.selector, names.join(" "));
        let event_message = format!("pods by selector {selector} are controlled by multiple HPAs: [{names}]");
        return Err(("AmbiguousSelector", "AmbiguousSelector", event_message.clone(), event_message));
    }
    Ok(pods)
}

fn min_replicas(spec: &HorizontalPodAutoscalerSpec) -> i32 {
    spec.min_replicas.unwrap_or(1)
}

/// Maps 0 to `None`, because Go omits zero counts.
fn non_zero(count: i32) -> Option<i32> {
    Some(count).filter(|count| *count != 0)
}

#[cfg(test)]
mod tests;
