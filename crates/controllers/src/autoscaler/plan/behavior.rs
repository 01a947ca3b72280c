//! How fast a target may grow and shrink.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::autoscaling::v2::{HPAScalingPolicy, HPAScalingRules, HorizontalPodAutoscalerSpec};

use super::{ABLE, Decision, LIMITED, fewest};

/// How long a smaller size must be enough before it is taken (upstream's default of
/// `--horizontal-pod-autoscaler-downscale-stabilization`).
const DOWNSCALE_WINDOW: i32 = 300;
/// The longest window and period the API allows.
const LONGEST: SignedDuration = SignedDuration::from_secs(3600);

/// What an autoscaler has wanted and done lately.
#[derive(Debug, Default)]
pub struct History {
    /// Sizes that metrics asked for.
    wanted: Vec<(Timestamp, i32)>,
    /// By how much the target was changed, up and down.
    added: Vec<(Timestamp, i32)>,
    removed: Vec<(Timestamp, i32)>,
}

impl History {
    /// The size it had when it was first looked at counts as wanted, so that nothing shrinks at once.
    pub(super) fn begin(&mut self, replicas: i32, now: Timestamp) {
        if self.wanted.is_empty() {
            self.wanted.push((now, replicas));
        }
    }

    pub(super) fn scaled(&mut self, from: i32, to: i32, now: Timestamp) {
        match to > from {
            true => self.added.push((now, to - from)),
            false => self.removed.push((now, from - to)),
        }
    }

    fn forget(&mut self, now: Timestamp) {
        let is_recent = |(at, _): &(Timestamp, i32)| now.duration_since(*at) <= LONGEST;
        self.wanted.retain(is_recent);
        self.added.retain(is_recent);
        self.removed.retain(is_recent);
    }

    /// The size at the beginning of a period.
    fn at_begin(&self, current: i32, period: i32, now: Timestamp) -> i32 {
        let sum = |changes: &[(Timestamp, i32)]| {
            let recent = changes.iter().filter(|(at, _)| now.duration_since(*at) < seconds(period));
            recent.fold(0_i32, |sum, (_, change)| sum.saturating_add(*change))
        };
        current.saturating_sub(sum(&self.added)).saturating_add(sum(&self.removed))
    }
}

/// The proposed size, brought within what is allowed by now.
pub(super) fn within_limits(
    decision: &mut Decision,
    spec: &HorizontalPodAutoscalerSpec,
    history: &mut History,
    current: i32,
    proposed: i32,
    now: Timestamp,
) -> i32 {
    history.forget(now);
    let rules = spec.behavior.as_ref().map(|behavior| {
        let up = behavior.scale_up.clone().unwrap_or_else(default_up);
        (up, behavior.scale_down.clone().unwrap_or_else(default_down))
    });
    let (stable, reason, message) = match &rules {
        Some(rules) => stabilize(rules, history, current, proposed, now),
        None => {
            let recent =
                history.wanted.iter().filter(|(at, _)| now.duration_since(*at) <= seconds(DOWNSCALE_WINDOW));
            let stable = recent.map(|(_, wanted)| *wanted).max().unwrap_or(proposed).max(proposed);
            (stable, "ScaleDownStabilized", HIGHER)
        }
    };
    history.wanted.push((now, proposed));
    if stable == proposed {
        let message = "recommended size matches current size";
        decision.set(ABLE, true, "ReadyForNewScale", message.to_owned(), now);
    } else {
        decision.set(ABLE, true, reason, message.to_owned(), now);
    }
    let (desired, reason, message) = match &rules {
        Some(rules) => limit_rate(rules, spec, history, current, stable, now),
        None => limit(spec, current, stable),
    };
    decision.set(LIMITED, desired != stable, reason, message.to_owned(), now);
    desired
}

const HIGHER: &str =
    "recent recommendations were higher than current one, applying the highest recent recommendation";
const LOWER: &str =
    "recent recommendations were lower than current one, applying the lowest recent recommendation";

/// Nothing changes before all wishes of its window agree with it.
fn stabilize(
    (up, down): &(HPAScalingRules, HPAScalingRules),
    history: &History,
    current: i32,
    proposed: i32,
    now: Timestamp,
) -> (i32, &'static str, &'static str) {
    let recent = |window: i32| {
        let is_recent = move |(at, _): &&(Timestamp, i32)| now.duration_since(*at) < seconds(window);
        history.wanted.iter().filter(is_recent).map(|(_, wanted)| *wanted).chain([proposed])
    };
    let lowest = recent(up.stabilization_window_seconds.unwrap_or(0)).min().unwrap_or(proposed);
    let window = down.stabilization_window_seconds.unwrap_or(DOWNSCALE_WINDOW);
    let highest = recent(window).max().unwrap_or(proposed);
    let stable = current.max(lowest).min(highest);
    match proposed >= current {
        true => (stable, "ScaleUpStabilized", LOWER),
        false => (stable, "ScaleDownStabilized", HIGHER),
    }
}

