//! Builds bound claims and volumes. Does no I/O.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use reconcile::{Object, reference};

use super::matching::{claim_ref, is_volume_bound_to_claim};
use super::plan::{BIND_COMPLETED, BOUND_BY_CONTROLLER};

/// The volume with a reference to the claim, or `None` if it has it already.
pub fn bind_volume(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> Option<PersistentVolume> {
    let known = claim_ref(volume).and_then(|reference| reference.uid.as_deref());
    if is_volume_bound_to_claim(volume, claim) && known == Some(claim.uid()) {
        return None;
    }
    let mut bound = volume.clone();
    if !is_volume_bound_to_claim(volume, claim) {
        let annotations = bound.metadata.annotations.get_or_insert_default();
        annotations.insert(BOUND_BY_CONTROLLER.into(), "yes".into());
    }
    bound.spec.get_or_insert_default().claim_ref = Some(reference(claim));
    Some(bound)
}

/// The claim with a reference to the volume, or `None` if it has it already.
pub fn bind_claim(claim: &PersistentVolumeClaim, volume: &PersistentVolume) -> Option<PersistentVolumeClaim> {
    let mut bound = claim.clone();
    let annotations = bound.metadata.annotations.get_or_insert_default();
    let spec = bound.spec.get_or_insert_default();
    if spec.volume_name.as_deref() != Some(volume.name()) {
        spec.volume_name = Some(volume.name().into());
        annotations.entry(BOUND_BY_CONTROLLER.into()).or_insert_with(|| "yes".into());
    }
    annotations.entry(BIND_COMPLETED.into()).or_insert_with(|| "yes".into());
    (bound.spec != claim.spec || bound.metadata.annotations != claim.metadata.annotations).then_some(bound)
}

/// The claim with an updated status for `volume`, or `None` if it is up to date.
pub fn claim_status(
    claim: &PersistentVolumeClaim,
    phase: &str,
    volume: Option<&PersistentVolume>,
) -> Option<PersistentVolumeClaim> {
    let mut after = claim.clone();
    let status = after.status.get_or_insert_default();
    let before = status.phase.clone().unwrap_or_default();
    status.phase = Some(phase.into());
    match volume.and_then(|volume| volume.spec.as_ref()) {
        None => {
            status.access_modes = None;
            status.capacity = None;
            status.current_volume_attributes_class_name = None;
        }
        Some(spec) => {
            status.access_modes = spec.access_modes.clone();
            // Later changes of the capacity are made by the resizer.
            if before != phase {
                status.capacity = spec.capacity.clone();
                status.current_volume_attributes_class_name = spec.volume_attributes_class_name.clone();
            }
        }
    }
    (after.status != claim.status).then_some(after)
}

/// The volume without its claim: available, or reserved if a user had set the claim reference.
pub fn release_volume(volume: &PersistentVolume) -> PersistentVolume {
    let mut free = volume.clone();
    let bound_by_controller =
        free.metadata.annotations.as_mut().and_then(|all| all.remove(BOUND_BY_CONTROLLER)).is_some();
    if let Some(spec) = &mut free.spec {
        match &mut spec.claim_ref {
            Some(reference) if !bound_by_controller => reference.uid = None,
            other => *other = None,
        }
    }
    free
}
