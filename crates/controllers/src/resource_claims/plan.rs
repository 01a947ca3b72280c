//! Decides on the claims of pods. Does no I/O.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Pod, PodResourceClaim};
use k8s_openapi::api::resource::v1::{
    ResourceClaim, ResourceClaimConsumerReference, ResourceClaimStatus, ResourceClaimTemplate,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use reconcile::Object;

use crate::pod;

pub const FINALIZER: &str = "resource.kubernetes.io/delete-protection";
const POD_CLAIM_NAME: &str = "resource.kubernetes.io/pod-claim-name";
/// The maximum number of consumers of a claim (`ResourceClaimReservedForMaxSize`).
const MAX_RESERVED_FOR: usize = 256;
/// The maximum length of a generated name's base, which leaves room for the random suffix.
const MAX_BASE_NAME_BYTES: usize = 57;

/// The claims and templates in a pod's namespace.
pub struct NamespaceClaims {
    pub claims: Vec<Arc<ResourceClaim>>,
    pub templates: Vec<Arc<ResourceClaimTemplate>>,
}

/// The next step for a pod. After it is applied, the pod is planned again.
#[derive(Debug, PartialEq)]
pub enum Step {
    Nothing,
    /// Create a claim for the entry `name` of the pod's spec.
    Create {
        name: String,
        claim: Box<ResourceClaim>,
    },
    /// Record the names of the generated claims in the pod's status.
    RecordClaimNames(BTreeMap<String, String>),
    /// Add the pod to the claim's `reservedFor`.
    Reserve(Box<ResourceClaim>),
    Reject(String),
}

/// The claims in the pod's spec.
fn pod_claims(pod: &Pod) -> impl Iterator<Item = &PodResourceClaim> {
    pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten())
}

pub fn needs_claims(pod: &Pod) -> bool {
    !pod.is_deleting() && pod_claims(pod).next().is_some()
}

/// Whether the pod no longer uses devices, or never will.
pub fn is_done(pod: &Pod) -> bool {
    pod::is_terminal(pod) || pod.is_deleting() && pod::node(pod).is_empty()
}

/// The name of the claim for an entry of the pod's spec.
enum ClaimName<'a> {
    Claim(&'a str),
    NotNeeded,
    Unknown,
}

fn claim_name<'a>(pod: &'a Pod, claim: &'a PodResourceClaim) -> ClaimName<'a> {
    if let Some(name) = &claim.resource_claim_name {
        return ClaimName::Claim(name);
    }
    let mut statuses = pod.status.iter().flat_map(|status| status.resource_claim_statuses.iter().flatten());
    match statuses.find(|status| status.name == claim.name) {
        Some(status) => status.resource_claim_name.as_deref().map_or(ClaimName::NotNeeded, ClaimName::Claim),
        None => ClaimName::Unknown,
    }
}

/// The names of the pod's claims that are known.
pub fn claim_names(pod: &Pod) -> impl Iterator<Item = &str> {
    let extended = pod.status.as_ref().and_then(|status| status.extended_resource_claim_status.as_ref());
    let known = pod_claims(pod).filter_map(|claim| match claim_name(pod, claim) {
        ClaimName::Claim(name) => Some(name),
        _ => None,
    });
    known.chain(extended.map(|status| status.resource_claim_name.as_str()))
}

pub fn plan_pod(pod: &Pod, namespace_claims: &NamespaceClaims) -> Step {
    if pod.is_deleting() {
        return Step::Nothing;
    }
    let find = |name: &str| namespace_claims.claims.iter().find(|claim| claim.name() == name);
    let mut recorded = BTreeMap::new();
    let mut changed = false;
    for listed in pod_claims(pod) {
        let Some(template) = &listed.resource_claim_template_name else { continue };
        match claim_name(pod, listed) {
            ClaimName::NotNeeded => continue,
            ClaimName::Claim(name) if find(name).is_some_and(|claim| is_owner(pod, claim)) => {
                recorded.insert(listed.name.clone(), name.to_owned());
                continue;
            }
            _ => {}
        }
        // A claim may have been created without being recorded, if the controller was stopped in between.
        let is_created = |claim: &&Arc<ResourceClaim>| {
            is_owner(pod, claim)
                && claim.annotation(POD_CLAIM_NAME) == Some(&listed.name)
                && !claim.is_deleting()
        };
        if let Some(claim) = namespace_claims.claims.iter().find(is_created) {
            changed = true;
            recorded.insert(listed.name.clone(), claim.name().to_owned());
            continue;
        }
        return match namespace_claims.templates.iter().find(|found| found.name() == template) {
            Some(template) => {
                let claim = Box::new(from_template(pod, listed, template));
                Step::Create { name: listed.name.clone(), claim }
            }
            None => Step::Reject(format!(
                "PodResourceClaim {}: resource claim template {template:?}: resourceclaimtemplate.resource.k8s.io {template:?} not found",
                listed.name
            )),
        };
    }
    if changed {
        return Step::RecordClaimNames(recorded);
    }
    // Before the pod is scheduled, the scheduler reserves its claims.
    if pod::node(pod).is_empty() || is_done(pod) {
        return Step::Nothing;
    }
    let used = pod_claims(pod).filter_map(|listed| match claim_name(pod, listed) {
        ClaimName::Claim(name) => {
            find(name).filter(|claim| listed.resource_claim_name.is_some() || is_owner(pod, claim))
        }
        _ => None,
    });
    used.into_iter()
        .find_map(|claim| reserved(claim, pod))
        .map_or(Step::Nothing, |claim| Step::Reserve(Box::new(claim)))
}

