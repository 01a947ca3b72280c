//! Plans the binding of claims and the phases of volumes. Does no I/O.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use reconcile::{EventType, Object};

use super::matching::{
    claim_class, claim_has_class, claim_ref, default_class, find_best_match, is_volume_bound_to_claim, phase,
    same_mode, volume_mismatch,
};

pub const BOUND_BY_CONTROLLER: &str = "pv.kubernetes.io/bound-by-controller";
pub const BIND_COMPLETED: &str = "pv.kubernetes.io/bind-completed";
pub const PROVISIONER: [&str; 2] =
    ["volume.beta.kubernetes.io/storage-provisioner", "volume.kubernetes.io/storage-provisioner"];
const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";
const MIGRATED_TO: &str = "pv.kubernetes.io/migrated-to";
const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";

/// An action for a claim.
#[derive(Debug, PartialEq)]
pub enum ClaimAction {
    /// Bind the claim to this volume, or complete an incomplete binding.
    Bind(Arc<PersistentVolume>),
    /// The claim is unbound.
    Pending,
    /// The claim has lost its volume. The event is emitted once.
    Lost {
        reason: &'static str,
        message: &'static str,
    },
    /// Set the default storage class.
    AssignClass(String),
    /// Request a volume from an external provisioner.
    SetProvisioner(String),
    Event {
        severity: EventType,
        reason: &'static str,
        message: String,
    },
}

/// The state that a claim's plan depends on.
pub struct BinderState<'a> {
    pub volumes: &'a [Arc<PersistentVolume>],
    pub classes: &'a [Arc<StorageClass>],
    /// Unscheduled pods that reference the claim.
    pub waiting_pods: &'a [String],
}

pub fn plan_claim(claim: &PersistentVolumeClaim, state: &BinderState<'_>) -> Vec<ClaimAction> {
    let name = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default();
    let volume = state.volumes.iter().find(|volume| volume.name() == name).filter(|_| !name.is_empty());
    if claim.annotation(BIND_COMPLETED).is_some() {
        return vec![plan_bound_claim(claim, name, volume)];
    }
    match volume {
        _ if name.is_empty() => plan_unbound_claim(claim, state),
        None => vec![ClaimAction::Pending],
        Some(volume) if claim_ref(volume).is_none() => match volume_mismatch(volume, claim) {
            Some(reason) => vec![
                warning(
                    "VolumeMismatch",
                    format!("Cannot bind to requested volume {:?}: {reason}", volume.name()),
                ),
                ClaimAction::Pending,
            ],
            None => vec![ClaimAction::Bind(volume.clone())],
        },
        Some(volume) if is_volume_bound_to_claim(volume, claim) => vec![ClaimAction::Bind(volume.clone())],
        Some(volume) => vec![
            warning(
                "FailedBinding",
                format!("volume {:?} already bound to a different claim.", volume.name()),
            ),
            ClaimAction::Pending,
        ],
    }
}

fn warning(reason: &'static str, message: String) -> ClaimAction {
    ClaimAction::Event { severity: EventType::Warning, reason, message }
}

fn normal(reason: &'static str, message: String) -> ClaimAction {
    ClaimAction::Event { severity: EventType::Normal, reason, message }
}

fn plan_bound_claim(
    claim: &PersistentVolumeClaim,
    name: &str,
    volume: Option<&Arc<PersistentVolume>>,
) -> ClaimAction {
    let lost = |reason, message| ClaimAction::Lost { reason, message };
    match volume {
        _ if name.is_empty() => lost(
            "ClaimLost",
            "Bound claim has lost reference to PersistentVolume. Data on the volume is lost!",
        ),
        None => lost("ClaimLost", "Bound claim has lost its PersistentVolume. Data on the volume is lost!"),
        Some(volume) => {
            let owner = claim_ref(volume).map(|reference| reference.uid.as_deref().unwrap_or_default());
            match owner.is_none_or(|uid| uid == claim.uid()) {
                true => ClaimAction::Bind(volume.clone()),
                false => lost(
                    "ClaimMisbound",
                    "Two claims are bound to the same volume, this one is bound incorrectly",
                ),
            }
        }
    }
}

