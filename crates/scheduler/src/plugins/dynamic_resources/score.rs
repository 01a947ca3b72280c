//! Scoring of prioritized lists: prefers nodes where requests get an earlier alternative.

use k8s_openapi::api::resource::v1 as resource;

use super::allocator::Allocator;
use super::{Claim, DynamicResources, allocation, claims_of};
use crate::framework::{Cycle, PreScore, PreScoreResult, Score, default_normalize_score};
use crate::state::{NodeId, NodeInfo};

/// How many alternatives a request may have (upstream's `FirstAvailableDeviceRequestMaxSize`).
const FIRST_AVAILABLE_MAX_SIZE: i64 = 8;

impl PreScore for DynamicResources {
    fn pre_score<'c>(&'c self, cycle: &Cycle<'c>, _: &[NodeId]) -> PreScoreResult<'c> {
        if cycle.pod.claims.is_empty() {
            return PreScoreResult::Skip;
        }
        // PreFilter has rejected the pod if a claim is missing.
        let claims = claims_of(cycle.pod, &cycle.state.objects).unwrap_or_default();
        if !claims.iter().any(|claim| prioritized_requests(claim).next().is_some()) {
            return PreScoreResult::Skip;
        }
        let (given, pending): (Vec<Claim>, Vec<Claim>) =
            claims.into_iter().partition(|claim| allocation(claim).is_some());
        match Allocator::new(&pending, &cycle.state.objects) {
            Ok(allocator) => PreScoreResult::Score(Box::new(PrioritizedListScore {
                allocated_score: given.iter().map(|claim| claim_score(claim, allocation(claim))).sum(),
                pending,
                allocator,
            })),
            Err(message) => PreScoreResult::Error(message),
        }
    }
}

struct PrioritizedListScore<'o> {
    /// Score of the claims that are allocated already; the same on every node.
    allocated_score: i64,
    pending: Vec<Claim>,
    allocator: Allocator<'o>,
}

impl Score for PrioritizedListScore<'_> {
    fn score(&self, node: &NodeInfo) -> i64 {
        let Ok(Some(given)) = self.allocator.allocate(node) else { return 0 };
        let node_score: i64 =
            self.pending.iter().zip(&given).map(|(claim, given)| claim_score(claim, Some(given))).sum();
        self.allocated_score + node_score
    }

    fn normalize(&self, _: &[NodeId], scores: &mut [i64]) {
        default_normalize_score(scores, false);
    }
}

/// Returns the requests with alternatives.
fn prioritized_requests(claim: &resource::ResourceClaim) -> impl Iterator<Item = &resource::DeviceRequest> {
    let requests = claim.spec.devices.iter().flat_map(|devices| devices.requests.iter().flatten());
    requests.filter(|request| {
        request.first_available.as_ref().is_some_and(|sub_requests| !sub_requests.is_empty())
    })
}

/// Score of a claim: the earlier the allocated alternative, the higher.
fn claim_score(claim: &resource::ResourceClaim, given: Option<&resource::AllocationResult>) -> i64 {
    let results =
        given.and_then(|given| given.devices.as_ref()).and_then(|devices| devices.results.as_deref());
    let is_allocated = |name: &str| results.unwrap_or_default().iter().any(|result| result.request == name);
    let mut sum = 0;
    for request in prioritized_requests(claim) {
        for (sub_request, rank) in
            request.first_available.iter().flatten().zip((1..=FIRST_AVAILABLE_MAX_SIZE).rev())
        {
            if is_allocated(&format!("{}/{}", request.name, sub_request.name)) {
                sum += rank;
            }
        }
    }
    sum
}
