//! How many replicas each ReplicaSet of a Deployment gets in the next step.

use std::cmp::Reverse;

use api::intstr::Round;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use reconcile::Object as _;

use super::sets::{DESIRED, MAX, Set, Sets, by_creation};
use crate::percent;

/// What a Deployment asks for, in numbers.
pub(super) struct Limits {
    pub replicas: i32,
    pub surge: i32,
    pub unavailable: i32,
    pub rolling: bool,
    pub paused: bool,
    /// What the status says there is; the proportions fall back on it.
    reported: i32,
}

/// What a step of a rollout came to.
#[derive(Debug, PartialEq)]
pub(super) enum Outcome {
    /// No rollout: only the sizes are looked at, not the progress.
    Observe,
    /// Some set changes; the next step waits for it.
    Scaled,
    /// Nothing to scale now.
    Settled,
}

impl Limits {
    pub fn of(deployment: &Deployment) -> Limits {
        let spec = deployment.spec.as_ref();
        let replicas = spec.and_then(|spec| spec.replicas).unwrap_or(1).max(0);
        let strategy = spec.and_then(|spec| spec.strategy.as_ref());
        let rolling = strategy.and_then(|strategy| strategy.type_.as_deref()) != Some("Recreate");
        let rollout = strategy.and_then(|strategy| strategy.rolling_update.as_ref());
        let share = |value: Option<&IntOrString>, round| {
            value.and_then(|value| percent::of(value, replicas, round)).unwrap_or(0).max(0)
        };
        let surge = share(rollout.and_then(|rollout| rollout.max_surge.as_ref()), Round::Up);
        let unavailable = share(rollout.and_then(|rollout| rollout.max_unavailable.as_ref()), Round::Down);
        // Rounding may leave no room to move at all. Then one pod may be missing, since one too many could
        // exceed a quota.
        let unavailable = if surge == 0 && unavailable == 0 { 1 } else { unavailable };
        Limits {
            replicas,
            surge: if rolling { surge } else { 0 },
            unavailable: if rolling { unavailable.min(replicas) } else { 0 },
            rolling,
            paused: spec.and_then(|spec| spec.paused).unwrap_or(false),
            reported: deployment.status.as_ref().and_then(|status| status.replicas).unwrap_or(0),
        }
    }

    /// The most replicas of all sets together.
    pub fn most(&self) -> i32 {
        self.replicas.saturating_add(self.surge)
    }

    /// The fewest pods that must be available.
    pub fn fewest(&self) -> i32 {
        self.replicas - self.unavailable
    }

    /// The size a new set of size `has` may grow to beside the others.
    pub fn room(&self, sets: &Sets, has: i32) -> i32 {
        if !self.rolling {
            return self.replicas;
        }
        let free = self.most().saturating_sub(sets.replicas()).max(0);
        has.saturating_add(free.min(self.replicas - has))
    }
}

impl Sets {
    pub fn replicas(&self) -> i32 {
        self.0.iter().fold(0, |sum, set| sum.saturating_add(set.replicas()))
    }

    pub fn available(&self) -> i32 {
        self.0.iter().fold(0, |sum, set| sum.saturating_add(set.available()))
    }

    /// Whether the Deployment's size has changed since its sets were last told.
    pub fn was_scaled(&self, limits: &Limits) -> bool {
        let active = self.0.iter().filter(|set| set.replicas() > 0);
        active.filter_map(|set| number(&set.now, DESIRED)).any(|desired| desired != limits.replicas)
    }

    /// Follows the Deployment's size without furthering a rollout: the sets that have pods keep their
    /// proportions.
    pub fn scale(&mut self, limits: &Limits) {
        let active: Vec<usize> = (0..self.0.len()).filter(|i| self.0[*i].replicas() > 0).collect();
        if active.len() <= 1 {
            // The only one with pods, or else the new one, or else the newest.
            let only = active.first().copied().or_else(|| self.latest());
            if let Some(only) = only {
                self.0[only].scale(limits.replicas, limits);
            }
        } else if self.new_one().is_some_and(|set| set.is_saturated(limits)) {
            for set in self.0.iter_mut().filter(|set| !set.is_new && set.replicas() > 0) {
                set.scale(0, limits);
            }
        } else if limits.rolling {
            self.scale_proportionally(limits);
        }
    }

    /// One step of a rolling update.
    pub fn roll(&mut self, told: &mut Deployment, limits: &Limits, now: Timestamp) -> Outcome {
        if self.new_one().is_none() {
            self.create(told, limits, now);
        }
        let has = self.new_one().map_or(0, Set::replicas);
        let wanted = if has > limits.replicas { limits.replicas } else { limits.room(self, has) };
        if let Some(set) = self.new_one_mut().filter(|_| wanted != has) {
            set.scale(wanted, limits);
            return Outcome::Scaled;
        }
        if self.shrink_old(limits) { Outcome::Scaled } else { Outcome::Settled }
    }

