//! iSCSI disks, which the kubelet logs in to by itself. They need no attach operation, but a file system
//! that two nodes mount at the same time is corrupted. Therefore `status.volumesAttached` serves as the
//! permission to use a disk, and an exclusive disk is listed on at most one node at a time. Does no I/O.

use std::collections::{BTreeSet, HashMap};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, PersistentVolume};
use reconcile::{EventType, Object};

use super::plan::{self, Action, NodeState, VolumeToAttach};

const ISCSI_NAME_PREFIX: &str = "kubernetes.io/iscsi/";

/// The actions for the disks of one node.
pub struct DiskPlan {
    pub actions: Vec<Action>,
    /// Names of the disks to list in `status.volumesAttached`.
    pub report: Vec<String>,
    /// When to sync the node again.
    pub requeue_at: Option<Timestamp>,
}

/// The unique volume name of a disk in node statuses.
pub fn unique_name(volume: &PersistentVolume) -> Option<String> {
    let disk = volume.spec.as_ref()?.iscsi.as_ref()?;
    Some(format!("{ISCSI_NAME_PREFIX}{}:{}:{}", disk.target_portal, disk.iqn, disk.lun))
}

/// The disks in `status.volumesAttached`, which the node may use. `status.volumesInUse` may list more: the
/// kubelet adds a disk there before it has the permission.
pub fn attached_disks(node: &Node) -> BTreeSet<&str> {
    let attached = node.status.iter().flat_map(|status| status.volumes_attached.iter().flatten());
    attached.map(|volume| volume.name.as_str()).filter(|name| is_disk(name)).collect()
}

pub fn is_disk(name: &str) -> bool {
    name.starts_with(ISCSI_NAME_PREFIX)
}

/// The key of a disk of a node in the table of unused volumes.
pub fn disk_key(name: &str, node: &str) -> String {
    format!("{name} {node}")
}

/// Plans the disks of a node. `since` holds the time since when each disk is unused.
pub fn plan(state: &NodeState<'_>, since: &HashMap<String, Timestamp>, now: Timestamp) -> DiskPlan {
    let mut plan = DiskPlan { actions: Vec::new(), report: Vec::new(), requeue_at: None };
    let Some(node) = state.node else { return plan };
    let reported = plan::reported_volumes(node);
    let mut desired_names = BTreeSet::new();
    for to_attach in state.disks {
        let Some(name) = unique_name(&to_attach.volume) else { continue };
        desired_names.insert(name.clone());
        let is_new = !reported.contains(&name);
        if is_new && state.taken.contains(&name) {
            plan::report_multi_attach_error(&mut plan.actions, to_attach);
            continue;
        }
        if is_new {
            let message = format!("AttachVolume.Attach succeeded for volume {:?} ", to_attach.volume.name());
            plan::record_pod_events(
                &mut plan.actions,
                to_attach,
                EventType::Normal,
                "SuccessfulAttachVolume",
                &message,
            );
        }
        plan.report.push(name);
    }
    let used = node.status.as_ref().and_then(|status| status.volumes_in_use.as_deref()).unwrap_or_default();
    for name in reported.into_iter().filter(|name| is_disk(name) && !desired_names.contains(name)) {
        let deadline = plan::unmount_deadline(since.get(&disk_key(&name, state.name)), now);
        if !used.contains(&name) || plan::is_lost(node, deadline, now) {
            continue;
        }
        plan.report.push(name);
        if deadline > now {
            plan.requeue_at = Some(plan.requeue_at.map_or(deadline, |other| other.min(deadline)));
        }
    }
    plan
}

/// Records the disks that a node is about to be assigned, because the caches do not show them yet. Returns
/// whether an assignment that was recorded earlier was dropped, in which case another node may get the disk.
pub fn record_assigned_disks(
    assigned_disks: &mut HashMap<String, String>,
    state: &NodeState<'_>,
    actions: &[Action],
) -> bool {
    let report = actions.iter().find_map(Action::volumes_attached);
    // A released disk stays in `volumesAttached` until the update is written, and the cached status is never
    // older than our last write. So the record can be dropped here.
    let has = state.node.map(attached_disks).unwrap_or_default();
    let mut is_dropped = false;
    assigned_disks.retain(|disk, node| {
        let is_its_own = *node == state.name;
        is_dropped |= is_its_own && report.is_none() && !has.contains(disk.as_str());
        !is_its_own
    });
    let disks = report.into_iter().flatten().map(|volume| &volume.name).filter(|name| is_disk(name));
    assigned_disks.extend(disks.map(|name| (name.clone(), state.name.to_owned())));
    is_dropped
}

/// The names of the disks that only one node may use at a time.
pub fn exclusive_disk_names(disks: &[VolumeToAttach]) -> impl Iterator<Item = String> {
    let exclusive_disks = disks.iter().filter(|disk| plan::is_exclusive(&disk.volume));
    exclusive_disks.filter_map(|disk| unique_name(&disk.volume))
}
