//! Matches volumes with claims. Does no I/O.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use reconcile::{Object, selector};
use schema::quantity::Quantity;

const BETA_CLASS: &str = "volume.beta.kubernetes.io/storage-class";
const DEFAULT_CLASS: [&str; 2] =
    ["storageclass.kubernetes.io/is-default-class", "storageclass.beta.kubernetes.io/is-default-class"];

/// The storage class of a claim, `""` for none.
pub fn claim_class(claim: &PersistentVolumeClaim) -> &str {
    let spec = claim.spec.as_ref().and_then(|spec| spec.storage_class_name.as_deref());
    claim.annotation(BETA_CLASS).or(spec).unwrap_or_default()
}

/// Whether the claim specifies a storage class, including the empty one.
pub fn claim_has_class(claim: &PersistentVolumeClaim) -> bool {
    claim.annotation(BETA_CLASS).is_some()
        || claim.spec.as_ref().is_some_and(|spec| spec.storage_class_name.is_some())
}

pub fn volume_class(volume: &PersistentVolume) -> &str {
    let spec = volume.spec.as_ref().and_then(|spec| spec.storage_class_name.as_deref());
    volume.annotation(BETA_CLASS).or(spec).unwrap_or_default()
}

pub fn claim_ref(volume: &PersistentVolume) -> Option<&ObjectReference> {
    volume.spec.as_ref()?.claim_ref.as_ref()
}

/// Whether the volume is bound to the claim or reserved for it.
pub fn is_volume_bound_to_claim(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    claim_ref(volume).is_some_and(|reference| {
        let uid = reference.uid.as_deref().unwrap_or_default();
        reference.name.as_deref() == Some(claim.name())
            && reference.namespace.as_deref() == Some(claim.namespace())
            && (uid.is_empty() || uid == claim.uid())
    })
}

pub fn phase(volume: &PersistentVolume) -> &str {
    volume.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
}

fn volume_size(volume: &PersistentVolume) -> Quantity {
    let capacity = volume.spec.as_ref().and_then(|spec| spec.capacity.as_ref());
    let storage = capacity.and_then(|capacity| capacity.get("storage"));
    storage.and_then(|storage| Quantity::parse(&storage.0).ok()).unwrap_or(Quantity::ZERO)
}

fn requested_size(claim: &PersistentVolumeClaim) -> Quantity {
    let requests = claim.spec.as_ref().and_then(|spec| spec.resources.as_ref()?.requests.as_ref());
    let storage = requests.and_then(|requests| requests.get("storage"));
    storage.and_then(|storage| Quantity::parse(&storage.0).ok()).unwrap_or(Quantity::ZERO)
}

fn volume_modes(volume: &PersistentVolume) -> &[String] {
    volume.spec.as_ref().and_then(|spec| spec.access_modes.as_deref()).unwrap_or_default()
}

fn has_access_modes(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    let access_modes = claim.spec.as_ref().and_then(|spec| spec.access_modes.as_deref()).unwrap_or_default();
    access_modes.iter().all(|mode| volume_modes(volume).contains(mode))
}

pub fn same_mode(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    let or_default = |mode: Option<&String>| mode.map_or("Filesystem", String::as_str).to_owned();
    let volume = or_default(volume.spec.as_ref().and_then(|spec| spec.volume_mode.as_ref()));
    let claim = or_default(claim.spec.as_ref().and_then(|spec| spec.volume_mode.as_ref()));
    volume == claim
}

fn same_attributes(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    let volume = volume.spec.as_ref().and_then(|spec| spec.volume_attributes_class_name.as_deref());
    let claim = claim.spec.as_ref().and_then(|spec| spec.volume_attributes_class_name.as_deref());
    volume.unwrap_or_default() == claim.unwrap_or_default()
}

/// Why a volume that a claim names cannot be bound to it.
pub fn volume_mismatch(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> Option<String> {
    let checks = [
        (volume.is_deleting(), format!("the volume is marked for deletion {:?}", volume.name())),
        (volume_size(volume) < requested_size(claim), "requested PV is too small".into()),
        (volume_class(volume) != claim_class(claim), "storageClassName does not match".into()),
        (!same_attributes(volume, claim), "volumeAttributesClassName does not match".into()),
        (!same_mode(volume, claim), "incompatible volumeMode".into()),
        (!has_access_modes(volume, claim), "incompatible accessMode".into()),
    ];
    checks.into_iter().find(|(bad, _)| *bad).map(|(_, reason)| reason)
}

/// The best volume for a claim: one reserved for it, otherwise the available one with the fewest access
/// modes and then the smallest size. With delayed binding, only a reserved one.
pub fn find_best_match(
    claim: &PersistentVolumeClaim,
    volumes: &[Arc<PersistentVolume>],
    delayed: bool,
) -> Option<Arc<PersistentVolume>> {
    let labels = claim.spec.as_ref().and_then(|spec| spec.selector.as_ref());
    let labels = labels.map(|labels| selector(Some(labels)));
    let large_enough = |volume: &&Arc<PersistentVolume>| {
        !volume.is_deleting()
            && volume_size(volume) >= requested_size(claim)
            && same_mode(volume, claim)
            && same_attributes(volume, claim)
            && has_access_modes(volume, claim)
    };
    let candidates: Vec<&Arc<PersistentVolume>> = volumes.iter().filter(large_enough).collect();
    if let Some(reserved) = candidates.iter().find(|volume| is_volume_bound_to_claim(volume, claim)) {
        return Some((*reserved).clone());
    }
    let is_free = |volume: &&&Arc<PersistentVolume>| {
        claim_ref(volume).is_none()
            && phase(volume) == "Available"
            && volume_class(volume) == claim_class(claim)
            && labels.as_ref().is_none_or(|labels| labels.matches(|name| volume.label(name)))
    };
    let free = candidates.iter().filter(|_| !delayed).filter(is_free);
    let order = |a: &&&Arc<PersistentVolume>, b: &&&Arc<PersistentVolume>| {
        let modes = volume_modes(a).len().cmp(&volume_modes(b).len());
        let sizes = volume_size(a).partial_cmp(&volume_size(b)).unwrap_or(std::cmp::Ordering::Equal);
        modes.then(sizes).then_with(|| a.name().cmp(b.name()))
    };
    free.min_by(order).map(|volume| (*volume).clone())
}

/// The default storage class: the newest one with the annotation.
pub fn default_class(classes: &[Arc<StorageClass>]) -> Option<&Arc<StorageClass>> {
    let is_default =
        |class: &&Arc<StorageClass>| DEFAULT_CLASS.iter().any(|name| class.annotation(name) == Some("true"));
    let created = |class: &Arc<StorageClass>| class.metadata.creation_timestamp.as_ref().map(|time| time.0);
    classes
        .iter()
        .filter(is_default)
        .max_by(|a, b| created(a).cmp(&created(b)).then_with(|| b.name().cmp(a.name())))
}
