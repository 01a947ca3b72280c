//! Stabilization windows and rate limits of scaling.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::autoscaling::v2::{HPAScalingPolicy, HPAScalingRules, HorizontalPodAutoscalerSpec};

use super::{Decision, SCALING_ALLOWED, SCALING_LIMITED, min_replicas};

/// How long a lower recommendation must persist before it is applied (upstream's default of
/// `--horizontal-pod-autoscaler-downscale-stabilization`).
const DOWNSCALE_STABILIZATION_SECONDS: i32 = 300;
/// The longest stabilization window and policy period that the API allows.
const MAX_BEHAVIOR_PERIOD: SignedDuration = SignedDuration::from_secs(3600);

/// Recent recommendations and scale events of an autoscaler.
#[derive(Debug, Default)]
pub struct History {
    /// Replica counts recommended by metrics.
    recommendations: Vec<(Timestamp, i32)>,
    /// Replica changes, up and down.
    scale_up_events: Vec<(Timestamp, i32)>,
    scale_down_events: Vec<(Timestamp, i32)>,
}

impl History {
    /// Records the initial replica count as a recommendation, so that a restart does not scale down at once.
    pub(super) fn record_initial(&mut self, replicas: i32, now: Timestamp) {
        if self.recommendations.is_empty() {
            self.recommendations.push((now, replicas));
        }
    }

    pub(super) fn record_scale_event(&mut self, from: i32, to: i32, now: Timestamp) {
        match to > from {
            true => self.scale_up_events.push((now, to - from)),
            false => self.scale_down_events.push((now, from - to)),
        }
    }

    fn remove_old_entries(&mut self, now: Timestamp) {
        let is_recent = |(at, _): &(Timestamp, i32)| now.duration_since(*at) <= MAX_BEHAVIOR_PERIOD;
        self.recommendations.retain(is_recent);
        self.scale_up_events.retain(is_recent);
        self.scale_down_events.retain(is_recent);
    }

    /// The replica count at the start of a policy period.
    fn replicas_at_period_start(&self, current: i32, period: i32, now: Timestamp) -> i32 {
        let sum = |changes: &[(Timestamp, i32)]| {
            let recent = changes.iter().filter(|(at, _)| now.duration_since(*at) < seconds(period));
            recent.fold(0_i32, |sum, (_, change)| sum.saturating_add(*change))
        };
        current.saturating_sub(sum(&self.scale_up_events)).saturating_add(sum(&self.scale_down_events))
    }
}

/// Applies stabilization, rate limits and bounds to the recommended replica count.
pub(super) fn normalize_desired_replicas(
    decision: &mut Decision,
    spec: &HorizontalPodAutoscalerSpec,
    history: &mut History,
    current: i32,
    recommended: i32,
    now: Timestamp,
) -> i32 {
    history.remove_old_entries(now);
    let rules = spec.behavior.as_ref().map(|behavior| {
        let up = behavior.scale_up.clone().unwrap_or_else(default_scale_up_rules);
        (up, behavior.scale_down.clone().unwrap_or_else(default_scale_down_rules))
    });
    let (stable, reason, message) = match &rules {
        Some(rules) => stabilize(rules, history, current, recommended, now),
        None => {
            let recent = history
                .recommendations
                .iter()
                .filter(|(at, _)| now.duration_since(*at) <= seconds(DOWNSCALE_STABILIZATION_SECONDS));
            let stable = recent.map(|(_, value)| *value).max().unwrap_or(recommended).max(recommended);
            (stable, "ScaleDownStabilized", STABILIZE_DOWN_MESSAGE)
        }
    };
    history.recommendations.push((now, recommended));
    if stable == recommended {
        let message = "recommended size matches current size";
        decision.set_condition(SCALING_ALLOWED, true, "ReadyForNewScale", message.to_owned(), now);
    } else {
        decision.set_condition(SCALING_ALLOWED, true, reason, message.to_owned(), now);
    }
    let (desired, reason, message) = match &rules {
        Some(rules) => apply_behavior_limits(rules, spec, history, current, stable, now),
        None => apply_default_limits(spec, current, stable),
    };
    decision.set_condition(SCALING_LIMITED, desired != stable, reason, message.to_owned(), now);
    desired
}

const STABILIZE_DOWN_MESSAGE: &str =
    "recent recommendations were higher than current one, applying the highest recent recommendation";
const STABILIZE_UP_MESSAGE: &str =
    "recent recommendations were lower than current one, applying the lowest recent recommendation";

/// Clamps the current count between the lowest and highest recommendations of the stabilization windows.
fn stabilize(
    (up, down): &(HPAScalingRules, HPAScalingRules),
    history: &History,
    current: i32,
    recommended: i32,
    now: Timestamp,
) -> (i32, &'static str, &'static str) {
    let recent = |window: i32| {
        let is_recent = move |(at, _): &&(Timestamp, i32)| now.duration_since(*at) < seconds(window);
        history.recommendations.iter().filter(is_recent).map(|(_, value)| *value).chain([recommended])
    };
    let min_recent = recent(up.stabilization_window_seconds.unwrap_or(0)).min().unwrap_or(recommended);
    let window = down.stabilization_window_seconds.unwrap_or(DOWNSCALE_STABILIZATION_SECONDS);
    let max_recent = recent(window).max().unwrap_or(recommended);
    let stable = current.max(min_recent).min(max_recent);
    match recommended >= current {
        true => (stable, "ScaleUpStabilized", STABILIZE_UP_MESSAGE),
        false => (stable, "ScaleDownStabilized", STABILIZE_DOWN_MESSAGE),
    }
}

