//! The volume claims of a StatefulSet's pods: names, and owner references for the retention policy.

use k8s_openapi::api::apps::v1::{StatefulSet, StatefulSetSpec};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use reconcile::Object as _;

use crate::template::new_controller_ref;

/// The claims that the pod of this ordinal needs.
pub fn pod_claims(set: &StatefulSet, spec: &StatefulSetSpec, ordinal: i32) -> Vec<PersistentVolumeClaim> {
    let templates = spec.volume_claim_templates.iter().flatten();
    let named = templates.map(|template| {
        let mut claim = template.clone();
        claim.metadata.name = Some(claim_name(set, template, ordinal));
        claim.metadata.namespace = Some(set.namespace().to_owned());
        let labels = claim.metadata.labels.get_or_insert_default();
        labels.extend(spec.selector.match_labels.clone().unwrap_or_default());
        claim.status = None;
        claim
    });
    named.collect()
}

pub fn claim_name(set: &StatefulSet, template: &PersistentVolumeClaim, ordinal: i32) -> String {
    format!("{}-{}-{ordinal}", template.name(), set.name())
}

/// Whether a claim has the name of a claim of one of the set's pods.
pub fn is_claim_of(claim: &PersistentVolumeClaim, set: &StatefulSet) -> bool {
    let templates = set.spec.iter().flat_map(|spec| spec.volume_claim_templates.iter().flatten());
    templates.into_iter().any(|template| {
        let rest = claim.name().strip_prefix(template.name()).and_then(|rest| rest.strip_prefix('-'));
        let ordinal = rest.and_then(|rest| rest.strip_prefix(set.name())?.strip_prefix('-'));
        ordinal.is_some_and(|ordinal| ordinal.parse::<u32>().is_ok())
    })
}

/// Whether the retention policy deletes claims on scale-down, and with the set.
fn retention_policy(spec: &StatefulSetSpec) -> (bool, bool) {
    let policy = spec.persistent_volume_claim_retention_policy.as_ref();
    let deletes = |when: Option<&String>| when.is_some_and(|when| when == "Delete");
    let scaled = policy.and_then(|policy| policy.when_scaled.as_ref());
    let deleted = policy.and_then(|policy| policy.when_deleted.as_ref());
    (deletes(scaled), deletes(deleted))
}

/// Whether a claim is owned by an earlier pod of this name and will be deleted with it. A new pod must not
/// use it.
pub fn is_stale(claim: &PersistentVolumeClaim, spec: &StatefulSetSpec, pod: &str) -> bool {
    let owners = claim.metadata.owner_references.iter().flatten();
    retention_policy(spec).0
        && owners
            .into_iter()
            .any(|owner| owner.kind == "Pod" && owner.api_version == "v1" && owner.name == pod)
}

/// The owner references that a claim should have, or `None` if they are up to date. `stays` is whether the
/// pod's ordinal is within the replicas.
pub fn desired_owners(
    claim: &PersistentVolumeClaim,
    set: &StatefulSet,
    spec: &StatefulSetSpec,
    pod: &Pod,
    stays: bool,
) -> Option<Vec<OwnerReference>> {
    let (scaled, deleted) = retention_policy(spec);
    let now = claim.metadata.owner_references.clone().unwrap_or_default();
    let (by_set, by_pod) = (new_controller_ref(set), new_controller_ref(pod));
    let names = |owner: &OwnerReference, desired: &OwnerReference| {
        owner.api_version == desired.api_version && owner.kind == desired.kind && owner.name == desired.name
    };
    let is_managed = |owner: &OwnerReference| names(owner, &by_set) || names(owner, &by_pod);
    let is_stale_owner = |owner: &OwnerReference| {
        names(owner, &by_set) && owner.uid != by_set.uid || names(owner, &by_pod) && owner.uid != by_pod.uid
    };
    // A claim with a stale owner is left to the garbage collector.
    if now.iter().any(is_stale_owner) {
        return None;
    }
    let taken =
        (scaled || deleted) && now.iter().any(|owner| !is_managed(owner) && owner.controller == Some(true));
    let mut desired: Vec<OwnerReference> = now.iter().filter(|owner| !is_managed(owner)).cloned().collect();
    if !taken {
        desired.extend((deleted && (stays || !scaled)).then_some(by_set.clone()));
        desired.extend((scaled && !stays).then_some(by_pod.clone()));
    }
    let has = |list: &[OwnerReference], owner: &OwnerReference| {
        list.iter().any(|known| known.uid == owner.uid && known.controller == Some(true))
    };
    let same = [&by_set, &by_pod].into_iter().all(|owner| has(&now, owner) == has(&desired, owner))
        && now.iter().filter(|owner| is_managed(owner)).all(|owner| owner.controller == Some(true));
    (!same).then_some(desired)
}
