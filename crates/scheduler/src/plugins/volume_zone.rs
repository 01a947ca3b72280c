//! VolumeZone: a pod runs in the zone and region of its volumes.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use serde_json::Value;

use super::volume_restrictions::{is_claim_of, missing_claim};
use crate::framework::{Change, Cycle, Plain, Plugin, PreFilter, Prepared, Requeue, Status};
use crate::state::objects::{Objects, key};
use crate::state::{NodeInfo, PodInfo, State};

pub const NAME: &str = "VolumeZone";

const LABELS: [&str; 4] = [
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
];

struct VolumeZone;

/// Makes the plugin.
pub fn make(_: &Value) -> Result<Plugin, String> {
    let plugin = Arc::new(VolumeZone);
    Ok(Plugin::new(NAME).pre_filter(plugin.clone()).requeue(plugin))
}

/// A label a node must have, with the values that will do.
struct Wanted {
    label: &'static str,
    values: Vec<String>,
}

fn wanted(pod: &PodInfo, objects: &Objects) -> Result<Vec<Wanted>, String> {
    let mut all = Vec::new();
    for name in pod.named_claims() {
        let claim =
            objects.volume_claims.get(&key(&pod.namespace, name)).ok_or_else(|| missing_claim(name))?;
        let volume = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default();
        if volume.is_empty() {
            let class = Objects::class_of(claim);
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
        for label in LABELS {
            let Some(text) = found.metadata.labels.as_ref().and_then(|labels| labels.get(label)) else {
                continue;
            };
            let values: Vec<String> = text.split("__").map(|value| value.trim().to_owned()).collect();
            if !values.iter().any(String::is_empty) {
                all.push(Wanted { label, values });
            }
        }
    }
    Ok(all)
}

impl PreFilter for VolumeZone {
    fn pre_filter<'c>(&'c self, cycle: &Cycle<'c>) -> Prepared<'c> {
        let wanted = match wanted(cycle.pod, &cycle.state.objects) {
            Err(words) => return Prepared::Reject(Status::unresolvable(words)),
            Ok(wanted) if wanted.is_empty() => return Prepared::Skip,
            Ok(wanted) => wanted,
        };
        Prepared::Filter(Box::new(Plain(move |node: &NodeInfo| {
            let labels = &node.labels;
            let somewhere = LABELS.iter().any(|label| labels.get(label).is_some());
            let there = |wanted: &Wanted| {
                let value = labels.get(wanted.label).or_else(|| labels.get(&current(wanted.label)));
                value.is_some_and(|value| wanted.values.iter().any(|known| known == value))
            };
            if somewhere && !wanted.iter().all(there) {
                return Status::unresolvable("node(s) had no available volume zone");
            }
            Status::success()
        })))
    }
}

/// The name a label has today.
fn current(label: &str) -> String {
    label.replace("failure-domain.beta.kubernetes.io/", "topology.kubernetes.io/")
}

impl Requeue for VolumeZone {
    fn helps(&self, pod: &PodInfo, change: &Change<'_>, _: &State) -> bool {
        match change {
            Change::Node(pair) => match pair.changed() {
                Some((old, new)) => old.labels != new.labels,
                None => pair.new.is_some(),
            },
            Change::StorageClass(pair) => pair
                .added()
                .is_some_and(|class| class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer")),
            Change::VolumeClaim(pair) => pair.new.is_some_and(|claim| is_claim_of(pod, claim, false)),
            Change::Volume(pair) => match pair.changed() {
                Some((old, new)) => {
                    let of = |volume: &k8s_openapi::api::core::v1::PersistentVolume, label: &str| {
                        volume.metadata.labels.as_ref().and_then(|labels| labels.get(label)).cloned()
                    };
                    LABELS.iter().any(|label| of(old, label) != of(new, label))
                }
                None => pair.new.is_some(),
            },
            _ => false,
        }
    }
}
