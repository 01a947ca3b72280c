//! NodeVolumeLimits: limits the CSI volumes of each driver on a node to the count in its CSINode.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::storage::v1::CSINode;
use serde_json::Value;

use super::volume_restrictions::{is_claim_of, missing_claim};
use crate::framework::{ClusterEvent, Cycle, FnFilter, Plugin, PreFilter, PreFilterResult, Requeue, Status};
use crate::state::objects::{Objects, key};
use crate::state::pod::Volume;
use crate::state::{NodeInfo, PodInfo, State};

pub const NAME: &str = "NodeVolumeLimits";

struct NodeVolumeLimits;

/// Creates the plugin.
pub fn make(_: &Value) -> Result<Plugin, String> {
    let plugin = Arc::new(NodeVolumeLimits);
    Ok(Plugin::new(NAME).pre_filter(plugin.clone()).requeue(plugin))
}

/// Drivers by unique volume name.
type Volumes = BTreeMap<String, String>;

/// The CSI volumes of a pod. A claim without a volume yet counts under the claim's name. `strict`: a missing
/// claim is an error.
fn volumes(pod: &PodInfo, objects: &Objects, strict: bool) -> Result<Volumes, String> {
    let mut found = Volumes::new();
    for name in pod.volumes.iter().filter_map(Volume::claim) {
        let claim_key = key(&pod.namespace, name);
        let Some(claim) = objects.volume_claims.get(&claim_key) else {
            if strict {
                return Err(format!("looking up PVC {claim_key}: {}", missing_claim(name)));
            }
            continue;
        };
        if let Some((driver, handle)) = driver(claim, &claim_key, objects) {
            found.insert(format!("{driver}/{handle}"), driver);
        }
    }
    Ok(found)
}

fn driver(
    claim: &core::PersistentVolumeClaim,
    claim_key: &str,
    objects: &Objects,
) -> Option<(String, String)> {
    let volume = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_ref());
    let bound_volume = volume.filter(|name| !name.is_empty()).and_then(|name| objects.volumes.get(name));
    if let Some(volume) = bound_volume {
        let csi = volume.spec.as_ref()?.csi.as_ref()?;
        return Some((csi.driver.clone(), csi.volume_handle.clone()));
    }
    let class = objects.storage_classes.get(Objects::storage_class_of(claim))?;
    Some((class.provisioner.clone(), format!("claim-{claim_key}")))
}

fn limits(node: Option<&CSINode>) -> BTreeMap<&str, i64> {
    let drivers = node.into_iter().flat_map(|node| &node.spec.drivers);
    let limit =
        drivers.filter_map(|driver| Some((&*driver.name, driver.allocatable.as_ref()?.count?.into())));
    limit.collect()
}

impl PreFilter for NodeVolumeLimits {
    fn pre_filter<'c>(&'c self, cycle: &Cycle<'c>) -> PreFilterResult<'c> {
        let objects = &cycle.state.objects;
        if !cycle.pod.volumes.iter().any(|volume| volume.claim().is_some()) {
            return PreFilterResult::Skip;
        }
        let new = match volumes(cycle.pod, objects, true) {
            Err(message) => return PreFilterResult::Reject(Status::unresolvable(message)),
            Ok(new) => new,
        };
        PreFilterResult::Filter(Box::new(FnFilter(move |node: &NodeInfo| {
            if fits(new.clone(), node, objects) {
                return Status::success();
            }
            Status::unschedulable("node(s) exceed max volume count")
        })))
    }
}

fn fits(mut new: Volumes, node: &NodeInfo, objects: &Objects) -> bool {
    let limits = limits(objects.csi_nodes.get(&*node.name).map(|node| &**node));
    if limits.is_empty() || new.is_empty() {
        return true;
    }
    let mut attached = Volumes::new();
    for pod in &node.pods {
        attached.extend(volumes(pod, objects, false).unwrap_or_default());
    }
    new.retain(|volume, _| !attached.contains_key(volume));
    for attachment in objects.attachments.values().filter(|one| one.spec.node_name == *node.name) {
        let volume = attachment.spec.source.persistent_volume_name.as_ref();
        let volume =
            volume.and_then(|name| objects.volumes.get(name)).and_then(|volume| volume.spec.as_ref());
        if let Some(csi) = volume.and_then(|spec| spec.csi.as_ref()) {
            let driver = &attachment.spec.attacher;
            attached.insert(format!("{driver}/{}", csi.volume_handle), driver.clone());
        }
    }
    let count = |all: &Volumes, driver: &str| all.values().filter(|known| *known == driver).count() as i64;
    let within = |driver: &String| {
        let limit = limits.get(&**driver);
        limit.is_none_or(|limit| count(&attached, driver) + count(&new, driver) <= *limit)
    };
    new.values().all(within)
}

impl Requeue for NodeVolumeLimits {
    fn is_schedulable_after_change(&self, pod: &PodInfo, change: &ClusterEvent<'_>, _: &State) -> bool {
        match change {
            ClusterEvent::CsiNode(pair) => match (pair.old, pair.new) {
                (None, Some(_)) => true,
                (Some(old), Some(new)) => {
                    let (old, new) = (limits(Some(old)), limits(Some(new)));
                    new.iter().any(|(driver, limit)| *limit > old.get(driver).copied().unwrap_or_default())
                }
                _ => false,
            },
            ClusterEvent::Pod(pair) => pair.removed().is_some_and(|removed| {
                (removed.node_name.is_some() || removed.nominated.is_some())
                    && removed.volumes.iter().any(|volume| volume.claim().is_some())
            }),
            ClusterEvent::VolumeClaim(pair) => {
                pair.added().is_some_and(|claim| is_claim_of(pod, claim, true))
            }
            ClusterEvent::Attachment(pair) => pair.removed().is_some() && pod.named_claims().next().is_some(),
            _ => false,
        }
    }
}
