//! Decides which pending resizes fit and in which order they are evaluated. Does no I/O.

use std::cmp::Reverse;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use reconcile::Object as _;
use schema::quantity::Quantity;

use super::Allocation;
use crate::admission::{AdmissionFailure, requests};
use crate::pod::resource_spec;

/// A pod that is admitted to this node.
pub struct AdmittedPod {
    /// With the resources of its spec.
    pub pod: Arc<Pod>,
    /// The allocated resources. `None`: the resources of the spec.
    pub allocated: Option<Allocation>,
    /// When the resize became pending.
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

/// Evaluates the pods that need a resize in order, each with the reason why it does not fit. A
/// resize that fits reduces what is left for the next ones.
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

/// The order of evaluation: first decreases, which always fit, then by priority, then guaranteed
/// pods, then by waiting time.
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