fn is_owner(pod: &Pod, claim: &ResourceClaim) -> bool {
    owner(claim).is_some_and(|owner| owner.uid == pod.uid())
}

/// The pod that a claim was generated for.
pub fn owner(claim: &ResourceClaim) -> Option<&OwnerReference> {
    claim.controller().filter(|owner| owner.kind == "Pod" && owner.api_version == "v1")
}

/// The claim with the pod added to `reservedFor`, if it is allocated and does not list the pod yet.
fn reserved(claim: &ResourceClaim, pod: &Pod) -> Option<ResourceClaim> {
    let status = claim.status.as_ref().filter(|status| status.allocation.is_some())?;
    let users = status.reserved_for.as_deref().unwrap_or_default();
    if users.len() >= MAX_RESERVED_FOR || users.iter().any(|user| user.uid == pod.uid()) {
        return None;
    }
    let mut claim = claim.clone();
    let user = ResourceClaimConsumerReference {
        api_group: None,
        resource: "pods".into(),
        name: pod.name().into(),
        uid: pod.uid().into(),
    };
    claim.status.get_or_insert_default().reserved_for.get_or_insert_default().push(user);
    Some(claim)
}

fn from_template(pod: &Pod, listed: &PodResourceClaim, template: &ResourceClaimTemplate) -> ResourceClaim {
    let owner = OwnerReference {
        api_version: "v1".into(),
        kind: "Pod".into(),
        name: pod.name().into(),
        uid: pod.uid().into(),
        controller: Some(true),
        block_owner_deletion: None,
    };
    let metadata = template.spec.metadata.clone().unwrap_or_default();
    let mut annotations = metadata.annotations.unwrap_or_default();
    annotations.insert(POD_CLAIM_NAME.into(), listed.name.clone());
    ResourceClaim {
        metadata: ObjectMeta {
            generate_name: Some(base_name(pod.name(), &listed.name)),
            namespace: Some(pod.namespace().into()),
            owner_references: Some(vec![owner]),
            annotations: Some(annotations),
            labels: metadata.labels,
            ..ObjectMeta::default()
        },
        spec: template.spec.spec.clone(),
        status: None,
    }
}

/// `<pod>-<claim>-`, with both parts truncated in proportion if it is too long.
fn base_name(pod: &str, claim: &str) -> String {
    let whole = format!("{pod}-{claim}-");
    if whole.len() <= MAX_BASE_NAME_BYTES {
        return whole;
    }
    let cut =
        |text: &str, of: usize| text.get(..text.len() * MAX_BASE_NAME_BYTES / of).unwrap_or(text).to_owned();
    format!("{}-{}", cut(pod, whole.len()), cut(claim, whole.len()))
}

/// Names and UIDs of the pods in `reservedFor`.
pub fn reserved_pods(claim: &ResourceClaim) -> impl Iterator<Item = (&str, &str)> {
    let users = claim.status.iter().flat_map(|status| status.reserved_for.iter().flatten());
    users.filter(|user| is_pod(user)).map(|user| (user.name.as_str(), user.uid.as_str()))
}

fn is_pod(user: &ResourceClaimConsumerReference) -> bool {
    user.resource == "pods" && user.api_group.as_deref().unwrap_or_default().is_empty()
}

/// The changes to a claim, in order.
#[derive(Debug, Default, PartialEq)]
pub struct ClaimPlan {
    pub status: Option<ResourceClaimStatus>,
    /// Remove the finalizer, because nothing is allocated any more.
    pub release: bool,
    pub delete: bool,
}

/// Plans the changes to a claim. `pods` holds the existing pods among its consumers, by UID. `owner` is the
/// pod with the name of the pod that the claim was generated for.
pub fn plan_claim(
    claim: &ResourceClaim,
    pods: &BTreeMap<String, Arc<Pod>>,
    owner: Option<&Pod>,
) -> ClaimPlan {
    let before = claim.status.clone().unwrap_or_default();
    let users = before.reserved_for.clone().unwrap_or_default();
    // Consumers that are not pods are left to other controllers.
    let uses = |user: &&ResourceClaimConsumerReference| {
        !is_pod(user) || pods.get(&user.uid).is_some_and(|pod| !is_done(pod))
    };
    let users_left: Vec<_> = users.iter().filter(uses).cloned().collect();
    let has_finalizer = claim.metadata.finalizers.iter().flatten().any(|name| name == FINALIZER);
    let mut plan = ClaimPlan::default();
    let idle =
        users_left.is_empty() && has_finalizer && (users_left.len() < users.len() || claim.is_deleting());
    if users_left.len() < users.len() || idle && before.allocation.is_some() {
        plan.status = Some(ResourceClaimStatus {
            // Without consumers the devices are deallocated.
            allocation: before.allocation.clone().filter(|_| !idle),
            reserved_for: (!users_left.is_empty()).then_some(users_left.clone()),
            ..before
        });
    }
    plan.release = idle;
    let pod_owner = self::owner(claim);
    plan.delete = users_left.is_empty()
        && !claim.is_deleting()
        && pod_owner
            .is_some_and(|pod_owner| owner.is_some_and(|pod| pod.uid() != pod_owner.uid || is_done(pod)));
    plan
}
