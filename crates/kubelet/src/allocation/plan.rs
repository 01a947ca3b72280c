//! Decides whose resize there is room for, and whose turn it is. Pure.

use std::cmp::Reverse;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use reconcile::Object as _;
use schema::quantity::Quantity;

use super::Allocation;
use crate::admission::{AdmissionFailure, requests};
use crate::pod::resource_spec;

/// A pod of the node that has been let in.
pub struct AdmittedPod {
    /// As it asks for itself.
    pub pod: Arc<Pod>,
    /// What was agreed to; what it asks for where nothing was written down.
    pub allocated: Option<Allocation>,
    /// How long it has been waiting for something else.
    pub since: Option<Timestamp>,
}

impl AdmittedPod {
    fn allocated_pod(&self) -> Arc<Pod> {
        match &self.allocated {
            Some(allocated) => allocated.apply_to_shared(&self.pod),
            None => self.pod.clone(),
        }
    }

    fn needs_resize(&self) -> bool {
        let differs = self.allocated.as_ref().is_some_and(|allocated| allocated.differs(&self.pod));
        differs && !self.pod.is_deleting()
    }
}

/// Those who want something else than they have, in their order, each with what speaks against it. Whoever is given
/// something leaves the others what is left.
pub fn evaluate_resizes(
    present: &[AdmittedPod],
    admit: impl Fn(&Pod, &[Arc<Pod>]) -> Option<AdmissionFailure>,
) -> Vec<(&Arc<Pod>, Option<AdmissionFailure>)> {
    let mut allocated: Vec<Arc<Pod>> = present.iter().map(AdmittedPod::allocated_pod).collect();
    let mut pending: Vec<usize> = (0..present.len()).filter(|index| present[*index].needs_resize()).collect();
    pending.sort_by_cached_key(|index| resize_order(&present[*index], &allocated[*index]));
    let results = pending.into_iter().map(|index| {
        let pod = &present[index].pod;
        let others: Vec<Arc<Pod>> =
            allocated.iter().filter(|other| other.uid() != pod.uid()).cloned().collect();
        let rejection = admit(pod, &others);
        if rejection.is_none() {
            allocated[index] = pod.clone();
        }
        (pod, rejection)
    });
    results.collect()
}

/// Whose turn it is: those first who want no more than they have, which always works out; then by priority; those next who
/// were promised all that they may use; and among equals whoever has been waiting longest.
fn resize_order(admitted: &AdmittedPod, has: &Pod) -> impl Ord + use<> {
    let (requested, current) = (requests(&resource_spec(&admitted.pod)), requests(&resource_spec(has)));
    let needs_more = ["cpu", "memory"].iter().any(|name| {
        let amount = |list: &api::resources::ResourceList| list.get(*name).copied().unwrap_or(Quantity::ZERO);
        amount(&requested) > amount(&current)
    });
    let priority = admitted.pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0);
    let is_guaranteed = crate::cgroups::qos_class(&admitted.pod) == "Guaranteed";
    (needs_more, Reverse(priority), !is_guaranteed, admitted.since.is_none(), admitted.since)
}
