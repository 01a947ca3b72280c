//! Computes the CSINode object and the driver's labels and annotations of the Node. Does no I/O.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::{CSINode, CSINodeDriver, CSINodeSpec, VolumeNodeResources};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use reconcile::Object as _;
use serde_json::{Value, json};

use super::driver::Driver;

const NODE_ID_ANNOTATION: &str = "csi.volume.kubernetes.io/nodeid";

/// The CSINode of a node with these drivers.
pub fn csi_node(before: Option<&CSINode>, node: &Node, drivers: &[Driver]) -> CSINode {
    let owner = OwnerReference {
        api_version: "v1".into(),
        kind: "Node".into(),
        name: node.name().to_owned(),
        uid: node.uid().to_owned(),
        ..OwnerReference::default()
    };
    let fresh = || ObjectMeta {
        name: Some(node.name().to_owned()),
        owner_references: Some(vec![owner]),
        ..ObjectMeta::default()
    };
    let known = drivers.iter().map(|driver| CSINodeDriver {
        name: driver.name.clone(),
        node_id: driver.node_id.clone(),
        topology_keys: Some(driver.topology.keys().cloned().collect::<Vec<_>>())
            .filter(|keys| !keys.is_empty()),
        allocatable: (driver.max_volumes > 0).then(|| VolumeNodeResources {
            count: Some(i32::try_from(driver.max_volumes).unwrap_or(i32::MAX)),
        }),
    });
    CSINode {
        metadata: before.map_or_else(fresh, |before| before.metadata.clone()),
        spec: CSINodeSpec { drivers: known.collect() },
    }
}

/// The changes to the Node's own metadata: topology labels and the node ID annotation. `None` if it
/// is up to date.
pub fn node_metadata_patch(node: &Node, drivers: &[Driver]) -> Option<Value> {
    let ids: BTreeMap<&str, &str> =
        drivers.iter().map(|driver| (driver.name.as_str(), driver.node_id.as_str())).collect();
    let ids = (!ids.is_empty()).then(|| json!(ids).to_string());
    let known = node.metadata.labels.clone().unwrap_or_default();
    let segments = drivers.iter().flat_map(|driver| &driver.topology);
    let labels: BTreeMap<&String, &String> =
        segments.filter(|(name, value)| known.get(*name) != Some(value)).collect();
    let same = node.annotation(NODE_ID_ANNOTATION) == ids.as_deref();
    (!same || !labels.is_empty()).then(|| json!({"labels": labels, "annotations": {NODE_ID_ANNOTATION: ids}}))
}
