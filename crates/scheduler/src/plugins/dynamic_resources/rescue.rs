//! What helps a pod that no node would do for: a claim given back may be allocated elsewhere.

use super::{DynamicResources, NAME, allocation, claims_of, extended, users};
use crate::framework::{Attempt, Chore, PostFilter, Rescue, Status};
use crate::state::selection::NodeSelector;

impl PostFilter for DynamicResources {
    fn post_filter(&self, attempt: &mut Attempt<'_, '_>) -> Rescue {
        let (state, pod) = (attempt.cycle.state, attempt.cycle.pod);
        let nothing = |words| Rescue::Nothing { status: Status::unschedulable(words), clear: false };
        let claims = claims_of(pod, &state.objects).unwrap_or_default();
        if claims.is_empty() && extended::backed(pod, &state.objects).is_empty() {
            return nothing("no new claims to deallocate");
        }
        let later = |words, chore| Rescue::Later { status: Status::unschedulable(words), chore };
        for claim in claims {
            let free = users(&claim).iter().all(|user| user.uid == *pod.uid) && users(&claim).len() < 2;
            let selector = allocation(&claim).and_then(|allocated| allocated.node_selector.as_ref());
            let Some(place) = selector.map(NodeSelector::new).filter(|_| free) else { continue };
            let mut turned_away = attempt.diagnosis.nodes.iter().filter(|(_, status)| status.plugin == NAME);
            if turned_away.any(|(node, _)| !place.matches(state.node(*node))) {
                return later("deallocation of ResourceClaim completed", Chore::Release(claim));
            }
        }
        match extended::left_over(pod, &state.objects) {
            Some(claim) => later("deletion of ResourceClaim completed", Chore::Delete(claim)),
            None => nothing("still not schedulable"),
        }
    }
}