fn plan_unbound_claim(claim: &PersistentVolumeClaim, state: &BinderState<'_>) -> Vec<ClaimAction> {
    let class = state.classes.iter().find(|class| class.name() == claim_class(claim));
    let delayed =
        class.is_some_and(|class| class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer"));
    if let Some(volume) = find_best_match(claim, state.volumes, delayed) {
        return vec![ClaimAction::Bind(volume)];
    }
    if !claim_has_class(claim)
        && let Some(class) = default_class(state.classes)
    {
        return vec![ClaimAction::AssignClass(class.name().to_owned())];
    }
    if delayed && claim.annotation(SELECTED_NODE).is_none() {
        let pods = state.waiting_pods;
        let event = match pods {
            [] => normal(
                "WaitForFirstConsumer",
                "waiting for first consumer to be created before binding".into(),
            ),
            [pod] => normal("WaitForPodScheduled", format!("waiting for pod {pod} to be scheduled")),
            pods => {
                normal("WaitForPodScheduled", format!("waiting for pods {} to be scheduled", pods.join(",")))
            }
        };
        return vec![event, ClaimAction::Pending];
    }
    match class {
        _ if claim_class(claim).is_empty() => vec![
            normal(
                "FailedBinding",
                "no persistent volumes available for this claim and no storage class is set".into(),
            ),
            ClaimAction::Pending,
        ],
        None => vec![warning(
            "ProvisioningFailed",
            format!("storageclass.storage.k8s.io {:?} not found", claim_class(claim)),
        )],
        Some(class) if class.provisioner.starts_with("kubernetes.io/") => {
            vec![warning(
                "ProvisioningFailed",
                format!("no volume plugin matched name: {}", class.provisioner),
            )]
        }
        Some(class) => {
            let name = &class.provisioner;
            let message = format!(
                "Waiting for a volume to be created either by the external provisioner '{name}' or manually by the system administrator. If volume creation is delayed, please verify that the provisioner is running and correctly registered."
            );
            vec![ClaimAction::SetProvisioner(name.clone()), normal("ExternalProvisioning", message)]
        }
    }
}

/// The action for a volume.
#[derive(Debug, PartialEq)]
pub enum VolumeAction {
    Nothing,
    SetPhase(&'static str),
    /// The claim is deleted. The volume's data is reclaimed by the provisioner, if at all.
    Release,
    /// The claim is deleted and the volume cannot be reclaimed.
    Fail {
        reason: &'static str,
        message: String,
    },
    /// The claim is bound to another volume. Make this one available again.
    Unbind,
    /// The claim is not bound yet. Sync it.
    EnqueueClaim,
    Mismatch,
}

/// Plans the action for a volume. `claim` is the claim it refers to, if that exists with the same UID.
pub fn plan_volume(volume: &PersistentVolume, claim: Option<&PersistentVolumeClaim>) -> VolumeAction {
    let set_phase = |desired_phase: &'static str| {
        if phase(volume) == desired_phase {
            VolumeAction::Nothing
        } else {
            VolumeAction::SetPhase(desired_phase)
        }
    };
    let reserved = claim_ref(volume).map(|reference| reference.uid.as_deref().unwrap_or_default());
    if reserved.unwrap_or_default().is_empty() {
        return set_phase("Available");
    }
    let Some(claim) = claim else { return plan_released_volume(volume) };
    let name = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default();
    let policy = volume.spec.as_ref().and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref());
    match name {
        "" if same_mode(volume, claim) => VolumeAction::EnqueueClaim,
        "" => VolumeAction::Mismatch,
        name if name == volume.name() => set_phase("Bound"),
        _ if volume.annotation(PROVISIONED_BY).is_some() && policy == Some("Delete") => {
            plan_released_volume(volume)
        }
        _ => VolumeAction::Unbind,
    }
}

fn plan_released_volume(volume: &PersistentVolume) -> VolumeAction {
    let Some(spec) = &volume.spec else { return VolumeAction::Nothing };
    let action = match phase(volume) {
        "Released" | "Failed" => VolumeAction::Nothing,
        _ => VolumeAction::Release,
    };
    if phase(volume) != "Released" {
        return action;
    }
    let fail = |reason, message: String| VolumeAction::Fail { reason, message };
    let provisioner = volume.annotation(PROVISIONED_BY).unwrap_or_default();
    match spec.persistent_volume_reclaim_policy.as_deref() {
        Some("Recycle") => fail("VolumeFailedRecycle", "No recycler plugin found for the volume!".into()),
        Some("Delete") if !provisioner.is_empty() => match provisioner.starts_with("kubernetes.io/") {
            true => fail("VolumeFailedDelete", format!("no volume plugin matched name: {provisioner}")),
            // The external provisioner deletes the volume.
            false => VolumeAction::Nothing,
        },
        Some("Delete") if volume.annotation(MIGRATED_TO).is_none() && spec.csi.is_none() => fail(
            "VolumeFailedDelete",
            format!(
                "error getting deleter volume plugin for volume {:?}: no deletable volume plugin matched",
                volume.name()
            ),
        ),
        _ => VolumeAction::Nothing,
    }
}
