//! Finds volumes for a pod's claims on a node. Counterpart of upstream's `volumeBinder`.

use std::sync::Arc;

use api::selector::LabelSelector;
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::storage::v1 as storage;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;
use schema::quantity::Quantity;

use super::super::volume_restrictions::missing_claim;
use super::{SELECTED_NODE_ANNOTATION, claim_key, name_of};
use crate::state::objects::{Objects, key};
use crate::state::pod::Volume;
use crate::state::selection::{NodeSelector, selector};
use crate::state::{NodeInfo, PodInfo};

const NODE_CONFLICT: &str = "node(s) didn't match PersistentVolume's node affinity";
const BIND_CONFLICT: &str = "node(s) didn't find available persistent volumes to bind";
const NOT_ENOUGH_SPACE: &str = "node(s) did not have enough free storage";
const VOLUME_NOT_EXIST: &str = "node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)";

/// A pod's claims by state (upstream's `PodVolumeClaims`).
pub struct PodVolumeClaims {
    /// Node affinity of each bound claim's volume; the outer `None` if the volume is missing.
    bound: Vec<Option<Option<NodeSelector>>>,
    /// Claims with delayed binding, smallest first.
    waiting: Vec<Arc<core::PersistentVolumeClaim>>,
    /// Some claim has immediate binding and is not bound.
    pub immediate: bool,
}

/// The volumes to bind and the claims to provision on a node (upstream's `PodVolumes`).
#[derive(Default)]
pub struct VolumeBindings {
    pub volumes: Vec<(Arc<core::PersistentVolume>, Arc<core::PersistentVolumeClaim>)>,
    pub provision: Vec<Arc<core::PersistentVolumeClaim>>,
}

/// Whether claim and volume are bound to each other.
pub fn is_fully_bound(claim: &core::PersistentVolumeClaim) -> bool {
    let named = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default();
    let annotations = claim.metadata.annotations.as_ref();
    !named.is_empty() && annotations.is_some_and(|all| all.contains_key("pv.kubernetes.io/bind-completed"))
}

/// Classifies a pod's claims.
pub fn claims_of(pod: &PodInfo, objects: &Objects) -> Result<PodVolumeClaims, String> {
    let mut claims = PodVolumeClaims { bound: Vec::new(), waiting: Vec::new(), immediate: false };
    for volume in &pod.volumes {
        let Some(name) = volume.claim() else { continue };
        let ephemeral = matches!(volume, Volume::Ephemeral { .. });
        let claim = objects.volume_claims.get(&key(&pod.namespace, name)).ok_or_else(|| {
            if ephemeral {
                let message = "waiting for ephemeral volume controller to create the persistentvolumeclaim";
                return format!("{message} {:?}", &**name);
            }
            missing_claim(name)
        })?;
        let bound_to = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default();
        if claim.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Lost") {
            let name: &str = name;
            return Err(format!(
                "persistentvolumeclaim {name:?} bound to non-existent persistentvolume {bound_to:?}"
            ));
        }
        if claim.metadata.deletion_timestamp.is_some() {
            return Err(format!("persistentvolumeclaim {:?} is being deleted", &**name));
        }
        let owners = claim.metadata.owner_references.as_deref().unwrap_or_default();
        if ephemeral && !owners.iter().any(|owner| owner.uid == *pod.uid && owner.controller == Some(true)) {
            let key = claim_key(claim);
            return Err(format!("PVC {key} was not created for pod {} (pod is not owner)", pod.key()));
        }
        if is_fully_bound(claim) {
            let volume = objects.volumes.get(bound_to);
            claims.bound.push(volume.map(|volume| node_affinity(volume)));
        } else if bound_to.is_empty() && is_delayed_binding(claim, objects)? {
            claims.waiting.push(claim.clone());
        } else {
            claims.immediate = true;
        }
    }
    claims.waiting.sort_by_key(|claim| requested(claim).map_or(0, |size| size.value()));
    Ok(claims)
}

/// Whether the claim's storage class has binding mode `WaitForFirstConsumer`.
fn is_delayed_binding(claim: &core::PersistentVolumeClaim, objects: &Objects) -> Result<bool, String> {
    let name = Objects::storage_class_of(claim);
    if name.is_empty() {
        return Ok(false);
    }
    let Some(class) = objects.storage_classes.get(name) else { return Ok(false) };
    match class.volume_binding_mode.as_deref() {
        Some(mode) => Ok(mode == "WaitForFirstConsumer"),
        None => Err(format!("VolumeBindingMode not set for StorageClass {name:?}")),
    }
}

