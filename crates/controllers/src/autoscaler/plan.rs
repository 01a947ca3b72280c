//! Decides the size of what a HorizontalPodAutoscaler scales, and what its status says about it.

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
use reconcile::{Key, Object as _, Severity};

pub use behavior::History;

const ABLE: &str = "AbleToScale";
const ACTIVE: &str = "ScalingActive";
const LIMITED: &str = "ScalingLimited";

/// What one metric says now; amounts in thousandths.
#[derive(Clone, Debug, PartialEq)]
pub enum Reading {
    /// Of each pod, by name.
    Pods(BTreeMap<String, Sample>),
    /// Of something else, all together.
    Total(i64),
}

/// What one pod uses.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    pub value: i64,
    pub at: Timestamp,
    /// Over how long it was measured.
    pub window: SignedDuration,
}

/// The target as it is now.
pub struct Target<'a> {
    /// As many replicas as it asks for, and as it has.
    pub replicas: i32,
    pub running: i32,
    /// How its pods are found, as its scale says.
    pub selector: &'a str,
    /// The selector understood, or why it cannot be.
    pub pods: Result<Vec<Arc<Pod>>, String>,
    /// All autoscalers that select some of its pods, this one among them.
    pub autoscalers: Vec<Key>,
}

/// What to do: first scale, if so, then [`Decision::scaled`], then tell and write.
#[derive(Debug)]
pub struct Decision {
    pub status: HorizontalPodAutoscalerStatus,
    pub told: Vec<(Severity, &'static str, String)>,
    pub rescale: Option<Rescale>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Rescale {
    pub from: i32,
    pub to: i32,
    pub reason: String,
}

/// Whether metrics are looked at: not while the size is none, or outside of the limits anyway.
pub fn needs_metrics(spec: &HorizontalPodAutoscalerSpec, replicas: i32) -> bool {
    replicas != 0 && (fewest(spec)..=spec.max_replicas).contains(&replicas)
}

/// What is told when the target's size cannot be read.
pub fn without_scale(hpa: &HorizontalPodAutoscaler, error: &str, now: Timestamp) -> Decision {
    let mut decision = Decision::new(hpa);
    decision.told.push((Severity::Warning, "FailedGetScale", error.to_owned()));
    let message = format!("the HPA controller was unable to get the target's current scale: {error}");
    decision.set(ABLE, false, "FailedGetScale", message, now);
    decision
}

/// The size the target should have. `readings` are of the metrics of the spec, in its order; they are not
/// looked at where [`needs_metrics`] says no.
pub fn decide(
    hpa: &HorizontalPodAutoscaler,
    target: &Target<'_>,
    readings: Vec<Result<Reading, String>>,
    history: &mut History,
    now: Timestamp,
) -> Decision {
    let mut decision = Decision::new(hpa);
    let spec = &hpa.spec;
    let message = "the HPA controller was able to get the target's current scale";
    decision.set(ABLE, true, "SucceededGetScale", message.to_owned(), now);
    history.begin(target.replicas, now);

    let (mut metrics, current) = (None, target.replicas);
    let (desired, reason) = if current == 0 {
        let message = "scaling is disabled since the replica count of the target is zero";
        decision.set(ACTIVE, false, "ScalingDisabled", message.to_owned(), now);
        (0, String::new())
    } else if current > spec.max_replicas {
        (spec.max_replicas, "Current number of replicas above Spec.MaxReplicas".to_owned())
    } else if current < fewest(spec) {
        (fewest(spec), "Current number of replicas below Spec.MinReplicas".to_owned())
    } else {
        let mut statuses = Vec::new();
        let proposed = propose(&mut decision, hpa, spec, target, readings, &mut statuses, now);
        metrics = Some(statuses).filter(|statuses| !statuses.is_empty());
        match proposed {
            Some((proposed, metric)) => {
                let reason = match proposed.cmp(&current) {
                    std::cmp::Ordering::Greater => format!("{metric} above target"),
                    std::cmp::Ordering::Less => "All metrics below target".to_owned(),
                    std::cmp::Ordering::Equal => String::new(),
                };
                (behavior::within_limits(&mut decision, spec, history, current, proposed, now), reason)
            }
            None => {
                decision.status.current_replicas = some(current);
                decision.status.current_metrics = metrics;
                return decision;
            }
        }
    };
    decision.status.current_replicas = some(current);
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
        Decision { status, told: Vec::new(), rescale: None }
    }

    /// Takes in how scaling went.
    pub fn scaled(
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
                self.set(ABLE, true, "SucceededRescale", message, now);
                let message = format!("New size: {to}; reason: {reason}");
                self.told.push((Severity::Normal, "SuccessfulRescale", message));
                self.status.last_scale_time = Some(Time(now));
                if hpa.spec.behavior.is_some() {
                    history.scaled(*from, *to, now);
                }
            }
            Err(error) => {
                let message = format!("New size: {to}; reason: {reason}; error: {error}");
                self.told.push((Severity::Warning, "FailedRescale", message));
                let message = format!("the HPA controller was unable to update the target scale: {error}");
                self.set(ABLE, false, "FailedUpdateScale", message, now);
                self.status.desired_replicas =
                    hpa.status.as_ref().map_or(0, |status| status.desired_replicas);
            }
        }
    }

    fn set(&mut self, kind: &str, holds: bool, reason: &str, message: String, now: Timestamp) {
        let conditions = self.status.conditions.get_or_insert_default();
        let status = if holds { "True" } else { "False" };
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

/// The largest size any metric asks for, and the metric. `None` where none can be told, or where some cannot
/// and the others would make it smaller.
fn propose(
    decision: &mut Decision,
    hpa: &HorizontalPodAutoscaler,
    spec: &HorizontalPodAutoscalerSpec,
    target: &Target<'_>,
    readings: Vec<Result<Reading, String>>,
    statuses: &mut Vec<MetricStatus>,
    now: Timestamp,
) -> Option<(i32, String)> {
    let pods = match understood(target) {
        Ok(pods) => pods,
        Err((event, reason, told, message)) => {
            decision.told.push((Severity::Warning, event, told.clone()));
            decision.set(ACTIVE, false, reason, message, now);
            decision.told.push((Severity::Warning, "FailedComputeMetricsReplicas", told));
            return None;
        }
    };
    let world = replicas::World { spec, target, pods, namespace: hpa.namespace(), now };
    let (mut best, mut first_failure, mut failures): (Option<(i32, String)>, _, usize) = (None, None, 0);
    let metrics = spec.metrics.as_deref().unwrap_or_default();
    for (metric, reading) in metrics.iter().zip(readings) {
        match replicas::propose(&world, metric, reading) {
            Ok(proposal) => {
                statuses.push(proposal.status);
                if best.as_ref().is_none_or(|(size, _)| *size == 0 || proposal.replicas > *size) {
                    best = Some((proposal.replicas, proposal.metric));
                }
            }
            Err(failure) => {
                statuses.push(MetricStatus::default());
                decision.told.push((Severity::Warning, failure.reason, failure.told.clone()));
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
            let message = format!("the HPA was unable to compute the replica count: {}", failure.told);
            decision.set(ACTIVE, false, failure.reason, message, now);
            decision.told.push((Severity::Warning, "FailedComputeMetricsReplicas", error));
        }
        return None;
    }
    let (size, metric) = best?;
    let message = format!("the HPA was able to successfully calculate a replica count from {metric}");
    decision.set(ACTIVE, true, "ValidMetricFound", message, now);
    Some((size, metric))
}

type Misunderstood = (&'static str, &'static str, String, String);

/// The target's pods, where they can be told and are nobody else's.
fn understood<'a>(target: &'a Target<'_>) -> Result<&'a [Arc<Pod>], Misunderstood> {
    if target.selector.is_empty() {
        let message = "the HPA target's scale is missing a selector".to_owned();
        return Err(("SelectorRequired", "InvalidSelector", "selector is required".to_owned(), message));
    }
    let pods = target.pods.as_ref().map_err(|error| {
        let told =
            format!("couldn't convert selector into a corresponding internal selector object: {error}");
        ("InvalidSelector", "InvalidSelector", told.clone(), told)
    })?;
    if target.autoscalers.len() > 1 {
        let names: Vec<String> = target.autoscalers.iter().map(Key::to_string).collect();
        let (selector, names) = (target.selector, names.join(" "));
        let told = format!("pods by selector {selector} are controlled by multiple HPAs: [{names}]");
        return Err(("AmbiguousSelector", "AmbiguousSelector", told.clone(), told));
    }
    Ok(pods)
}

fn fewest(spec: &HorizontalPodAutoscalerSpec) -> i32 {
    spec.min_replicas.unwrap_or(1)
}

/// Counts of nothing are left out.
fn some(count: i32) -> Option<i32> {
    Some(count).filter(|count| *count != 0)
}

#[cfg(test)]
mod tests;
