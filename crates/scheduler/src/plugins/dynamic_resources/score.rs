//! Nodes where requests with alternatives get what they would rather have are better.

use k8s_openapi::api::resource::v1 as resource;

use super::allocate::Plan;
use super::{Claim, DynamicResources, allocation, claims_of};
use crate::framework::{Cycle, PreScore, Score, Scoring, normalized};
use crate::state::{NodeId, NodeInfo};

/// So many alternatives a request may have.
const MOST_WAYS: i64 = 8;

impl PreScore for DynamicResources {
    fn pre_score<'c>(&'c self, cycle: &Cycle<'c>, _: &[NodeId]) -> Scoring<'c> {
        if cycle.pod.claims.is_empty() {
            return Scoring::Skip;
        }
        // Whether they are there was asked before.
        let claims = claims_of(cycle.pod, &cycle.state.objects).unwrap_or_default();
        if !claims.iter().any(|claim| alternatives(claim).next().is_some()) {
            return Scoring::Skip;
        }
        let (given, open): (Vec<Claim>, Vec<Claim>) =
            claims.into_iter().partition(|claim| allocation(claim).is_some());
        match Plan::new(&open, &cycle.state.objects) {
            Ok(plan) => Scoring::Score(Box::new(Preference {
                everywhere: given.iter().map(|claim| worth(claim, allocation(claim))).sum(),
                open,
                plan,
            })),
            Err(words) => Scoring::Fail(words),
        }
    }
}

struct Preference<'o> {
    /// Of what is allocated already.
    everywhere: i64,
    open: Vec<Claim>,
    plan: Plan<'o>,
}

impl Score for Preference<'_> {
    fn score(&self, node: &NodeInfo) -> i64 {
        let Ok(Some(given)) = self.plan.allocate(node) else { return 0 };
        let here: i64 = self.open.iter().zip(&given).map(|(claim, given)| worth(claim, Some(given))).sum();
        self.everywhere + here
    }

    fn normalize(&self, _: &[NodeId], scores: &mut [i64]) {
        normalized(scores, false);
    }
}

/// Requests that name several ways to be met.
fn alternatives(claim: &resource::ResourceClaim) -> impl Iterator<Item = &resource::DeviceRequest> {
    let requests = claim.spec.devices.iter().flat_map(|devices| devices.requests.iter().flatten());
    requests.filter(|request| request.first_available.as_ref().is_some_and(|ways| !ways.is_empty()))
}

/// The earlier the way that was gone is named, the more.
fn worth(claim: &resource::ResourceClaim, given: Option<&resource::AllocationResult>) -> i64 {
    let results =
        given.and_then(|given| given.devices.as_ref()).and_then(|devices| devices.results.as_deref());
    let went = |name: &str| results.unwrap_or_default().iter().any(|result| result.request == name);
    let mut sum = 0;
    for request in alternatives(claim) {
        for (way, rank) in request.first_available.iter().flatten().zip((1..=MOST_WAYS).rev()) {
            if went(&format!("{}/{}", request.name, way.name)) {
                sum += rank;
            }
        }
    }
    sum
}