fn node_affinity(volume: &core::PersistentVolume) -> Option<NodeSelector> {
    let affinity = volume.spec.as_ref()?.node_affinity.as_ref()?;
    affinity.required.as_ref().map(NodeSelector::new)
}

fn requested(claim: &core::PersistentVolumeClaim) -> Option<Quantity> {
    let resources = claim.spec.as_ref()?.resources.as_ref()?;
    parse_quantity(resources.requests.as_ref()?.get("storage"))
}

fn parse_quantity(text: Option<&Text>) -> Option<Quantity> {
    Quantity::parse(&text?.0).ok()
}

impl PodVolumeClaims {
    /// Finds the pod's volumes on a node, or the reasons why there are none.
    pub fn find_pod_volumes(
        &self,
        node: &NodeInfo,
        objects: &Objects,
    ) -> Result<VolumeBindings, Vec<&'static str>> {
        let mut reasons = Vec::new();
        let mut found = VolumeBindings::default();
        // As upstream, only the first claim that does not fit determines the reason.
        let bound_conflict = self.bound.iter().find_map(|volume| match volume {
            None => Some(VOLUME_NOT_EXIST),
            Some(affinity) => {
                affinity.as_ref().is_some_and(|affinity| !affinity.matches(node)).then_some(NODE_CONFLICT)
            }
        });
        if bound_conflict == Some(NODE_CONFLICT) {
            reasons.push(NODE_CONFLICT);
        }
        match self.find_unbound_volumes(node, objects) {
            Ok(bindings) => found = bindings,
            Err(reason) => reasons.push(reason),
        }
        if bound_conflict == Some(VOLUME_NOT_EXIST) {
            reasons.push(VOLUME_NOT_EXIST);
        }
        if reasons.is_empty() { Ok(found) } else { Err(reasons) }
    }

    /// Matches unbound claims with volumes; claims without a match are provisioned.
    fn find_unbound_volumes(
        &self,
        node: &NodeInfo,
        objects: &Objects,
    ) -> Result<VolumeBindings, &'static str> {
        let mut found = VolumeBindings::default();
        let mut to_match = Vec::new();
        for claim in &self.waiting {
            let annotations = claim.metadata.annotations.as_ref();
            match annotations.and_then(|all| all.get(SELECTED_NODE_ANNOTATION)) {
                Some(selected) if **selected != *node.name => return Err(BIND_CONFLICT),
                Some(_) => found.provision.push(claim.clone()),
                None => to_match.push(claim),
            }
        }
        let selected_count = found.provision.len();
        for claim in to_match {
            match find_matching_volume(claim, node, objects, &found) {
                Some(volume) => found.volumes.push((volume, claim.clone())),
                None => found.provision.push(claim.clone()),
            }
        }
        debug_assert!(selected_count <= found.provision.len());
        for claim in &found.provision {
            check_volume_provisioning(claim, node, objects)?;
        }
        Ok(found)
    }
}

/// Finds the smallest matching volume, or the volume that is prebound to the claim.
fn find_matching_volume(
    claim: &core::PersistentVolumeClaim,
    node: &NodeInfo,
    objects: &Objects,
    taken: &VolumeBindings,
) -> Option<Arc<core::PersistentVolume>> {
    let spec = claim.spec.as_ref()?;
    let requested_size = requested(claim).unwrap_or(Quantity::ZERO);
    let labels = spec
        .selector
        .as_ref()
        .map(|typed| selector(Some(typed)).unwrap_or_else(|_| LabelSelector::nothing()));
    let mut smallest: Option<(Quantity, &Arc<core::PersistentVolume>)> = None;
    // Sorted, so that the result is the same for volumes of equal size.
    let mut volumes: Vec<_> = objects
        .volumes
        .values()
        .filter(|volume| storage_class_of(volume) == Objects::storage_class_of(claim))
        .collect();
    volumes.sort_by(|a, b| name_of(a).cmp(name_of(b)));
    for volume in volumes {
        let Some(volume_spec) = &volume.spec else { continue };
        if taken.volumes.iter().any(|(other, _)| name_of(other) == name_of(volume)) {
            continue;
        }
        let bound_ref = volume_spec.claim_ref.as_ref().map(|bound_ref| is_bound_to_claim(bound_ref, claim));
        let size = parse_quantity(volume_spec.capacity.as_ref().and_then(|capacity| capacity.get("storage")))
            .unwrap_or(Quantity::ZERO);
        let mode = |mode: Option<&String>| mode.map_or("Filesystem", String::as_str).to_owned();
        if bound_ref == Some(false)
            || size < requested_size
            || mode(spec.volume_mode.as_ref()) != mode(volume_spec.volume_mode.as_ref())
            || spec.volume_attributes_class_name.as_deref().unwrap_or_default()
                != volume_spec.volume_attributes_class_name.as_deref().unwrap_or_default()
            || volume.metadata.deletion_timestamp.is_some()
        {
            continue;
        }
        let reachable = node_affinity(volume).is_none_or(|affinity| affinity.matches(node));
        if bound_ref == Some(true) {
            return reachable.then(|| volume.clone());
        }
        let is_available =
            volume.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Available");
        let labels_match = labels.as_ref().is_none_or(|selector| {
            let labels = volume.metadata.labels.as_ref();
            selector.matches(|key| labels.and_then(|labels| labels.get(key)).map(String::as_str))
        });
        let modes = volume_spec.access_modes.as_deref().unwrap_or_default();
        let modes_match = spec.access_modes.iter().flatten().all(|mode| modes.contains(mode));
        if is_available
            && labels_match
            && reachable
            && modes_match
            && smallest.is_none_or(|(least, _)| size < least)
        {
            smallest = Some((size, volume));
        }
    }
    smallest.map(|(_, volume)| volume.clone())
}

