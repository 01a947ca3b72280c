//! Computes the replica count of each ReplicaSet of a Deployment for the next step.

use std::cmp::Reverse;

use api::intstr::RoundingMode;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use reconcile::Object as _;

use super::sets::{DESIRED_REPLICAS, MAX_REPLICAS, ReplicaSetState, ReplicaSets, by_creation};
use crate::percent;

/// The rollout parameters of a Deployment as numbers.
pub(super) struct RolloutLimits {
    pub replicas: i32,
    pub surge: i32,
    pub unavailable: i32,
    pub rolling: bool,
    pub paused: bool,
    /// The replica count in the status, the fallback for proportional scaling.
    reported: i32,
}

/// The result of a rollout step.
#[derive(Debug, PartialEq)]
pub(super) enum RolloutResult {
    /// No rollout step: the status is computed without progress.
    NoRollout,
    /// A ReplicaSet was scaled. The next step waits for it.
    Scaled,
    /// Nothing to scale.
    Unchanged,
}

impl RolloutLimits {
    pub fn of(deployment: &Deployment) -> RolloutLimits {
        let spec = deployment.spec.as_ref();
        let replicas = spec.and_then(|spec| spec.replicas).unwrap_or(1).max(0);
        let strategy = spec.and_then(|spec| spec.strategy.as_ref());
        let rolling = strategy.and_then(|strategy| strategy.type_.as_deref()) != Some("Recreate");
        let rollout = strategy.and_then(|strategy| strategy.rolling_update.as_ref());
        let share = |value: Option<&IntOrString>, round| {
            value.and_then(|value| percent::scaled_value(value, replicas, round)).unwrap_or(0).max(0)
        };
        let surge = share(rollout.and_then(|rollout| rollout.max_surge.as_ref()), RoundingMode::Up);
        let unavailable =
            share(rollout.and_then(|rollout| rollout.max_unavailable.as_ref()), RoundingMode::Down);
        // Both may be rounded to 0, which would block the rollout. One unavailable pod is allowed then,
        // because an extra pod might exceed a quota (upstream's `ResolveFenceposts`).
        let unavailable = if surge == 0 && unavailable == 0 { 1 } else { unavailable };
        RolloutLimits {
            replicas,
            surge: if rolling { surge } else { 0 },
            unavailable: if rolling { unavailable.min(replicas) } else { 0 },
            rolling,
            paused: spec.and_then(|spec| spec.paused).unwrap_or(false),
            reported: deployment.status.as_ref().and_then(|status| status.replicas).unwrap_or(0),
        }
    }

    /// The maximum number of replicas of all ReplicaSets together.
    pub fn max_total_pods(&self) -> i32 {
        self.replicas.saturating_add(self.surge)
    }

    /// The minimum number of available pods.
    pub fn min_available(&self) -> i32 {
        self.replicas - self.unavailable
    }

    /// The replica count that a new ReplicaSet with `has` replicas may be scaled to.
    pub fn new_set_replicas(&self, sets: &ReplicaSets, has: i32) -> i32 {
        if !self.rolling {
            return self.replicas;
        }
        let free = self.max_total_pods().saturating_sub(sets.replicas()).max(0);
        has.saturating_add(free.min(self.replicas - has))
    }
}

impl ReplicaSets {
    pub fn replicas(&self) -> i32 {
        self.0.iter().fold(0, |sum, set| sum.saturating_add(set.replicas()))
    }

    pub fn available(&self) -> i32 {
        self.0.iter().fold(0, |sum, set| sum.saturating_add(set.available()))
    }

    /// Whether the Deployment's replica count differs from the annotation of its active ReplicaSets.
    pub fn is_scaling_event(&self, limits: &RolloutLimits) -> bool {
        let active = self.0.iter().filter(|set| set.replicas() > 0);
        active
            .filter_map(|set| annotation_count(&set.desired, DESIRED_REPLICAS))
            .any(|desired| desired != limits.replicas)
    }

    /// Applies the Deployment's replica count without continuing a rollout: active ReplicaSets keep their
    /// proportions.
    pub fn scale(&mut self, limits: &RolloutLimits) {
        let active: Vec<usize> = (0..self.0.len()).filter(|i| self.0[*i].replicas() > 0).collect();
        if active.len() <= 1 {
            // The only active one, otherwise the new one, otherwise the latest.
            let only = active.first().copied().or_else(|| self.latest());
            if let Some(only) = only {
                self.0[only].scale(limits.replicas, limits);
            }
        } else if self.new_set().is_some_and(|set| set.is_saturated(limits)) {
            for set in self.0.iter_mut().filter(|set| !set.is_new && set.replicas() > 0) {
                set.scale(0, limits);
            }
        } else if limits.rolling {
            self.proportional_scale(limits);
        }
    }

    /// One step of a rolling update.
    pub fn rolling_update(
        &mut self,
        updated: &mut Deployment,
        limits: &RolloutLimits,
        now: Timestamp,
    ) -> RolloutResult {
        if self.new_set().is_none() {
            self.create(updated, limits, now);
        }
        let has = self.new_set().map_or(0, ReplicaSetState::replicas);
        let desired =
            if has > limits.replicas { limits.replicas } else { limits.new_set_replicas(self, has) };
        if let Some(set) = self.new_set_mut().filter(|_| desired != has) {
            set.scale(desired, limits);
            return RolloutResult::Scaled;
        }
        if self.scale_down_old_sets(limits) { RolloutResult::Scaled } else { RolloutResult::Unchanged }
    }

