//! VolumeZone: a pod fits nodes in the zone and region of its volumes.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use serde_json::Value;

use super::volume_restrictions::{is_claim_of, missing_claim};
use crate::framework::{ClusterEvent, Cycle, FnFilter, Plugin, PreFilter, PreFilterResult, Requeue, Status};
use crate::state::objects::{Objects, key};
use crate::state::{NodeInfo, PodInfo, State};

pub const NAME: &str = "VolumeZone";

const TOPOLOGY_LABELS: [&str; 4] = [
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
];

struct VolumeZone;

/// Creates the plugin.
pub fn make(_: &Value) -> Result<Plugin, String> {
    let plugin = Arc::new(VolumeZone);
    Ok(Plugin::new(NAME).pre_filter(plugin.clone()).requeue(plugin))
}

/// A topology label of a volume with the values that a node may have.
struct VolumeTopology {
    label: &'static str,
    values: Vec<String>,
}

fn volume_topologies(pod: &PodInfo, objects: &Objects) -> Result<Vec<VolumeTopology>, String> {
    let mut all = Vec::new();
    for name in pod.named_claims() {
        let claim =
            objects.volume_claims.get(&key(&pod.namespace, name)).ok_or_else(|| missing_claim(name))?;
        let volume = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default();
        if volume.is_empty() {
            let class = Objects::storage_class_of(claim);
            if class.is_empty() {
                return Err("PersistentVolumeClaim had no pv name and storageClass name".to_owned());
            }
            let found = objects.storage_classes.get(class);
            let found = found.ok_or_else(|| format!("storageclass.storage.k8s.io {class:?} not found"))?;
            match found.volume_binding_mode.as_deref() {
                None => return Err(format!("VolumeBindingMode not set for StorageClass {class:?}")),
                Some("WaitForFirstConsumer") => continue,
                Some(_) => return Err("PersistentVolume had no name".to_owned()),
            }
        }
        let found = objects.volumes.get(volume);
        let found = found.ok_or_else(|| format!("persistentvolume {volume:?} not found"))?;
        for label in TOPOLOGY_LABELS {
            let Some(text) = found.metadata.labels.as_ref().and_then(|labels| labels.get(label)) else {
                continue;
            };
            let values: Vec<String> = text.split("__").map(|value| value.trim().to_owned()).collect();
            if !values.iter().any(String::is_empty) {
                all.push(VolumeTopology { label, values });
            }
        }
    }
    Ok(all)
}

impl PreFilter for VolumeZone {
    fn pre_filter<'c>(&'c self, cycle: &Cycle<'c>) -> PreFilterResult<'c> {
        let topologies = match volume_topologies(cycle.pod, &cycle.state.objects) {
            Err(message) => return PreFilterResult::Reject(Status::unresolvable(message)),
            Ok(topologies) if topologies.is_empty() => return PreFilterResult::Skip,
            Ok(topologies) => topologies,
        };
        PreFilterResult::Filter(Box::new(FnFilter(move |node: &NodeInfo| {
            let labels = &node.labels;
            let has_topology_label = TOPOLOGY_LABELS.iter().any(|label| labels.get(label).is_some());
            let is_match = |topology: &VolumeTopology| {
                let value = labels.get(topology.label).or_else(|| labels.get(&stable_label(topology.label)));
                value.is_some_and(|value| topology.values.iter().any(|known| known == value))
            };
            if has_topology_label && !topologies.iter().all(is_match) {
                return Status::unresolvable("node(s) had no available volume zone");
            }
            Status::success()
        })))
    }
}

/// Maps a beta topology label to its stable name.
fn stable_label(label: &str) -> String {
    label.replace("failure-domain.beta.kubernetes.io/", "topology.kubernetes.io/")
}

impl Requeue for VolumeZone {
    fn is_schedulable_after_change(&self, pod: &PodInfo, change: &ClusterEvent<'_>, _: &State) -> bool {
        match change {
            ClusterEvent::Node(pair) => match pair.changed() {
                Some((old, new)) => old.labels != new.labels,
                None => pair.new.is_some(),
            },
            ClusterEvent::StorageClass(pair) => pair
                .added()
                .is_some_and(|class| class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer")),
            ClusterEvent::VolumeClaim(pair) => pair.new.is_some_and(|claim| is_claim_of(pod, claim, false)),
            ClusterEvent::Volume(pair) => match pair.changed() {
                Some((old, new)) => {
                    let of = |volume: &k8s_openapi::api::core::v1::PersistentVolume, label: &str| {
                        volume.metadata.labels.as_ref().and_then(|labels| labels.get(label)).cloned()
                    };
                    TOPOLOGY_LABELS.iter().any(|label| of(old, label) != of(new, label))
                }
                None => pair.new.is_some(),
            },
            _ => false,
        }
    }
}