    /// One step of replacing everything at once: the new set appears when no old pod is left.
    pub fn recreate(
        &mut self,
        told: &mut Deployment,
        limits: &Limits,
        runs_pods: impl Fn(&ReplicaSet) -> bool,
        now: Timestamp,
    ) -> Outcome {
        let mut outcome = Outcome::Settled;
        for set in self.0.iter_mut().filter(|set| !set.is_new && set.replicas() > 0) {
            set.scale(0, limits);
            outcome = Outcome::Scaled;
        }
        if outcome == Outcome::Scaled || self.old().any(|set| set.running() > 0 || runs_pods(&set.now)) {
            return Outcome::Scaled;
        }
        if self.new_one().is_none() {
            self.create(told, limits, now);
        }
        if let Some(set) = self.new_one_mut().filter(|set| set.replicas() != limits.replicas) {
            set.scale(limits.replicas, limits);
        }
        Outcome::Settled
    }

    /// Takes replicas from old sets: first those that are not available anyway, then as many as may be
    /// missing. New pods that are not available count as missing already.
    ///
    /// A set that has just shrunk may still report the pods it has lost, so none counts for more than its
    /// size. (Upstream takes the reports as they are, and may take one pod too many when a rollout follows
    /// upon another.)
    fn shrink_old(&mut self, limits: &Limits) -> bool {
        let missing = self.new_one().map_or(0, |set| set.replicas().saturating_sub(set.surely_available()));
        let mut spare = self.replicas().saturating_sub(limits.fewest()).saturating_sub(missing);
        let mut shrunk = false;
        for set in self.0.iter_mut().filter(|set| !set.is_new && set.replicas() > 0) {
            let broken = set.replicas().saturating_sub(set.available()).clamp(0, spare.max(0));
            if broken > 0 {
                set.scale(set.replicas() - broken, limits);
                spare -= broken;
                shrunk = true;
            }
        }
        if spare <= 0 && !shrunk {
            return false;
        }
        let available = self.0.iter().map(Set::surely_available).fold(0, i32::saturating_add);
        let mut spare = available.saturating_sub(limits.fewest());
        for set in self.0.iter_mut().filter(|set| !set.is_new && set.replicas() > 0) {
            let count = set.replicas().min(spare).max(0);
            if count > 0 {
                set.scale(set.replicas() - count, limits);
                spare -= count;
                shrunk = true;
            }
        }
        shrunk
    }

    fn scale_proportionally(&mut self, limits: &Limits) {
        let allowed = if limits.replicas > 0 { limits.most() } else { 0 };
        let to_add = allowed.saturating_sub(self.replicas());
        // The largest first; of like ones the newer grow first and the older shrink first.
        self.0.sort_by(|a, b| {
            let age = by_creation(&a.now, &b.now);
            let age = if to_add > 0 { age.reverse() } else { age };
            Reverse(a.replicas()).cmp(&Reverse(b.replicas())).then(age)
        });
        let active: Vec<&mut Set> = self.0.iter_mut().filter(|set| set.replicas() > 0).collect();
        let (mut sizes, mut added) = (Vec::new(), 0);
        for set in &active {
            let part = match to_add.saturating_sub(added) {
                0 => 0,
                left if to_add > 0 => set.fraction(limits).min(left),
                left => set.fraction(limits).max(left),
            };
            added += part;
            sizes.push(set.replicas().saturating_add(part));
        }
        // Rounding leaves some over; they go to the largest.
        if let Some(largest) = sizes.first_mut() {
            *largest = largest.saturating_add(to_add - added).max(0);
        }
        for (set, size) in active.into_iter().zip(sizes) {
            set.scale(size, limits);
        }
    }

    fn latest(&self) -> Option<usize> {
        let new = self.0.iter().position(|set| set.is_new);
        new.or_else(|| (0..self.0.len()).max_by(|a, b| by_creation(&self.0[*a].now, &self.0[*b].now)))
    }
}

impl Set {
    fn surely_available(&self) -> i32 {
        self.available().min(self.replicas())
    }

    /// Whether the set alone is all the Deployment wants, and all of it is available.
    fn is_saturated(&self, limits: &Limits) -> bool {
        let desired = number(&self.now, DESIRED);
        [Some(self.replicas()), desired, Some(self.available())]
            .iter()
            .all(|number| *number == Some(limits.replicas))
    }

    /// By how much the set grows or shrinks when the whole goes from the size it last knew to the present
    /// one.
    fn fraction(&self, limits: &Limits) -> i32 {
        let has = self.replicas();
        if limits.replicas == 0 {
            return -has;
        }
        let before = number(&self.now, MAX).filter(|before| *before > 0).unwrap_or(limits.reported);
        if before <= 0 {
            return 0;
        }
        let size = f64::from(has) * f64::from(limits.most()) / f64::from(before);
        // Rounds half away from zero, and stays within the numbers there are.
        (size.round() as i32).saturating_sub(has)
    }
}

/// A count that an annotation tells.
fn number(set: &ReplicaSet, annotation: &str) -> Option<i32> {
    let text = set.annotation(annotation)?;
    text.parse().ok().filter(|number| *number >= 0 && !text.starts_with('+'))
}
