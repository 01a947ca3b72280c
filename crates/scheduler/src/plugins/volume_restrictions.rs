//! VolumeRestrictions: disks that only one pod on a node may use, and ReadWriteOncePod claims.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use serde_json::Value;

use crate::framework::{ClusterEvent, Cycle, Filter, Plugin, PreFilter, PreFilterResult, Requeue, Status};
use crate::state::objects::key;
use crate::state::pod::Volume;
use crate::state::{NodeInfo, PodInfo, State};

pub const NAME: &str = "VolumeRestrictions";

const DISK_CONFLICT: &str = "node(s) had no available disk";
const READ_WRITE_ONCE_POD_CONFLICT: &str = "node(s) unavailable due to PersistentVolumeClaim with ReadWriteOncePod access mode already in-use by another pod";

struct VolumeRestrictions;

/// Creates the plugin.
pub fn make(_: &Value) -> Result<Plugin, String> {
    let plugin = Arc::new(VolumeRestrictions);
    Ok(Plugin::new(NAME).pre_filter(plugin.clone()).requeue(plugin))
}

/// Whether two volumes cannot be used by two pods on the same node.
fn is_volume_conflict(a: &Volume, b: &Volume) -> bool {
    match (a, b) {
        (
            Volume::GcePersistentDisk { name: a, read_only: ro_a },
            Volume::GcePersistentDisk { name: b, read_only: ro_b },
        )
        | (Volume::Iscsi { iqn: a, read_only: ro_a }, Volume::Iscsi { iqn: b, read_only: ro_b }) => {
            a == b && !(*ro_a && *ro_b)
        }
        (Volume::AwsElasticBlockStore { id: a }, Volume::AwsElasticBlockStore { id: b }) => a == b,
        (
            Volume::Rbd { monitors, pool, image, read_only },
            Volume::Rbd { monitors: other_monitors, pool: other_pool, image: other_image, read_only: other },
        ) => {
            monitors.iter().any(|monitor| other_monitors.contains(monitor))
                && pool == other_pool
                && image == other_image
                && !(*read_only && *other)
        }
        _ => false,
    }
}

fn have_volume_conflict(pod: &PodInfo, other: &PodInfo) -> bool {
    pod.volumes
        .iter()
        .any(|volume| other.volumes.iter().any(|other_volume| is_volume_conflict(volume, other_volume)))
}

impl PreFilter for VolumeRestrictions {
    fn pre_filter<'c>(&'c self, cycle: &Cycle<'c>) -> PreFilterResult<'c> {
        let pod = cycle.pod;
        let mut read_write_once_claims = Vec::new();
        for name in pod.named_claims() {
            let Some(claim) = cycle.state.objects.volume_claims.get(&key(&pod.namespace, name)) else {
                return PreFilterResult::Reject(Status::unresolvable(missing_claim(name)));
            };
            let modes = claim.spec.as_ref().and_then(|spec| spec.access_modes.as_deref()).unwrap_or_default();
            if modes.iter().any(|mode| mode == "ReadWriteOncePod") {
                read_write_once_claims.push(&**name);
            }
        }
        let used = |name: &&&str| cycle.state.users_of_claim(&pod.namespace, name) > 0;
        let conflicting_claims = read_write_once_claims.iter().filter(used).count() as i64;
        let disks = pod.volumes.iter().any(|volume| volume.claim().is_none());
        if !disks && conflicting_claims == 0 {
            return PreFilterResult::Skip;
        }
        PreFilterResult::Filter(Box::new(VolumeConflictFilter {
            pod,
            read_write_once_claims,
            conflicting_claims,
        }))
    }
}

/// The error text of upstream's lister for a missing claim.
pub(super) fn missing_claim(name: &str) -> String {
    format!("persistentvolumeclaim {name:?} not found")
}

#[derive(Clone)]
struct VolumeConflictFilter<'c> {
    pod: &'c PodInfo,
    /// The pod's ReadWriteOncePod claims.
    read_write_once_claims: Vec<&'c str>,
    /// How many of them are in use.
    conflicting_claims: i64,
}

impl VolumeConflictFilter<'_> {
    fn count_conflicting_claims(&self, other: &PodInfo) -> i64 {
        other.named_claims().filter(|name| self.read_write_once_claims.contains(&&***name)).count() as i64
    }
}

impl<'c> Filter<'c> for VolumeConflictFilter<'c> {
    fn filter(&self, node: &NodeInfo) -> Status {
        if node.pods.iter().any(|other| have_volume_conflict(self.pod, other)) {
            return Status::unschedulable(DISK_CONFLICT);
        }
        if self.conflicting_claims > 0 {
            return Status::unschedulable(READ_WRITE_ONCE_POD_CONFLICT);
        }
        Status::success()
    }

    fn add_pod(&mut self, pod: &PodInfo, _: &NodeInfo) {
        self.conflicting_claims += self.count_conflicting_claims(pod);
    }

    fn remove_pod(&mut self, pod: &PodInfo, _: &NodeInfo) {
        self.conflicting_claims -= self.count_conflicting_claims(pod);
    }

    fn fork(&self) -> Option<Box<dyn Filter<'c> + 'c>> {
        Some(Box::new(self.clone()))
    }
}

impl Requeue for VolumeRestrictions {
    fn is_schedulable_after_change(&self, pod: &PodInfo, change: &ClusterEvent<'_>, _: &State) -> bool {
        match change {
            ClusterEvent::Node(pair) => pair.added().is_some(),
            ClusterEvent::Pod(pair) => pair.removed().is_some_and(|removed| {
                let shares = |name: &Arc<str>| pod.named_claims().any(|own| own == name);
                removed.namespace == pod.namespace
                    && (have_volume_conflict(pod, removed) || removed.named_claims().any(shares))
            }),
            ClusterEvent::VolumeClaim(pair) => {
                pair.added().is_some_and(|claim| is_claim_of(pod, claim, false))
            }
            _ => false,
        }
    }
}

/// Whether the pod uses the claim; with `ephemeral`, generic ephemeral volumes count, too.
pub(super) fn is_claim_of(
    pod: &PodInfo,
    claim: &k8s_openapi::api::core::v1::PersistentVolumeClaim,
    ephemeral: bool,
) -> bool {
    let meta = &claim.metadata;
    let named = |name: &Arc<str>| meta.name.as_deref() == Some(name);
    meta.namespace.as_deref() == Some(&pod.namespace)
        && if ephemeral {
            pod.volumes.iter().filter_map(Volume::claim).any(named)
        } else {
            pod.named_claims().any(named)
        }
}