    /// One step of the `Recreate` strategy: the new ReplicaSet is created when no old pod is left.
    pub fn recreate(
        &mut self,
        updated: &mut Deployment,
        limits: &RolloutLimits,
        runs_pods: impl Fn(&ReplicaSet) -> bool,
        now: Timestamp,
    ) -> RolloutResult {
        let mut result = RolloutResult::Unchanged;
        for set in self.0.iter_mut().filter(|set| !set.is_new && set.replicas() > 0) {
            set.scale(0, limits);
            result = RolloutResult::Scaled;
        }
        if result == RolloutResult::Scaled
            || self.old_sets().any(|set| set.reported_replicas() > 0 || runs_pods(&set.desired))
        {
            return RolloutResult::Scaled;
        }
        if self.new_set().is_none() {
            self.create(updated, limits, now);
        }
        if let Some(set) = self.new_set_mut().filter(|set| set.replicas() != limits.replicas) {
            set.scale(limits.replicas, limits);
        }
        RolloutResult::Unchanged
    }

    /// Scales down old ReplicaSets: unhealthy replicas first, then available ones as far as
    /// `maxUnavailable` allows. Unavailable new pods count as unavailable already.
    ///
    /// A ReplicaSet that was just scaled down may still report pods it no longer has, so the available
    /// count is capped by the replica count. (Upstream does not cap it and may delete one pod too many if
    /// one rollout follows another.)
    fn scale_down_old_sets(&mut self, limits: &RolloutLimits) -> bool {
        let missing =
            self.new_set().map_or(0, |set| set.replicas().saturating_sub(set.available_within_replicas()));
        let mut spare = self.replicas().saturating_sub(limits.min_available()).saturating_sub(missing);
        let mut scaled_down = false;
        for set in self.0.iter_mut().filter(|set| !set.is_new && set.replicas() > 0) {
            let broken = set.replicas().saturating_sub(set.available()).clamp(0, spare.max(0));
            if broken > 0 {
                set.scale(set.replicas() - broken, limits);
                spare -= broken;
                scaled_down = true;
            }
        }
        if spare <= 0 && !scaled_down {
            return false;
        }
        let available =
            self.0.iter().map(ReplicaSetState::available_within_replicas).fold(0, i32::saturating_add);
        let mut spare = available.saturating_sub(limits.min_available());
        for set in self.0.iter_mut().filter(|set| !set.is_new && set.replicas() > 0) {
            let count = set.replicas().min(spare).max(0);
            if count > 0 {
                set.scale(set.replicas() - count, limits);
                spare -= count;
                scaled_down = true;
            }
        }
        scaled_down
    }

    fn proportional_scale(&mut self, limits: &RolloutLimits) {
        let allowed = if limits.replicas > 0 { limits.max_total_pods() } else { 0 };
        let to_add = allowed.saturating_sub(self.replicas());
        // Largest first. Ties: newer ones are scaled up first and older ones are scaled down first.
        self.0.sort_by(|a, b| {
            let age = by_creation(&a.desired, &b.desired);
            let age = if to_add > 0 { age.reverse() } else { age };
            Reverse(a.replicas()).cmp(&Reverse(b.replicas())).then(age)
        });
        let active: Vec<&mut ReplicaSetState> = self.0.iter_mut().filter(|set| set.replicas() > 0).collect();
        let (mut sizes, mut added) = (Vec::new(), 0);
        for set in &active {
            let part = match to_add.saturating_sub(added) {
                0 => 0,
                left if to_add > 0 => set.proportional_change(limits).min(left),
                left => set.proportional_change(limits).max(left),
            };
            added += part;
            sizes.push(set.replicas().saturating_add(part));
        }
        // The remainder from rounding goes to the largest.
        if let Some(largest) = sizes.first_mut() {
            *largest = largest.saturating_add(to_add - added).max(0);
        }
        for (set, size) in active.into_iter().zip(sizes) {
            set.scale(size, limits);
        }
    }

    fn latest(&self) -> Option<usize> {
        let new = self.0.iter().position(|set| set.is_new);
        new.or_else(|| (0..self.0.len()).max_by(|a, b| by_creation(&self.0[*a].desired, &self.0[*b].desired)))
    }
}

impl ReplicaSetState {
    fn available_within_replicas(&self) -> i32 {
        self.available().min(self.replicas())
    }

    /// Whether this ReplicaSet has all of the desired replicas, and all are available.
    fn is_saturated(&self, limits: &RolloutLimits) -> bool {
        let desired = annotation_count(&self.desired, DESIRED_REPLICAS);
        [Some(self.replicas()), desired, Some(self.available())]
            .iter()
            .all(|number| *number == Some(limits.replicas))
    }

    /// The replica change of this ReplicaSet when the total changes from the one in its annotation to the
    /// current one.
    fn proportional_change(&self, limits: &RolloutLimits) -> i32 {
        let has = self.replicas();
        if limits.replicas == 0 {
            return -has;
        }
        let before = annotation_count(&self.desired, MAX_REPLICAS)
            .filter(|before| *before > 0)
            .unwrap_or(limits.reported);
        if before <= 0 {
            return 0;
        }
        let size = f64::from(has) * f64::from(limits.max_total_pods()) / f64::from(before);
        // `round` rounds half away from zero, as Go's `math.Round`. The cast saturates.
        (size.round() as i32).saturating_sub(has)
    }
}

/// A replica count from an annotation.
fn annotation_count(set: &ReplicaSet, annotation: &str) -> Option<i32> {
    let text = set.annotation(annotation)?;
    text.parse().ok().filter(|number| *number >= 0 && !text.starts_with('+'))
}
