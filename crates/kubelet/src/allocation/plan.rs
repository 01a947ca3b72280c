//! Decides whose resize there is room for, and whose turn it is. Pure.

use std::cmp::Reverse;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use reconcile::Object as _;
use schema::quantity::Quantity;

use super::Allocation;
use crate::admission::{Refusal, requests};
use crate::pod::needs;

/// A pod of the node that has been let in.
pub struct Present {
    /// As it asks for itself.
    pub pod: Arc<Pod>,
    /// What was agreed to; what it asks for where nothing was written down.
    pub allocated: Option<Allocation>,
    /// How long it has been waiting for something else.
    pub since: Option<Timestamp>,
}

impl Present {
    fn has(&self) -> Arc<Pod> {
        match &self.allocated {
            Some(allocated) => allocated.shared(&self.pod),
            None => self.pod.clone(),
        }
    }

    fn wants_other(&self) -> bool {
        let differs = self.allocated.as_ref().is_some_and(|allocated| allocated.differs(&self.pod));
        differs && !self.pod.is_deleting()
    }
}

/// Those who want something else than they have, in their order, each with what speaks against it. Whoever is given
/// something leaves the others what is left.
pub fn decide(
    present: &[Present],
    judge: impl Fn(&Pod, &[Arc<Pod>]) -> Option<Refusal>,
) -> Vec<(&Arc<Pod>, Option<Refusal>)> {
    let mut have: Vec<Arc<Pod>> = present.iter().map(Present::has).collect();
    let mut waiting: Vec<usize> = (0..present.len()).filter(|place| present[*place].wants_other()).collect();
    waiting.sort_by_cached_key(|place| turn(&present[*place], &have[*place]));
    let decided = waiting.into_iter().map(|place| {
        let pod = &present[place].pod;
        let others: Vec<Arc<Pod>> = have.iter().filter(|other| other.uid() != pod.uid()).cloned().collect();
        let refusal = judge(pod, &others);
        if refusal.is_none() {
            have[place] = pod.clone();
        }
        (pod, refusal)
    });
    decided.collect()
}

/// Whose turn it is: those first who want no more than they have, which always works out; then by priority; those next who
/// were promised all that they may use; and among equals whoever has been waiting longest.
fn turn(one: &Present, has: &Pod) -> impl Ord + use<> {
    let (wanted, before) = (requests(&needs(&one.pod)), requests(&needs(has)));
    let grows = ["cpu", "memory"].iter().any(|name| {
        let amount = |list: &api::resources::ResourceList| list.get(*name).copied().unwrap_or(Quantity::ZERO);
        amount(&wanted) > amount(&before)
    });
    let priority = one.pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0);
    let is_guaranteed = crate::cgroups::class(&one.pod) == "Guaranteed";
    (grows, Reverse(priority), !is_guaranteed, one.since.is_none(), one.since)
}
