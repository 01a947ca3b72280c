//! What becomes of the claims of pods. Pure.

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
const MADE_FOR: &str = "resource.kubernetes.io/pod-claim-name";
/// A claim is used by so many at most.
const MOST_CONSUMERS: usize = 256;
/// Leaves room for five random characters in a name.
const LONGEST_BASE: usize = 57;

/// What a pod is judged by: the claims and templates of its namespace.
pub struct Around {
    pub claims: Vec<Arc<ResourceClaim>>,
    pub templates: Vec<Arc<ResourceClaimTemplate>>,
}

/// The next thing to do for a pod; then it is looked at again.
#[derive(Debug, PartialEq)]
pub enum Step {
    Nothing,
    /// Makes a claim for what the pod calls `name`.
    Make {
        name: String,
        claim: Box<ResourceClaim>,
    },
    /// Writes down in the pod which claims are its own.
    Note(BTreeMap<String, String>),
    /// Writes down in the claim that the pod uses it.
    Reserve(Box<ResourceClaim>),
    Refuse(String),
}

/// The claims a pod lists.
fn listed(pod: &Pod) -> impl Iterator<Item = &PodResourceClaim> {
    pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten())
}

pub fn asks(pod: &Pod) -> bool {
    !pod.is_deleting() && listed(pod).next().is_some()
}

/// A pod that uses no devices any more, or never will.
pub fn is_done(pod: &Pod) -> bool {
    pod::is_terminal(pod) || pod.is_deleting() && pod::node(pod).is_empty()
}

/// The name of the claim behind a pod's: known, known not to be needed, or not known yet.
enum Named<'a> {
    Claim(&'a str),
    Needless,
    NotYet,
}

fn named<'a>(pod: &'a Pod, claim: &'a PodResourceClaim) -> Named<'a> {
    if let Some(name) = &claim.resource_claim_name {
        return Named::Claim(name);
    }
    let mut statuses = pod.status.iter().flat_map(|status| status.resource_claim_statuses.iter().flatten());
    match statuses.find(|status| status.name == claim.name) {
        Some(status) => status.resource_claim_name.as_deref().map_or(Named::Needless, Named::Claim),
        None => Named::NotYet,
    }
}

/// The claims a pod uses, as far as they are known.
pub fn claim_names(pod: &Pod) -> impl Iterator<Item = &str> {
    let extended = pod.status.as_ref().and_then(|status| status.extended_resource_claim_status.as_ref());
    let known = listed(pod).filter_map(|claim| match named(pod, claim) {
        Named::Claim(name) => Some(name),
        _ => None,
    });
    known.chain(extended.map(|status| status.resource_claim_name.as_str()))
}