fn storage_class_of(volume: &core::PersistentVolume) -> &str {
    let annotations = volume.metadata.annotations.as_ref();
    let old = annotations.and_then(|all| all.get("volume.beta.kubernetes.io/storage-class"));
    let named = volume.spec.as_ref().and_then(|spec| spec.storage_class_name.as_ref());
    old.or(named).map(String::as_str).unwrap_or_default()
}

fn is_bound_to_claim(bound_ref: &core::ObjectReference, claim: &core::PersistentVolumeClaim) -> bool {
    let meta = &claim.metadata;
    bound_ref.name == meta.name
        && bound_ref.namespace == meta.namespace
        && bound_ref.uid.as_ref().is_none_or(|uid| Some(uid) == meta.uid.as_ref())
}

/// Checks that a volume for the claim can be provisioned where the node can access it.
fn check_volume_provisioning(
    claim: &core::PersistentVolumeClaim,
    node: &NodeInfo,
    objects: &Objects,
) -> Result<(), &'static str> {
    let Some(class) = objects.storage_classes.get(Objects::storage_class_of(claim)) else {
        return Err(BIND_CONFLICT);
    };
    if class.provisioner.is_empty() || class.provisioner == "kubernetes.io/no-provisioner" {
        return Err(BIND_CONFLICT);
    }
    let terms = class.allowed_topologies.as_deref().unwrap_or_default();
    let allowed = |term: &core::TopologySelectorTerm| {
        let mut expressions = term.match_label_expressions.iter().flatten();
        expressions.all(|expression| {
            node.labels
                .get(&expression.key)
                .is_some_and(|value| expression.values.iter().any(|known| known == value))
        })
    };
    if !terms.is_empty() && !terms.iter().any(allowed) {
        return Err(BIND_CONFLICT);
    }
    if has_enough_capacity(claim, class, node, objects) { Ok(()) } else { Err(NOT_ENOUGH_SPACE) }
}

/// Whether the driver has enough capacity for the claim. Always true for drivers that do not report capacity.
fn has_enough_capacity(
    claim: &core::PersistentVolumeClaim,
    class: &storage::StorageClass,
    node: &NodeInfo,
    objects: &Objects,
) -> bool {
    let Some(size) = requested(claim) else { return true };
    let driver = objects.csi_drivers.get(&class.provisioner);
    if driver.is_none_or(|driver| driver.spec.storage_capacity != Some(true)) {
        return true;
    }
    objects.capacities.values().any(|capacity| {
        Some(&capacity.storage_class_name) == class.metadata.name.as_ref()
            && volume_limit(capacity).is_some_and(|limit| limit >= size.value())
            && capacity.node_topology.as_ref().is_some_and(|topology| {
                selector(Some(topology)).is_ok_and(|selector| node.labels.matched_by(&selector))
            })
    })
}

/// The maximum size of a volume.
pub fn volume_limit(capacity: &storage::CSIStorageCapacity) -> Option<i64> {
    let limit = capacity.maximum_volume_size.as_ref().or(capacity.capacity.as_ref());
    parse_quantity(limit).map(|limit| limit.value())
}
