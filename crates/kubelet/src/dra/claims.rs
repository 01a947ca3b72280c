//! Resolves the claims of a pod and of its containers, and checks that the pod may use them. Does
//! no I/O.

use k8s_openapi::api::core::v1::{Container, Pod, PodResourceClaim};
use k8s_openapi::api::resource::v1::ResourceClaim;
use reconcile::Object as _;

/// A ResourceClaim of a pod.
#[derive(Clone, Debug, PartialEq)]
pub struct PodClaim {
    pub name: String,
    /// The claim was created from a template for this pod, which must be its owner.
    pub is_own: bool,
}

/// The claims that must be prepared before the pod starts.
pub fn pod_claims(pod: &Pod) -> Result<Vec<PodClaim>, String> {
    let requested = pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten());
    let named = requested.filter_map(|claim| resolve_claim(pod, claim).transpose());
    let extended = pod.status.as_ref().and_then(|status| status.extended_resource_claim_status.as_ref());
    let extended =
        extended.map(|known| Ok(PodClaim { name: known.resource_claim_name.clone(), is_own: false }));
    named.chain(extended).collect()
}

/// The claim behind an entry of `spec.resourceClaims`. `None` if the pod status says that none is
/// needed.
fn resolve_claim(pod: &Pod, claim: &PodResourceClaim) -> Result<Option<PodClaim>, String> {
    let pod_description = || format!("pod \"{}/{}\"", pod.namespace(), pod.name());
    if let Some(name) = &claim.resource_claim_name {
        return Ok(Some(PodClaim { name: name.clone(), is_own: false }));
    }
    if claim.resource_claim_template_name.is_none() {
        let message = "none of the supported fields are set";
        return Err(format!("{}, spec.resourceClaim {:?}: {message}", pod_description(), claim.name));
    }
    let statuses = pod.status.iter().flat_map(|status| status.resource_claim_statuses.iter().flatten());
    match statuses.into_iter().find(|made| made.name == claim.name) {
        Some(made) => Ok(made.resource_claim_name.clone().map(|name| PodClaim { name, is_own: true })),
        None => Err(format!("{}: ResourceClaim not created yet", pod_description())),
    }
}

/// Fails unless the claim is reserved for the pod, and owned by it if it was created from a
/// template.
pub fn validate_claim(pod: &Pod, claim: &ResourceClaim, named: &PodClaim) -> Result<(), String> {
    let is_owner = claim.controller().is_some_and(|owner| owner.uid == pod.uid());
    if named.is_own && !is_owner {
        return Err(format!(
            "ResourceClaim {}/{} was not created for Pod {}/{} (Pod is not owner)",
            claim.namespace(),
            claim.name(),
            pod.namespace(),
            pod.name()
        ));
    }
    let mut reserved = claim.status.iter().flat_map(|status| status.reserved_for.iter().flatten());
    if !reserved.any(|consumer| consumer.uid == pod.uid()) {
        return Err(format!(
            "pod {} ({}) is not allowed to use ResourceClaim {} ({})",
            pod.name(),
            pod.uid(),
            claim.name(),
            claim.uid()
        ));
    }
    Ok(())
}

/// A claim that a container uses, and the name of the request. An empty request means all of the
/// claim's requests.
#[derive(Clone, Debug, PartialEq)]
pub struct ClaimRequest {
    pub claim: String,
    pub request: String,
    /// The name of the claim in the pod. `None` for the claim of extended resources.
    pub pod_claim_name: Option<String>,
}

/// The claims that a container uses, including its part of the claim for extended resources.
pub fn container_claims(pod: &Pod, container: &Container) -> Result<Vec<ClaimRequest>, String> {
    let requested = container.resources.iter().flat_map(|resources| resources.claims.iter().flatten());
    let mut uses = Vec::new();
    for want in requested {
        let claims = pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten());
        let Some(claim) = claims.into_iter().find(|claim| claim.name == want.name) else { continue };
        if let Some(named) = resolve_claim(pod, claim)? {
            let request = want.request.clone().unwrap_or_default();
            uses.push(ClaimRequest { claim: named.name, request, pod_claim_name: Some(want.name.clone()) });
        }
    }
    let Some(extended) =
        pod.status.as_ref().and_then(|status| status.extended_resource_claim_status.as_ref())
    else {
        return Ok(uses);
    };
    let requests = container.resources.as_ref().and_then(|resources| resources.requests.as_ref());
    let is_requested =
        |name: &str| requests.and_then(|all| all.get(name)).is_some_and(|quantity| quantity.0 != "0");
    let mapped = extended.request_mappings.iter();
    let mapped =
        mapped.filter(|one| one.container_name == container.name && is_requested(&one.resource_name));
    uses.extend(mapped.map(|one| ClaimRequest {
        claim: extended.resource_claim_name.clone(),
        request: one.request_name.clone(),
        pod_claim_name: None,
    }));
    Ok(uses)
}
