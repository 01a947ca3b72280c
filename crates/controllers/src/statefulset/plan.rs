//! Decides which pods of a StatefulSet are created, deleted or updated next, and its status. Does no I/O.
//!
//! Pods of one ordinal share a name, so a pod is recreated only once the old one is gone. With
//! `OrderedReady`, nothing is done before all pods of lower ordinals are running and ready, and pods are
//! deleted from the highest ordinal down. With `Parallel`, only updates keep an order.

use std::collections::BTreeMap;
use std::sync::Arc;

use api::intstr::RoundingMode;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{
    ControllerRevision, RollingUpdateStatefulSetStrategy, StatefulSet, StatefulSetSpec, StatefulSetStatus,
};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, PodTemplateSpec};
use reconcile::Object as _;

use super::claims::{desired_owners, is_stale, pod_claims};
use super::pods::{self, has_pod_name_label, ordinal, pod_name, was_never_ready};
use crate::history::{self, History, MissingRevision, POD_REVISION};
use crate::percent;
use crate::pod::{is_available, is_ready, is_terminal, next_available, phase};

/// Everything the plan depends on.
pub struct StatefulSetSnapshot<'a> {
    pub set: &'a StatefulSet,
    pub spec: &'a StatefulSetSpec,
    /// The pods owned by the set.
    pub pods: &'a [Arc<Pod>],
    /// The claims in its namespace whose names are those of its pods' claims.
    pub claims: &'a [Arc<PersistentVolumeClaim>],
    pub history: &'a History,
    pub now: Timestamp,
}

/// The next step, and when to sync again.
#[derive(Debug, Default, PartialEq)]
pub struct Plan {
    pub step: Step,
    pub requeue_at: Option<Timestamp>,
}

#[derive(Debug, Default, PartialEq)]
pub enum Step {
    #[default]
    Done,
    Revise(MissingRevision),
    /// Apply these actions in order. A failure stops the sequence.
    Apply(Vec<Action>),
    TruncateHistory(Vec<Arc<ControllerRevision>>),
    Status(StatefulSetStatus),
}

#[derive(Debug, PartialEq)]
pub enum Action {
    CreateClaim {
        claim: PersistentVolumeClaim,
        pod: String,
    },
    /// Update the owner references of a claim.
    UpdateClaimOwners(PersistentVolumeClaim),
    CreatePod(Box<Pod>),
    DeletePod(Arc<Pod>),
    /// Add the missing identity labels to a pod.
    LabelPod {
        pod: Arc<Pod>,
        ordinal: i32,
    },
    /// The pod cannot be created yet. Emits a warning event.
    Wait {
        pod: String,
        message: String,
    },
}

impl Action {
    /// Whether the action creates an object for the set.
    pub fn is_create(&self) -> bool {
        matches!(self, Action::CreateClaim { .. } | Action::CreatePod(_))
    }
}

/// Plans the next step. `may_change_pods` is whether pods may be created and deleted; it is true once per
/// sync.
pub fn plan(snapshot: &StatefulSetSnapshot<'_>, may_change_pods: bool) -> Plan {
    let update = match snapshot.history.current_revision() {
        Ok(update) => update,
        Err(missing_revision) => return Plan { step: Step::Revise(missing_revision), requeue_at: None },
    };
    let by_ordinal = PodsByOrdinal::of(snapshot, update);
    let pause = snapshot.spec.min_ready_seconds.unwrap_or(0);
    let mut plan = Plan { step: Step::Done, requeue_at: next_available(snapshot.pods, pause, snapshot.now) };
    if may_change_pods && !snapshot.set.is_deleting() {
        let actions = by_ordinal.plan_actions();
        if !actions.is_empty() {
            plan.step = Step::Apply(actions);
            return plan;
        }
    }
    let status = by_ordinal.status();
    let surplus = by_ordinal.surplus_revisions();
    if snapshot.set.status.as_ref() != Some(&status) {
        plan.step = Step::Status(status);
    } else if !surplus.is_empty() && !snapshot.set.is_deleting() {
        plan.step = Step::TruncateHistory(surplus);
    }
    plan
}

/// The pods of a StatefulSet by ordinal.
struct PodsByOrdinal<'a> {
    snapshot: &'a StatefulSetSnapshot<'a>,
    update: &'a ControllerRevision,
    current: &'a ControllerRevision,
    start: i32,
    end: i32,
    pods: BTreeMap<i32, &'a Arc<Pod>>,
}

/// No further actions are possible in this sync.
struct Stop;