const WITHIN: (&str, &str) = ("DesiredWithinRange", "the desired count is within the acceptable range");
const TOO_FEW: (&str, &str) =
    ("TooFewReplicas", "the desired replica count is less than the minimum replica count");
const TOO_MANY: (&str, &str) =
    ("TooManyReplicas", "the desired replica count is more than the maximum replica count");
const TOO_FAST: (&str, &str) =
    ("ScaleUpLimit", "the desired replica count is increasing faster than the maximum scale rate");
const TOO_FAST_DOWN: (&str, &str) =
    ("ScaleDownLimit", "the desired replica count is decreasing faster than the maximum scale rate");

/// Without rules: at most twice as many, or four.
fn limit(
    spec: &HorizontalPodAutoscalerSpec,
    current: i32,
    desired: i32,
) -> (i32, &'static str, &'static str) {
    let fastest = current.saturating_mul(2).max(4);
    let (most, why) = match spec.max_replicas > fastest {
        true => (fastest, TOO_FAST),
        false => (spec.max_replicas, TOO_MANY),
    };
    let (desired, (reason, message)) = if desired < fewest(spec) {
        (fewest(spec), TOO_FEW)
    } else if desired > most {
        (most, why)
    } else {
        (desired, WITHIN)
    };
    (desired, reason, message)
}

fn limit_rate(
    (up, down): &(HPAScalingRules, HPAScalingRules),
    spec: &HorizontalPodAutoscalerSpec,
    history: &History,
    current: i32,
    desired: i32,
    now: Timestamp,
) -> (i32, &'static str, &'static str) {
    let (desired, (reason, message)) = if desired > current {
        let fastest = bound(up, history, current, now, grown, i32::max, i32::min).max(current);
        let (most, why) = match spec.max_replicas > fastest {
            true => (fastest, TOO_FAST),
            false => (spec.max_replicas, TOO_MANY),
        };
        if desired > most { (most, why) } else { (desired, WITHIN) }
    } else if desired < current {
        let fastest = bound(down, history, current, now, shrunk, i32::min, i32::max).min(current);
        let (least, why) = match fewest(spec) < fastest {
            true => (fastest, TOO_FAST_DOWN),
            false => (fewest(spec), TOO_FEW),
        };
        if desired < least { (least, why) } else { (desired, WITHIN) }
    } else {
        (desired, WITHIN)
    };
    (desired, reason, message)
}

/// The farthest size that the policies allow, by the one of them that counts.
fn bound(
    rules: &HPAScalingRules,
    history: &History,
    current: i32,
    now: Timestamp,
    moved: fn(&HPAScalingPolicy, i32) -> i32,
    farthest: fn(i32, i32) -> i32,
    nearest: fn(i32, i32) -> i32,
) -> i32 {
    let pick = match rules.select_policy.as_deref() {
        Some("Disabled") => return current,
        Some("Min") => nearest,
        _ => farthest,
    };
    let policies = rules.policies.iter().flatten();
    let bounds = policies.map(|policy| moved(policy, history.at_begin(current, policy.period_seconds, now)));
    bounds.reduce(pick).unwrap_or(current)
}

fn grown(policy: &HPAScalingPolicy, from: i32) -> i32 {
    match policy.type_.as_str() {
        "Percent" => (f64::from(from) * (1.0 + f64::from(policy.value) / 100.0)).ceil() as i32,
        _ => from.saturating_add(policy.value),
    }
}

fn shrunk(policy: &HPAScalingPolicy, from: i32) -> i32 {
    match policy.type_.as_str() {
        "Percent" => (f64::from(from) * (1.0 - f64::from(policy.value) / 100.0)) as i32,
        _ => from.saturating_sub(policy.value),
    }
}

/// What the API fills in where a rule is left out.
fn default_up() -> HPAScalingRules {
    let policy = |type_: &str, value| HPAScalingPolicy { type_: type_.to_owned(), value, period_seconds: 15 };
    HPAScalingRules {
        policies: Some(vec![policy("Pods", 4), policy("Percent", 100)]),
        select_policy: Some("Max".to_owned()),
        stabilization_window_seconds: Some(0),
        tolerance: None,
    }
}

fn default_down() -> HPAScalingRules {
    let all = HPAScalingPolicy { type_: "Percent".to_owned(), value: 100, period_seconds: 15 };
    HPAScalingRules { policies: Some(vec![all]), stabilization_window_seconds: None, ..default_up() }
}

fn seconds(seconds: i32) -> SignedDuration {
    SignedDuration::from_secs(seconds.into())
}