const WITHIN_RANGE: (&str, &str) = ("DesiredWithinRange", "the desired count is within the acceptable range");
const BELOW_MIN_REPLICAS: (&str, &str) =
    ("TooFewReplicas", "the desired replica count is less than the minimum replica count");
const ABOVE_MAX_REPLICAS: (&str, &str) =
    ("TooManyReplicas", "the desired replica count is more than the maximum replica count");
const SCALE_UP_LIMIT: (&str, &str) =
    ("ScaleUpLimit", "the desired replica count is increasing faster than the maximum scale rate");
const SCALE_DOWN_LIMIT: (&str, &str) =
    ("ScaleDownLimit", "the desired replica count is decreasing faster than the maximum scale rate");

/// Limits without a behavior: scale up to at most twice the current count, or 4 (upstream's
/// `convertDesiredReplicasWithRules`).
fn apply_default_limits(
    spec: &HorizontalPodAutoscalerSpec,
    current: i32,
    desired: i32,
) -> (i32, &'static str, &'static str) {
    let rate_limit = current.saturating_mul(2).max(4);
    let (max_allowed, reason_message) = match spec.max_replicas > rate_limit {
        true => (rate_limit, SCALE_UP_LIMIT),
        false => (spec.max_replicas, ABOVE_MAX_REPLICAS),
    };
    let (desired, (reason, message)) = if desired < min_replicas(spec) {
        (min_replicas(spec), BELOW_MIN_REPLICAS)
    } else if desired > max_allowed {
        (max_allowed, reason_message)
    } else {
        (desired, WITHIN_RANGE)
    };
    (desired, reason, message)
}

fn apply_behavior_limits(
    (up, down): &(HPAScalingRules, HPAScalingRules),
    spec: &HorizontalPodAutoscalerSpec,
    history: &History,
    current: i32,
    desired: i32,
    now: Timestamp,
) -> (i32, &'static str, &'static str) {
    let (desired, (reason, message)) = if desired > current {
        let rate_limit =
            policy_limit(up, history, current, now, scale_up_by_policy, i32::max, i32::min).max(current);
        let (max_allowed, reason_message) = match spec.max_replicas > rate_limit {
            true => (rate_limit, SCALE_UP_LIMIT),
            false => (spec.max_replicas, ABOVE_MAX_REPLICAS),
        };
        if desired > max_allowed { (max_allowed, reason_message) } else { (desired, WITHIN_RANGE) }
    } else if desired < current {
        let rate_limit =
            policy_limit(down, history, current, now, scale_down_by_policy, i32::min, i32::max).min(current);
        let (min_allowed, reason_message) = match min_replicas(spec) < rate_limit {
            true => (rate_limit, SCALE_DOWN_LIMIT),
            false => (min_replicas(spec), BELOW_MIN_REPLICAS),
        };
        if desired < min_allowed { (min_allowed, reason_message) } else { (desired, WITHIN_RANGE) }
    } else {
        (desired, WITHIN_RANGE)
    };
    (desired, reason, message)
}

/// The replica count limit that the policies allow, as chosen by `selectPolicy`.
fn policy_limit(
    rules: &HPAScalingRules,
    history: &History,
    current: i32,
    now: Timestamp,
    apply_policy: fn(&HPAScalingPolicy, i32) -> i32,
    select_max: fn(i32, i32) -> i32,
    select_min: fn(i32, i32) -> i32,
) -> i32 {
    let pick = match rules.select_policy.as_deref() {
        Some("Disabled") => return current,
        Some("Min") => select_min,
        _ => select_max,
    };
    let policies = rules.policies.iter().flatten();
    let bounds = policies.map(|policy| {
        apply_policy(policy, history.replicas_at_period_start(current, policy.period_seconds, now))
    });
    bounds.reduce(pick).unwrap_or(current)
}

fn scale_up_by_policy(policy: &HPAScalingPolicy, from: i32) -> i32 {
    match policy.type_.as_str() {
        "Percent" => (f64::from(from) * (1.0 + f64::from(policy.value) / 100.0)).ceil() as i32,
        _ => from.saturating_add(policy.value),
    }
}

fn scale_down_by_policy(policy: &HPAScalingPolicy, from: i32) -> i32 {
    match policy.type_.as_str() {
        "Percent" => (f64::from(from) * (1.0 - f64::from(policy.value) / 100.0)) as i32,
        _ => from.saturating_sub(policy.value),
    }
}

/// The API defaults of a scaling rule that is not set.
fn default_scale_up_rules() -> HPAScalingRules {
    let policy = |type_: &str, value| HPAScalingPolicy { type_: type_.to_owned(), value, period_seconds: 15 };
    HPAScalingRules {
        policies: Some(vec![policy("Pods", 4), policy("Percent", 100)]),
        select_policy: Some("Max".to_owned()),
        stabilization_window_seconds: Some(0),
        tolerance: None,
    }
}

fn default_scale_down_rules() -> HPAScalingRules {
    let all = HPAScalingPolicy { type_: "Percent".to_owned(), value: 100, period_seconds: 15 };
    HPAScalingRules {
        policies: Some(vec![all]),
        stabilization_window_seconds: None,
        ..default_scale_up_rules()
    }
}

fn seconds(seconds: i32) -> SignedDuration {
    SignedDuration::from_secs(seconds.into())
}