pub fn pod(pod: &Pod, around: &Around) -> Step {
    if pod.is_deleting() {
        return Step::Nothing;
    }
    let find = |name: &str| around.claims.iter().find(|claim| claim.name() == name);
    let mut noted = BTreeMap::new();
    let mut news = false;
    for listed in listed(pod) {
        let Some(template) = &listed.resource_claim_template_name else { continue };
        match named(pod, listed) {
            Named::Needless => continue,
            Named::Claim(name) if find(name).is_some_and(|claim| is_owner(pod, claim)) => {
                noted.insert(listed.name.clone(), name.to_owned());
                continue;
            }
            _ => {}
        }
        // One may have been made and not been noted.
        let made = |claim: &&Arc<ResourceClaim>| {
            is_owner(pod, claim) && claim.annotation(MADE_FOR) == Some(&listed.name) && !claim.is_deleting()
        };
        if let Some(claim) = around.claims.iter().find(made) {
            news = true;
            noted.insert(listed.name.clone(), claim.name().to_owned());
            continue;
        }
        return match around.templates.iter().find(|found| found.name() == template) {
            Some(template) => {
                let claim = Box::new(from_template(pod, listed, template));
                Step::Make { name: listed.name.clone(), claim }
            }
            None => Step::Refuse(format!(
                "PodResourceClaim {}: resource claim template {template:?}: resourceclaimtemplate.resource.k8s.io {template:?} not found",
                listed.name
            )),
        };
    }
    if news {
        return Step::Note(noted);
    }
    // Before that, reserving is the scheduler's business.
    if pod::node(pod).is_empty() || is_done(pod) {
        return Step::Nothing;
    }
    let used = listed(pod).filter_map(|listed| match named(pod, listed) {
        Named::Claim(name) => {
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

/// The pod a claim was made for.
pub fn owner(claim: &ResourceClaim) -> Option<&OwnerReference> {
    claim.controller().filter(|owner| owner.kind == "Pod" && owner.api_version == "v1")
}

/// The claim with the pod among its users, where it can be and is not.
fn reserved(claim: &ResourceClaim, pod: &Pod) -> Option<ResourceClaim> {
    let status = claim.status.as_ref().filter(|status| status.allocation.is_some())?;
    let users = status.reserved_for.as_deref().unwrap_or_default();
    if users.len() >= MOST_CONSUMERS || users.iter().any(|user| user.uid == pod.uid()) {
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
    annotations.insert(MADE_FOR.into(), listed.name.clone());
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

/// `<pod>-<claim>-`, both cut in proportion where that is too long.
fn base_name(pod: &str, claim: &str) -> String {
    let whole = format!("{pod}-{claim}-");
    if whole.len() <= LONGEST_BASE {
        return whole;
    }
    let cut = |text: &str, of: usize| text.get(..text.len() * LONGEST_BASE / of).unwrap_or(text).to_owned();
    format!("{}-{}", cut(pod, whole.len()), cut(claim, whole.len()))
}

/// Names and uids of the pods that use a claim.
pub fn consumers(claim: &ResourceClaim) -> impl Iterator<Item = (&str, &str)> {
    let users = claim.status.iter().flat_map(|status| status.reserved_for.iter().flatten());
    users.filter(|user| is_pod(user)).map(|user| (user.name.as_str(), user.uid.as_str()))
}

fn is_pod(user: &ResourceClaimConsumerReference) -> bool {
    user.resource == "pods" && user.api_group.as_deref().unwrap_or_default().is_empty()
}

/// What is to be done for a claim, in this order.
#[derive(Debug, Default, PartialEq)]
pub struct ClaimPlan {
    pub status: Option<ResourceClaimStatus>,
    /// Nothing is allocated any more, so the claim need not be kept for that.
    pub release: bool,
    pub delete: bool,
}

/// `pods` are those that exist of the pods that use the claim, by uid; `owner` is the pod of the name the claim was
/// made for.
pub fn claim(claim: &ResourceClaim, pods: &BTreeMap<String, Arc<Pod>>, owner: Option<&Pod>) -> ClaimPlan {
    let before = claim.status.clone().unwrap_or_default();
    let users = before.reserved_for.clone().unwrap_or_default();
    // Users that are no pods are not ours to judge.
    let uses = |user: &&ResourceClaimConsumerReference| {
        !is_pod(user) || pods.get(&user.uid).is_some_and(|pod| !is_done(pod))
    };
    let left: Vec<_> = users.iter().filter(uses).cloned().collect();
    let held = claim.metadata.finalizers.iter().flatten().any(|name| name == FINALIZER);
    let mut plan = ClaimPlan::default();
    let idle = left.is_empty() && held && (left.len() < users.len() || claim.is_deleting());
    if left.len() < users.len() || idle && before.allocation.is_some() {
        plan.status = Some(ResourceClaimStatus {
            // The devices are free for others once the last user has gone.
            allocation: before.allocation.clone().filter(|_| !idle),
            reserved_for: (!left.is_empty()).then_some(left.clone()),
            ..before
        });
    }
    plan.release = idle;
    let made_for = self::owner(claim);
    plan.delete = left.is_empty()
        && !claim.is_deleting()
        && made_for
            .is_some_and(|made_for| owner.is_some_and(|pod| pod.uid() != made_for.uid || is_done(pod)));
    plan
}