impl<'a> PodsByOrdinal<'a> {
    fn of(snapshot: &'a StatefulSetSnapshot<'a>, update: &'a Arc<ControllerRevision>) -> PodsByOrdinal<'a> {
        let status = snapshot.set.status.as_ref();
        let name = status.and_then(|status| status.current_revision.as_deref()).unwrap_or_default();
        let known = snapshot.history.old.iter().chain(&snapshot.history.current);
        let current = known.into_iter().find(|revision| revision.name() == name).unwrap_or(update);
        let start = snapshot.spec.ordinals.as_ref().and_then(|ordinals| ordinals.start).unwrap_or(0).max(0);
        let end = start.saturating_add(snapshot.spec.replicas.unwrap_or(1).max(0));
        let with_ordinals = snapshot.pods.iter().filter_map(|pod| Some((ordinal(snapshot.set, pod)?, pod)));
        PodsByOrdinal { snapshot, update, current, start, end, pods: with_ordinals.collect() }
    }

    fn is_ordered(&self) -> bool {
        self.snapshot.spec.pod_management_policy.as_deref() != Some("Parallel")
    }

    fn rolling_update_strategy(&self) -> Option<Option<&RollingUpdateStatefulSetStrategy>> {
        let strategy = self.snapshot.spec.update_strategy.as_ref()?;
        (strategy.type_.as_deref() == Some("RollingUpdate")).then_some(strategy.rolling_update.as_ref())
    }

    /// The lowest ordinal that is updated.
    fn partition(&self) -> i32 {
        let partition =
            self.rolling_update_strategy().flatten().and_then(|rolling| rolling.partition).unwrap_or(0);
        self.start.saturating_add(partition.max(0))
    }

    /// The revision that a pod of this ordinal is created from.
    fn target_revision(&self, ordinal: i32) -> &'a ControllerRevision {
        let status = self.snapshot.set.status.as_ref();
        let current = status.and_then(|status| status.current_replicas).unwrap_or(0);
        let old = match self.rolling_update_strategy() {
            Some(None) => ordinal < self.start.saturating_add(current),
            Some(Some(_)) => ordinal < self.partition(),
            None => false,
        };
        if old { self.current } else { self.update }
    }

    fn is_available(&self, pod: &Pod) -> bool {
        is_available(pod, self.snapshot.spec.min_ready_seconds.unwrap_or(0), self.snapshot.now)
    }

    fn is_unavailable(&self, pod: Option<&Arc<Pod>>) -> bool {
        pod.is_none_or(|pod| pod.is_deleting() || !self.is_available(pod))
    }

    fn plan_actions(&self) -> Vec<Action> {
        let mut actions = Vec::new();
        for ordinal in self.start..self.end {
            let done = match self.pods.get(&ordinal) {
                Some(pod) => self.sync_pod(ordinal, pod, &mut actions),
                None => self.create_pod(ordinal, &mut actions),
            };
            if done.is_err() && self.is_ordered() {
                return actions;
            }
        }
        if self.scale_down(&mut actions).is_ok() {
            self.update_pods(&mut actions);
        }
        actions
    }

