//! PostFilter: deallocates an unused claim that is allocated where the pod does not fit, so that it can be
//! allocated elsewhere.

use super::{DynamicResources, NAME, allocation, claims_of, extended_resources, reserved_for};
use crate::framework::{CleanupTask, PostFilter, PostFilterContext, PostFilterResult, Status};
use crate::state::selection::NodeSelector;

impl PostFilter for DynamicResources {
    fn post_filter(&self, attempt: &mut PostFilterContext<'_, '_>) -> PostFilterResult {
        let (state, pod) = (attempt.cycle.state, attempt.cycle.pod);
        let rejected = |message| PostFilterResult::Rejected {
            status: Status::unschedulable(message),
            clear_nomination: false,
        };
        let claims = claims_of(pod, &state.objects).unwrap_or_default();
        if claims.is_empty()
            && extended_resources::resources_with_device_class(pod, &state.objects).is_empty()
        {
            return rejected("no new claims to deallocate");
        }
        let with_cleanup =
            |message, task| PostFilterResult::Cleanup { status: Status::unschedulable(message), task };
        for claim in claims {
            let is_unused = reserved_for(&claim).iter().all(|user| user.uid == *pod.uid)
                && reserved_for(&claim).len() < 2;
            let selector = allocation(&claim).and_then(|allocated| allocated.node_selector.as_ref());
            let Some(node_selector) = selector.map(NodeSelector::new).filter(|_| is_unused) else { continue };
            let mut rejected_nodes =
                attempt.diagnosis.nodes.iter().filter(|(_, status)| status.plugin == NAME);
            if rejected_nodes.any(|(node, _)| !node_selector.matches(state.node(*node))) {
                return with_cleanup("deallocation of ResourceClaim completed", CleanupTask::Release(claim));
            }
        }
        match extended_resources::find_leftover_claim(pod, &state.objects) {
            Some(claim) => with_cleanup("deletion of ResourceClaim completed", CleanupTask::Delete(claim)),
            None => rejected("still not schedulable"),
        }
    }
}
