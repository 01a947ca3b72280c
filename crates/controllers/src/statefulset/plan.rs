//! Decides which pod of a StatefulSet comes, goes or is replaced next, and what its status says.
//!
//! Pods of an ordinal share a name, so a new one is only made once the old one is gone. In order, nothing is
//! done before all pods of lower ordinals are well, and pods go from the highest ordinal down; in parallel,
//! only updates keep an order.

use std::collections::BTreeMap;
use std::sync::Arc;

use api::intstr::Round;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{
    ControllerRevision, RollingUpdateStatefulSetStrategy, StatefulSet, StatefulSetSpec, StatefulSetStatus,
};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, PodTemplateSpec};
use reconcile::Object as _;

use super::claims::{claims, is_stale, owners};
use super::pods::{self, is_labelled, is_stuck, ordinal, pod_name};
use crate::history::{self, History, POD_REVISION, Revise};
use crate::percent;
use crate::pod::{is_available, is_ready, is_terminal, next_available, phase};

/// A StatefulSet as its controller sees it.
pub struct Sight<'a> {
    pub set: &'a StatefulSet,
    pub spec: &'a StatefulSetSpec,
    /// The pods it owns.
    pub pods: &'a [Arc<Pod>],
    /// The claims in its namespace that are named like those of its pods.
    pub claims: &'a [Arc<PersistentVolumeClaim>],
    pub history: &'a History,
    pub now: Timestamp,
}

/// What to do next.
#[derive(Debug, Default, PartialEq)]
pub struct Plan {
    pub step: Step,
    pub recheck: Option<Timestamp>,
}

#[derive(Debug, Default, PartialEq)]
pub enum Step {
    #[default]
    Rest,
    Revise(Revise),
    /// In this order; what fails keeps the rest from being done.
    Act(Vec<Action>),
    Trim(Vec<Arc<ControllerRevision>>),
    Status(StatefulSetStatus),
}

#[derive(Debug, PartialEq)]
pub enum Action {
    CreateClaim {
        claim: PersistentVolumeClaim,
        pod: String,
    },
    /// The claim with other owners.
    OwnClaim(PersistentVolumeClaim),
    CreatePod(Box<Pod>),
    DeletePod(Arc<Pod>),
    /// The pod's labels do not tell its place.
    LabelPod {
        pod: Arc<Pod>,
        ordinal: i32,
    },
    /// The pod cannot be made yet.
    Wait {
        pod: String,
        message: String,
    },
}

impl Action {
    /// Whether something is made for the set.
    pub fn makes(&self) -> bool {
        matches!(self, Action::CreateClaim { .. } | Action::CreatePod(_))
    }
}

/// What to do next. `manage` is whether pods may be made and deleted.
pub fn plan(sight: &Sight<'_>, manage: bool) -> Plan {
    let update = match sight.history.settled() {
        Ok(update) => update,
        Err(lacking) => return Plan { step: Step::Revise(lacking), recheck: None },
    };
    let ranks = Ranks::of(sight, update);
    let pause = sight.spec.min_ready_seconds.unwrap_or(0);
    let mut plan = Plan { step: Step::Rest, recheck: next_available(sight.pods, pause, sight.now) };
    if manage && !sight.set.is_deleting() {
        let actions = ranks.act();
        if !actions.is_empty() {
            plan.step = Step::Act(actions);
            return plan;
        }
    }
    let status = ranks.status();
    let surplus = ranks.surplus();
    if sight.set.status.as_ref() != Some(&status) {
        plan.step = Step::Status(status);
    } else if !surplus.is_empty() && !sight.set.is_deleting() {
        plan.step = Step::Trim(surplus);
    }
    plan
}

/// A StatefulSet's pods by ordinal.
struct Ranks<'a> {
    sight: &'a Sight<'a>,
    update: &'a ControllerRevision,
    current: &'a ControllerRevision,
    start: i32,
    end: i32,
    pods: BTreeMap<i32, &'a Arc<Pod>>,
}