    fn claim(&self, name: &str) -> Option<&'a Arc<PersistentVolumeClaim>> {
        self.snapshot.claims.iter().find(|claim| claim.name() == name)
    }

    /// Creates the pod of an ordinal, after its missing claims.
    fn create_pod(&self, ordinal: i32, actions: &mut Vec<Action>) -> Result<(), Stop> {
        let name = pod_name(self.snapshot.set, ordinal);
        let desired = pod_claims(self.snapshot.set, self.snapshot.spec, ordinal);
        for claim in &desired {
            let Some(known) = self.claim(claim.name()) else { continue };
            if is_stale(known, self.snapshot.spec, &name) {
                return Err(Stop);
            }
            if known.is_deleting() {
                let message = format!("pvc {} is being deleted", claim.name());
                actions.push(Action::Wait { pod: name, message });
                return Err(Stop);
            }
        }
        let missing = desired.into_iter().filter(|claim| self.claim(claim.name()).is_none());
        actions.extend(missing.map(|claim| Action::CreateClaim { claim, pod: name.clone() }));
        let revision = self.target_revision(ordinal);
        let template = self.template(revision);
        let pod = pods::pod(self.snapshot.set, self.snapshot.spec, &template, revision.name(), ordinal);
        actions.push(Action::CreatePod(Box::new(pod)));
        Err(Stop)
    }

    fn template(&self, revision: &ControllerRevision) -> PodTemplateSpec {
        // An unreadable revision was not written by this controller. The current template is the best
        // fallback.
        history::template(revision).unwrap_or_else(|| self.snapshot.spec.template.clone())
    }

    /// Syncs an existing pod within the replicas. With `OrderedReady`, higher ordinals wait until it is
    /// healthy.
    fn sync_pod(&self, ordinal: i32, pod: &Arc<Pod>, actions: &mut Vec<Action>) -> Result<(), Stop> {
        if is_terminal(pod) {
            actions.extend((!pod.is_deleting()).then(|| Action::DeletePod(pod.clone())));
            return Err(Stop);
        }
        if phase(pod) == "Pending" {
            let desired = pod_claims(self.snapshot.set, self.snapshot.spec, ordinal).into_iter();
            let missing = desired.filter(|claim| self.claim(claim.name()).is_none());
            actions.extend(missing.map(|claim| Action::CreateClaim { claim, pod: pod.name().to_owned() }));
        }
        self.update_claim_owners(ordinal, pod, actions);
        if pod.is_deleting() {
            return Err(Stop);
        }
        if !(phase(pod) == "Running" && is_ready(pod)) {
            // A pod of an outdated template that never becomes ready would block its own replacement forever.
            let given_up = pod.label(POD_REVISION) != Some(self.target_revision(ordinal).name());
            if self.is_ordered()
                && self.rolling_update_strategy().is_some()
                && given_up
                && was_never_ready(pod)
            {
                actions.push(Action::DeletePod(pod.clone()));
            }
            return Err(Stop);
        }
        if !self.is_available(pod) {
            return Err(Stop);
        }
        if !has_pod_name_label(pod) {
            actions.push(Action::LabelPod { pod: pod.clone(), ordinal });
        }
        Ok(())
    }

    /// Updates the owners of a pod's claims by the retention policy.
    fn update_claim_owners(&self, ordinal: i32, pod: &Pod, actions: &mut Vec<Action>) {
        let stays = (self.start..self.end).contains(&ordinal);
        for claim in pod_claims(self.snapshot.set, self.snapshot.spec, ordinal) {
            let Some(known) = self.claim(claim.name()) else { continue };
            if let Some(owners) = desired_owners(known, self.snapshot.set, self.snapshot.spec, pod, stays) {
                let mut owned = PersistentVolumeClaim::clone(known);
                owned.metadata.owner_references = Some(owners).filter(|owners| !owners.is_empty());
                actions.push(Action::UpdateClaimOwners(owned));
            }
        }
    }

    /// Deletes pods outside of the replicas, highest ordinal first.
    fn scale_down(&self, actions: &mut Vec<Action>) -> Result<(), Stop> {
        let desired = self.start..self.end;
        let condemned: Vec<(i32, &Arc<Pod>)> = self
            .pods
            .iter()
            .rev()
            .filter(|(ordinal, _)| !desired.contains(ordinal))
            .map(|(o, p)| (*o, *p))
            .collect();
        for (ordinal, pod) in &condemned {
            self.update_claim_owners(*ordinal, pod, actions);
        }
        if !self.is_ordered() {
            let remaining = condemned.iter().filter(|(_, pod)| !pod.is_deleting());
            actions.extend(remaining.map(|(_, pod)| Action::DeletePod(Arc::clone(pod))));
            return Ok(());
        }
        let Some((ordinal, last)) = condemned.first() else { return Ok(()) };
        if last.is_deleting() {
            return Err(Stop);
        }
        // An unhealthy pod is deleted only if no pod of a lower ordinal is unhealthy, or if it can never
        // become healthy, because waiting for it would block forever.
        let mut unavailable = condemned.iter().rev().filter(|(_, pod)| self.is_unavailable(Some(pod)));
        let first_unavailable = unavailable.next().map(|(ordinal, _)| *ordinal);
        let is_healthy = phase(last) == "Running" && self.is_available(last);
        let given_up = last.label(POD_REVISION) != Some(self.target_revision(*ordinal).name());
        let never_ready = is_terminal(last) || given_up && was_never_ready(last);
        if is_healthy || never_ready || first_unavailable == condemned.first().map(|(ordinal, _)| *ordinal) {
            actions.push(Action::DeletePod(Arc::clone(last)));
        }
        Err(Stop)
    }

    /// Deletes pods of outdated revisions, highest ordinal first, within `maxUnavailable`.
    fn update_pods(&self, actions: &mut Vec<Action>) {
        let Some(rolling) = self.rolling_update_strategy() else { return };
        let is_old =
            |pod: &Arc<Pod>| !pod.is_deleting() && pod.label(POD_REVISION) != Some(self.update.name());
        let limit = rolling.and_then(|rolling| rolling.max_unavailable.as_ref());
        let replicas = self.end - self.start;
        let limit = limit
            .and_then(|limit| percent::scaled_value(limit, replicas, RoundingMode::Down))
            .unwrap_or(1)
            .max(1);
        let unavailable =
            (self.start..self.end).filter(|ordinal| self.is_unavailable(self.pods.get(ordinal).copied()));
        let mut left =
            if limit > 1 { limit - i32::try_from(unavailable.count()).unwrap_or(i32::MAX) } else { 1 };
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
        let before = self.snapshot.set.status.clone().unwrap_or_default();
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
            observed_generation: self.snapshot.set.metadata.generation,
            conditions: before.conditions,
        };
        let all = self.end - self.start;
        if self.rolling_update_strategy().is_some() && updated == all && ready == all && replicas == all {
            status.current_replicas = status.updated_replicas;
            status.current_revision = status.update_revision.clone();
        }
        status
    }

    /// The oldest revisions beyond the history limit that neither the set nor a pod uses.
    fn surplus_revisions(&self) -> Vec<Arc<ControllerRevision>> {
        let used = |revision: &ControllerRevision| {
            let name = revision.name();
            name == self.current.name()
                || name == self.update.name()
                || self.snapshot.pods.iter().any(|pod| pod.label(POD_REVISION) == Some(name))
        };
        let unused: Vec<_> = self.snapshot.history.old.iter().filter(|old| !used(old)).cloned().collect();
        history::revisions_over_limit(&unused, self.snapshot.spec.revision_history_limit, |_| false)
            .into_iter()
            .cloned()
            .collect()
    }
}
