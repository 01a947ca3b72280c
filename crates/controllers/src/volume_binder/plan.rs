//! What happens to claims and volumes. Pure.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use reconcile::{Object, Severity};

use super::matching::{
    best, claim_class, claim_ref, default_class, is_meant, phase, same_mode, says_class, unsuited,
};

pub const BOUND_BY_CONTROLLER: &str = "pv.kubernetes.io/bound-by-controller";
pub const BIND_COMPLETED: &str = "pv.kubernetes.io/bind-completed";
pub const PROVISIONER: [&str; 2] =
    ["volume.beta.kubernetes.io/storage-provisioner", "volume.kubernetes.io/storage-provisioner"];
const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";
const MIGRATED_TO: &str = "pv.kubernetes.io/migrated-to";
const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";

/// What has to be done for a claim.
#[derive(Debug, PartialEq)]
pub enum ClaimAction {
    /// The claim gets this volume, or what is missing of that is made up for.
    Bind(Arc<PersistentVolume>),
    /// The claim has no volume yet.
    Pending,
    /// The claim has lost its volume; told once.
    Lost {
        reason: &'static str,
        message: &'static str,
    },
    /// The claim gets the class of claims that say none.
    AssignClass(String),
    /// Somebody else is asked to make a volume.
    AskProvisioner(String),
    Tell {
        severity: Severity,
        reason: &'static str,
        message: String,
    },
}

/// What a claim is judged by.
pub struct Surroundings<'a> {
    pub volumes: &'a [Arc<PersistentVolume>],
    pub classes: &'a [Arc<StorageClass>],
    /// The pods that mention the claim and are on no node yet.
    pub waiting_pods: &'a [String],
}

pub fn claim(claim: &PersistentVolumeClaim, around: &Surroundings<'_>) -> Vec<ClaimAction> {
    let name = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default();
    let volume = around.volumes.iter().find(|volume| volume.name() == name).filter(|_| !name.is_empty());
    if claim.annotation(BIND_COMPLETED).is_some() {
        return vec![bound(claim, name, volume)];
    }
    match volume {
        _ if name.is_empty() => unbound(claim, around),
        None => vec![ClaimAction::Pending],
        Some(volume) if claim_ref(volume).is_none() => match unsuited(volume, claim) {
            Some(why) => vec![
                warn("VolumeMismatch", format!("Cannot bind to requested volume {:?}: {why}", volume.name())),
                ClaimAction::Pending,
            ],
            None => vec![ClaimAction::Bind(volume.clone())],
        },
        Some(volume) if is_meant(volume, claim) => vec![ClaimAction::Bind(volume.clone())],
        Some(volume) => vec![
            warn("FailedBinding", format!("volume {:?} already bound to a different claim.", volume.name())),
            ClaimAction::Pending,
        ],
    }
}

fn warn(reason: &'static str, message: String) -> ClaimAction {
    ClaimAction::Tell { severity: Severity::Warning, reason, message }
}

fn tell(reason: &'static str, message: String) -> ClaimAction {
    ClaimAction::Tell { severity: Severity::Normal, reason, message }
}

fn bound(claim: &PersistentVolumeClaim, name: &str, volume: Option<&Arc<PersistentVolume>>) -> ClaimAction {
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

fn unbound(claim: &PersistentVolumeClaim, around: &Surroundings<'_>) -> Vec<ClaimAction> {
    let class = around.classes.iter().find(|class| class.name() == claim_class(claim));
    let delayed =
        class.is_some_and(|class| class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer"));
    if let Some(volume) = best(claim, around.volumes, delayed) {
        return vec![ClaimAction::Bind(volume)];
    }
    if !says_class(claim)
        && let Some(class) = default_class(around.classes)
    {
        return vec![ClaimAction::AssignClass(class.name().to_owned())];
    }
    if delayed && claim.annotation(SELECTED_NODE).is_none() {
        let pods = around.waiting_pods;
        let told = match pods {
            [] => {
                tell("WaitForFirstConsumer", "waiting for first consumer to be created before binding".into())
            }
            [pod] => tell("WaitForPodScheduled", format!("waiting for pod {pod} to be scheduled")),
            pods => {
                tell("WaitForPodScheduled", format!("waiting for pods {} to be scheduled", pods.join(",")))
            }
        };
        return vec![told, ClaimAction::Pending];
    }
    match class {
        _ if claim_class(claim).is_empty() => vec![
            tell(
                "FailedBinding",
                "no persistent volumes available for this claim and no storage class is set".into(),
            ),
            ClaimAction::Pending,
        ],
        None => vec![warn(
            "ProvisioningFailed",
            format!("storageclass.storage.k8s.io {:?} not found", claim_class(claim)),
        )],
        Some(class) if class.provisioner.starts_with("kubernetes.io/") => {
            vec![warn("ProvisioningFailed", format!("no volume plugin matched name: {}", class.provisioner))]
        }
        Some(class) => {
            let name = &class.provisioner;
            let message = format!(
                "Waiting for a volume to be created either by the external provisioner '{name}' or manually by the system administrator. If volume creation is delayed, please verify that the provisioner is running and correctly registered."
            );
            vec![ClaimAction::AskProvisioner(name.clone()), tell("ExternalProvisioning", message)]
        }
    }
}

/// What has to be done for a volume.
#[derive(Debug, PartialEq)]
pub enum VolumeAction {
    Nothing,
    Phase(&'static str),
    /// Its claim is gone; what is done with what is on it is up to somebody else.
    Release,
    /// Its claim is gone, and it cannot be made free again.
    Fail {
        reason: &'static str,
        message: String,
    },
    /// Its claim got another volume; it is free again.
    Unbind,
    /// Its claim has yet to learn of it.
    WakeClaim,
    Mismatch,
}

/// `claim` is the claim the volume names, where it is that very one.
pub fn volume(volume: &PersistentVolume, claim: Option<&PersistentVolumeClaim>) -> VolumeAction {
    let to = |wanted: &'static str| {
        if phase(volume) == wanted { VolumeAction::Nothing } else { VolumeAction::Phase(wanted) }
    };
    let reserved = claim_ref(volume).map(|reference| reference.uid.as_deref().unwrap_or_default());
    if reserved.unwrap_or_default().is_empty() {
        return to("Available");
    }
    let Some(claim) = claim else { return released(volume) };
    let name = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default();
    let policy = volume.spec.as_ref().and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref());
    match name {
        "" if same_mode(volume, claim) => VolumeAction::WakeClaim,
        "" => VolumeAction::Mismatch,
        name if name == volume.name() => to("Bound"),
        _ if volume.annotation(PROVISIONED_BY).is_some() && policy == Some("Delete") => released(volume),
        _ => VolumeAction::Unbind,
    }
}

fn released(volume: &PersistentVolume) -> VolumeAction {
    let Some(spec) = &volume.spec else { return VolumeAction::Nothing };
    let release = match phase(volume) {
        "Released" | "Failed" => VolumeAction::Nothing,
        _ => VolumeAction::Release,
    };
    if phase(volume) != "Released" {
        return release;
    }
    let fail = |reason, message: String| VolumeAction::Fail { reason, message };
    let provisioner = volume.annotation(PROVISIONED_BY).unwrap_or_default();
    match spec.persistent_volume_reclaim_policy.as_deref() {
        Some("Recycle") => fail("VolumeFailedRecycle", "No recycler plugin found for the volume!".into()),
        Some("Delete") if !provisioner.is_empty() => match provisioner.starts_with("kubernetes.io/") {
            true => fail("VolumeFailedDelete", format!("no volume plugin matched name: {provisioner}")),
            // Whoever made it takes it away.
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