/// Nothing more may be done now.
struct Stop;

impl<'a> Ranks<'a> {
    fn of(sight: &'a Sight<'a>, update: &'a Arc<ControllerRevision>) -> Ranks<'a> {
        let status = sight.set.status.as_ref();
        let name = status.and_then(|status| status.current_revision.as_deref()).unwrap_or_default();
        let known = sight.history.old.iter().chain(&sight.history.current);
        let current = known.into_iter().find(|revision| revision.name() == name).unwrap_or(update);
        let start = sight.spec.ordinals.as_ref().and_then(|ordinals| ordinals.start).unwrap_or(0).max(0);
        let end = start.saturating_add(sight.spec.replicas.unwrap_or(1).max(0));
        let ranked = sight.pods.iter().filter_map(|pod| Some((ordinal(sight.set, pod)?, pod)));
        Ranks { sight, update, current, start, end, pods: ranked.collect() }
    }

    fn is_ordered(&self) -> bool {
        self.sight.spec.pod_management_policy.as_deref() != Some("Parallel")
    }

    fn rolling(&self) -> Option<Option<&RollingUpdateStatefulSetStrategy>> {
        let strategy = self.sight.spec.update_strategy.as_ref()?;
        (strategy.type_.as_deref() == Some("RollingUpdate")).then_some(strategy.rolling_update.as_ref())
    }

    /// The first ordinal that is updated.
    fn partition(&self) -> i32 {
        let partition = self.rolling().flatten().and_then(|rolling| rolling.partition).unwrap_or(0);
        self.start.saturating_add(partition.max(0))
    }

    /// The revision a pod of this ordinal is made from.
    fn wanted(&self, ordinal: i32) -> &'a ControllerRevision {
        let status = self.sight.set.status.as_ref();
        let current = status.and_then(|status| status.current_replicas).unwrap_or(0);
        let old = match self.rolling() {
            Some(None) => ordinal < self.start.saturating_add(current),
            Some(Some(_)) => ordinal < self.partition(),
            None => false,
        };
        if old { self.current } else { self.update }
    }

    fn is_available(&self, pod: &Pod) -> bool {
        is_available(pod, self.sight.spec.min_ready_seconds.unwrap_or(0), self.sight.now)
    }

    fn is_unavailable(&self, pod: Option<&Arc<Pod>>) -> bool {
        pod.is_none_or(|pod| pod.is_deleting() || !self.is_available(pod))
    }

    fn act(&self) -> Vec<Action> {
        let mut actions = Vec::new();
        for ordinal in self.start..self.end {
            let done = match self.pods.get(&ordinal) {
                Some(pod) => self.keep(ordinal, pod, &mut actions),
                None => self.make(ordinal, &mut actions),
            };
            if done.is_err() && self.is_ordered() {
                return actions;
            }
        }
        if self.condemn(&mut actions).is_ok() {
            self.roll(&mut actions);
        }
        actions
    }

