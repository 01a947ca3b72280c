//! Decides which claims are provisioned, and where. Does no I/O.

use k8s_openapi::api::core::v1::{
    HostPathVolumeSource, Node, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, ObjectReference,
    PersistentVolume, PersistentVolumeClaim, PersistentVolumeSpec, VolumeNodeAffinity,
};
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use reconcile::Object;

/// The name of k3s's provisioner, so that existing classes and claims work unchanged.
pub const PROVISIONER: &str = "rancher.io/local-path";
pub const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";
const STORAGE_PROVISIONER: &str = "volume.kubernetes.io/storage-provisioner";
const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";
const HOSTNAME: &str = "kubernetes.io/hostname";

/// The action for a claim.
#[derive(Debug, PartialEq)]
pub enum ProvisionAction {
    Nothing,
    Provision(Box<PersistentVolume>),
    /// The selected node does not exist. The scheduler has to select another one.
    Reschedule,
    Reject(String),
}

/// Whether the claim is for this provisioner and not bound yet.
pub fn should_provision(claim: &PersistentVolumeClaim) -> bool {
    let bound = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref());
    !claim.is_deleting()
        && bound.unwrap_or_default().is_empty()
        && claim.annotation(STORAGE_PROVISIONER) == Some(PROVISIONER)
}

pub fn volume_name(claim: &PersistentVolumeClaim) -> String {
    format!("pvc-{}", claim.uid())
}

/// Plans the action for a claim. `node` is the selected node, if it exists.
pub fn plan_provision(
    claim: &PersistentVolumeClaim,
    class: Option<&StorageClass>,
    node: Option<&Node>,
    directory: &str,
) -> ProvisionAction {
    let (Some(class), Some(spec)) = (class, &claim.spec) else { return ProvisionAction::Nothing };
    if !should_provision(claim) || class.provisioner != PROVISIONER {
        return ProvisionAction::Nothing;
    }
    let reject = |reason: &str| {
        ProvisionAction::Reject(format!(
            "failed to provision volume with StorageClass {:?}: {reason}",
            class.name()
        ))
    };
    let wait_for_consumer = class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer");
    let node = match (claim.annotation(SELECTED_NODE).unwrap_or_default(), node) {
        ("", _) if wait_for_consumer => return ProvisionAction::Nothing,
        ("", _) => return reject("configuration error, no node was specified"),
        (_, None) => return ProvisionAction::Reschedule,
        (_, Some(node)) => node,
    };
    if spec.selector.is_some() {
        return reject("claim.Spec.Selector is not supported");
    }
    if spec.volume_mode.as_deref() == Some("Block") {
        return reject(&format!("{PROVISIONER} does not support block volume provisioning"));
    }
    let modes = spec.access_modes.clone().unwrap_or_default();
    if modes.iter().any(|mode| mode != "ReadWriteOnce" && mode != "ReadWriteOncePod") {
        return reject("NodePath only supports ReadWriteOnce and ReadWriteOncePod (1.22+) access modes");
    }
    let name = volume_name(claim);
    let path = format!("{directory}/{name}_{}_{}", claim.namespace(), claim.name());
    let requests = spec.resources.as_ref().and_then(|resources| resources.requests.clone());
    let capacity = requests.unwrap_or_default().into_iter().filter(|(name, _)| name == "storage").collect();
    let annotations = [(PROVISIONED_BY, PROVISIONER), ("local.path.provisioner/selected-node", node.name())];
    ProvisionAction::Provision(Box::new(PersistentVolume {
        metadata: ObjectMeta {
            name: Some(name),
            annotations: Some(annotations.map(|(name, value)| (name.into(), value.into())).into()),
            ..ObjectMeta::default()
        },
        spec: Some(PersistentVolumeSpec {
            access_modes: Some(modes),
            capacity: Some(capacity),
            claim_ref: Some(ObjectReference {
                api_version: Some("v1".into()),
                kind: Some("PersistentVolumeClaim".into()),
                namespace: Some(claim.namespace().into()),
                name: Some(claim.name().into()),
                uid: Some(claim.uid().into()),
                resource_version: claim.metadata.resource_version.clone(),
                ..ObjectReference::default()
            }),
            host_path: Some(HostPathVolumeSource { path, type_: Some("DirectoryOrCreate".into()) }),
            mount_options: class.mount_options.clone(),
            node_affinity: Some(node_affinity(node.label(HOSTNAME).unwrap_or(node.name()))),
            persistent_volume_reclaim_policy: class.reclaim_policy.clone().or(Some("Delete".into())),
            storage_class_name: Some(class.name().into()),
            volume_mode: spec.volume_mode.clone(),
            ..PersistentVolumeSpec::default()
        }),
        status: None,
    }))
}

fn node_affinity(host: &str) -> VolumeNodeAffinity {
    let requirement = NodeSelectorRequirement {
        key: HOSTNAME.into(),
        operator: "In".into(),
        values: Some(vec![host.into()]),
    };
    let term = NodeSelectorTerm { match_expressions: Some(vec![requirement]), match_fields: None };
    VolumeNodeAffinity { required: Some(NodeSelector { node_selector_terms: vec![term] }) }
}

/// Whether a volume of this provisioner is released and has the reclaim policy `Delete`.
pub fn should_delete(volume: &PersistentVolume) -> bool {
    let phase = volume.status.as_ref().and_then(|status| status.phase.as_deref());
    let policy = volume.spec.as_ref().and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref());
    !volume.is_deleting()
        && volume.annotation(PROVISIONED_BY) == Some(PROVISIONER)
        && phase == Some("Released")
        && policy == Some("Delete")
}
