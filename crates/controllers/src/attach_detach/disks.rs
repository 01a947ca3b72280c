//! Disks that nodes log in to by themselves over iSCSI. Nothing has to be done to attach one, but a file system that two
//! nodes mount at once is soon none any more: so what stands in a node's status is leave to use a disk, and one that is for
//! one node alone is in one status at a time. Pure.

use std::collections::{BTreeSet, HashMap};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, PersistentVolume};
use reconcile::{EventType, Object};

use super::plan::{self, Action, NodeState, VolumeToAttach};

const ISCSI_NAME_PREFIX: &str = "kubernetes.io/iscsi/";

/// What is to be done about disks.
pub struct DiskPlan {
    pub actions: Vec<Action>,
    /// Those that stand in the node's status.
    pub report: Vec<String>,
    /// When to look again.
    pub requeue_at: Option<Timestamp>,
}

/// The name of a disk in statuses of nodes.
pub fn unique_name(volume: &PersistentVolume) -> Option<String> {
    let disk = volume.spec.as_ref()?.iscsi.as_ref()?;
    Some(format!("{ISCSI_NAME_PREFIX}{}:{}:{}", disk.target_portal, disk.iqn, disk.lun))
}

/// The disks that a node may use. Those it says it uses are more: it says so before it may.
pub fn attached_disks(node: &Node) -> BTreeSet<&str> {
    let attached = node.status.iter().flat_map(|status| status.volumes_attached.iter().flatten());
    attached.map(|volume| volume.name.as_str()).filter(|name| is_disk(name)).collect()
}

pub fn is_disk(name: &str) -> bool {
    name.starts_with(ISCSI_NAME_PREFIX)
}

/// By what it is remembered since when nobody on a node wants a disk.
pub fn disk_key(name: &str, node: &str) -> String {
    format!("{name} {node}")
}

/// `since` tells since when disks are wanted by nobody.
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

/// Remembers what a node is about to be given, which not everybody has seen yet; whether it was to be given a disk that it is
/// not given after all, and that another may be waiting for.
pub fn record_assigned_disks(
    assigned_disks: &mut HashMap<String, String>,
    state: &NodeState<'_>,
    actions: &[Action],
) -> bool {
    let report = actions.iter().find_map(Action::volumes_attached);
    // What it gives back stands in its status until that is written, and its status is never older than our last word.
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

/// Those of a node's disks that another node must not have meanwhile.
pub fn exclusive_disk_names(disks: &[VolumeToAttach]) -> impl Iterator<Item = String> {
    let exclusive_disks = disks.iter().filter(|disk| plan::is_exclusive(&disk.volume));
    exclusive_disks.filter_map(|disk| unique_name(&disk.volume))
}