    fn claim(&self, name: &str) -> Option<&'a Arc<PersistentVolumeClaim>> {
        self.sight.claims.iter().find(|claim| claim.name() == name)
    }

    /// Makes the pod of an ordinal, its claims first.
    fn make(&self, ordinal: i32, actions: &mut Vec<Action>) -> Result<(), Stop> {
        let name = pod_name(self.sight.set, ordinal);
        let wanted = claims(self.sight.set, self.sight.spec, ordinal);
        for claim in &wanted {
            let Some(known) = self.claim(claim.name()) else { continue };
            if is_stale(known, self.sight.spec, &name) {
                return Err(Stop);
            }
            if known.is_deleting() {
                let message = format!("pvc {} is being deleted", claim.name());
                actions.push(Action::Wait { pod: name, message });
                return Err(Stop);
            }
        }
        let missing = wanted.into_iter().filter(|claim| self.claim(claim.name()).is_none());
        actions.extend(missing.map(|claim| Action::CreateClaim { claim, pod: name.clone() }));
        let revision = self.wanted(ordinal);
        let template = self.template(revision);
        let pod = pods::pod(self.sight.set, self.sight.spec, &template, revision.name(), ordinal);
        actions.push(Action::CreatePod(Box::new(pod)));
        Err(Stop)
    }

    fn template(&self, revision: &ControllerRevision) -> PodTemplateSpec {
        // One that cannot be read was not written here; the present template is the best there is.
        history::template(revision).unwrap_or_else(|| self.sight.spec.template.clone())
    }

    /// Looks after a pod that should be there. In order, the others wait until it is well.
    fn keep(&self, ordinal: i32, pod: &Arc<Pod>, actions: &mut Vec<Action>) -> Result<(), Stop> {
        if is_terminal(pod) {
            actions.extend((!pod.is_deleting()).then(|| Action::DeletePod(pod.clone())));
            return Err(Stop);
        }
        if phase(pod) == "Pending" {
            let wanted = claims(self.sight.set, self.sight.spec, ordinal).into_iter();
            let missing = wanted.filter(|claim| self.claim(claim.name()).is_none());
            actions.extend(missing.map(|claim| Action::CreateClaim { claim, pod: pod.name().to_owned() }));
        }
        self.own_claims(ordinal, pod, actions);
        if pod.is_deleting() {
            return Err(Stop);
        }
        if !(phase(pod) == "Running" && is_ready(pod)) {
            // A pod of a template that has been given up would block its own replacement for ever.
            let given_up = pod.label(POD_REVISION) != Some(self.wanted(ordinal).name());
            if self.is_ordered() && self.rolling().is_some() && given_up && is_stuck(pod) {
                actions.push(Action::DeletePod(pod.clone()));
            }
            return Err(Stop);
        }
        if !self.is_available(pod) {
            return Err(Stop);
        }
        if !is_labelled(pod) {
            actions.push(Action::LabelPod { pod: pod.clone(), ordinal });
        }
        Ok(())
    }

    /// Lets claims belong to whatever they should go with.
    fn own_claims(&self, ordinal: i32, pod: &Pod, actions: &mut Vec<Action>) {
        let stays = (self.start..self.end).contains(&ordinal);
        for claim in claims(self.sight.set, self.sight.spec, ordinal) {
            let Some(known) = self.claim(claim.name()) else { continue };
            if let Some(owners) = owners(known, self.sight.set, self.sight.spec, pod, stays) {
                let mut owned = PersistentVolumeClaim::clone(known);
                owned.metadata.owner_references = Some(owners).filter(|owners| !owners.is_empty());
                actions.push(Action::OwnClaim(owned));
            }
        }
    }

    /// Lets pods go that are not wanted any more, the highest ordinal first.
    fn condemn(&self, actions: &mut Vec<Action>) -> Result<(), Stop> {
        let wanted = self.start..self.end;
        let condemned: Vec<(i32, &Arc<Pod>)> = self
            .pods
            .iter()
            .rev()
            .filter(|(ordinal, _)| !wanted.contains(ordinal))
            .map(|(o, p)| (*o, *p))
            .collect();
        for (ordinal, pod) in &condemned {
            self.own_claims(*ordinal, pod, actions);
        }
        if !self.is_ordered() {
            let going = condemned.iter().filter(|(_, pod)| !pod.is_deleting());
            actions.extend(going.map(|(_, pod)| Action::DeletePod(Arc::clone(pod))));
            return Ok(());
        }
        let Some((ordinal, last)) = condemned.first() else { return Ok(()) };
        if last.is_deleting() {
            return Err(Stop);
        }
        // One that is not well goes only if none of a lower ordinal is not well either, or if it can never be well
        // again: waiting for that would be for ever.
        let mut ill = condemned.iter().rev().filter(|(_, pod)| self.is_unavailable(Some(pod)));
        let first_ill = ill.next().map(|(ordinal, _)| *ordinal);
        let well = phase(last) == "Running" && self.is_available(last);
        let given_up = last.label(POD_REVISION) != Some(self.wanted(*ordinal).name());
        let hopeless = is_terminal(last) || given_up && is_stuck(last);
        if well || hopeless || first_ill == condemned.first().map(|(ordinal, _)| *ordinal) {
            actions.push(Action::DeletePod(Arc::clone(last)));
        }
        Err(Stop)
    }

    /// Deletes pods of another revision, the highest ordinal first, as far as enough are left.
    fn roll(&self, actions: &mut Vec<Action>) {
        let Some(rolling) = self.rolling() else { return };
        let is_old =
            |pod: &Arc<Pod>| !pod.is_deleting() && pod.label(POD_REVISION) != Some(self.update.name());
        let limit = rolling.and_then(|rolling| rolling.max_unavailable.as_ref());
        let replicas = self.end - self.start;
        let limit = limit.and_then(|limit| percent::of(limit, replicas, Round::Down)).unwrap_or(1).max(1);
        let ill =
            (self.start..self.end).filter(|ordinal| self.is_unavailable(self.pods.get(ordinal).copied()));
        let mut left = if limit > 1 { limit - i32::try_from(ill.count()).unwrap_or(i32::MAX) } else { 1 };
        for ordinal in (self.partition()..self.end).rev() {
            if left <= 0 {
                return;
            }
            let Some(pod) = self.pods.get(&ordinal) else {
                if limit == 1 {
                    return;
                }
                continue;
            };
            let known =
                |action: &Action| matches!(action, Action::DeletePod(other) if other.uid() == pod.uid());
            if is_old(pod) && !actions.iter().any(known) {
                actions.push(Action::DeletePod(Arc::clone(pod)));
                left -= 1;
            } else if limit == 1 && self.is_unavailable(Some(pod)) {
                return;
            }
        }
    }

    fn status(&self) -> StatefulSetStatus {
        let count = |counts: &dyn Fn(&Pod) -> bool| {
            i32::try_from(self.pods.values().filter(|pod| counts(pod)).count()).unwrap_or(i32::MAX)
        };
        let of = |revision: &ControllerRevision| {
            count(&|pod| !pod.is_deleting() && pod.label(POD_REVISION) == Some(revision.name()))
        };
        let number = |count: i32| Some(count).filter(|count| *count != 0);
        let running = |pod: &Pod| phase(pod) == "Running" && is_ready(pod);
        let before = self.sight.set.status.clone().unwrap_or_default();
        let (replicas, ready, updated) =
            (count(&|pod| !phase(pod).is_empty()), count(&running), of(self.update));
        let mut status = StatefulSetStatus {
            replicas,
            ready_replicas: number(ready),
            available_replicas: Some(count(&|pod| running(pod) && self.is_available(pod))),
            current_replicas: number(of(self.current)),
            updated_replicas: number(updated),
            current_revision: Some(self.current.name().to_owned()),
            update_revision: Some(self.update.name().to_owned()),
            collision_count: before.collision_count.or(Some(0)),
            observed_generation: self.sight.set.metadata.generation,
            conditions: before.conditions,
        };
        let all = self.end - self.start;
        if self.rolling().is_some() && updated == all && ready == all && replicas == all {
            status.current_replicas = status.updated_replicas;
            status.current_revision = status.update_revision.clone();
        }
        status
    }

    /// The oldest revisions that neither the set nor a pod uses, beyond those to keep.
    fn surplus(&self) -> Vec<Arc<ControllerRevision>> {
        let used = |revision: &ControllerRevision| {
            let name = revision.name();
            name == self.current.name()
                || name == self.update.name()
                || self.sight.pods.iter().any(|pod| pod.label(POD_REVISION) == Some(name))
        };
        let unused: Vec<_> = self.sight.history.old.iter().filter(|old| !used(old)).cloned().collect();
        history::surplus(&unused, self.sight.spec.revision_history_limit, |_| false)
            .into_iter()
            .cloned()
            .collect()
    }
}
