//! Disks that nodes log in to by themselves over iSCSI. Nothing has to be done to attach one, but a file system that two
//! nodes mount at once is soon none any more: so what stands in a node's status is leave to use a disk, and one that is for
//! one node alone is in one status at a time. Pure.

use std::collections::{BTreeSet, HashMap};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, PersistentVolume};
use reconcile::{Object, Severity};

use super::plan::{self, Action, NodeState, Wanted};

const PREFIX: &str = "kubernetes.io/iscsi/";

/// What is to be done about disks.
pub struct Plan {
    pub actions: Vec<Action>,
    /// Those that stand in the node's status.
    pub report: Vec<String>,
    /// When to look again.
    pub recheck: Option<Timestamp>,
}

/// The name of a disk in statuses of nodes.
pub fn unique_name(volume: &PersistentVolume) -> Option<String> {
    let disk = volume.spec.as_ref()?.iscsi.as_ref()?;
    Some(format!("{PREFIX}{}:{}:{}", disk.target_portal, disk.iqn, disk.lun))
}

/// The disks that a node may use. Those it says it uses are more: it says so before it may.
pub fn on_node(node: &Node) -> BTreeSet<&str> {
    let attached = node.status.iter().flat_map(|status| status.volumes_attached.iter().flatten());
    attached.map(|volume| volume.name.as_str()).filter(|name| is_disk(name)).collect()
}

pub fn is_disk(name: &str) -> bool {
    name.starts_with(PREFIX)
}

/// By what it is remembered since when nobody on a node wants a disk.
pub fn mark(name: &str, node: &str) -> String {
    format!("{name} {node}")
}

/// `since` tells since when disks are wanted by nobody.
pub fn plan(state: &NodeState<'_>, since: &HashMap<String, Timestamp>, now: Timestamp) -> Plan {
    let mut plan = Plan { actions: Vec::new(), report: Vec::new(), recheck: None };
    let Some(node) = state.node else { return plan };
    let reported = plan::reported(node);
    let mut wanted_names = BTreeSet::new();
    for wanted in state.disks {
        let Some(name) = unique_name(&wanted.volume) else { continue };
        wanted_names.insert(name.clone());
        let is_new = !reported.contains(&name);
        if is_new && state.taken.contains(&name) {
            plan::tell_of_rivals(&mut plan.actions, wanted);
            continue;
        }
        if is_new {
            let message = format!("AttachVolume.Attach succeeded for volume {:?} ", wanted.volume.name());
            plan::tell(&mut plan.actions, wanted, Severity::Normal, "SuccessfulAttachVolume", &message);
        }
        plan.report.push(name);
    }
    let used = node.status.as_ref().and_then(|status| status.volumes_in_use.as_deref()).unwrap_or_default();
    for name in reported.into_iter().filter(|name| is_disk(name) && !wanted_names.contains(name)) {
        let due = plan::due(since.get(&mark(&name, state.name)), now);
        if !used.contains(&name) || plan::is_lost(node, due, now) {
            continue;
        }
        plan.report.push(name);
        if due > now {
            plan.recheck = Some(plan.recheck.map_or(due, |other| other.min(due)));
        }
    }
    plan
}

/// Remembers what a node is about to be given, which not everybody has seen yet; whether it was to be given a disk that it is
/// not given after all, and that another may be waiting for.
pub fn remember(given: &mut HashMap<String, String>, state: &NodeState<'_>, actions: &[Action]) -> bool {
    let report = actions.iter().find_map(Action::report);
    // What it gives back stands in its status until that is written, and its status is never older than our last word.
    let has = state.node.map(on_node).unwrap_or_default();
    let mut is_dropped = false;
    given.retain(|disk, node| {
        let is_its_own = *node == state.name;
        is_dropped |= is_its_own && report.is_none() && !has.contains(disk.as_str());
        !is_its_own
    });
    let disks = report.into_iter().flatten().map(|volume| &volume.name).filter(|name| is_disk(name));
    given.extend(disks.map(|name| (name.clone(), state.name.to_owned())));
    is_dropped
}

/// Those of a node's disks that another node must not have meanwhile.
pub fn exclusive(disks: &[Wanted]) -> impl Iterator<Item = String> {
    let alone = disks.iter().filter(|disk| plan::is_exclusive(&disk.volume));
    alone.filter_map(|disk| unique_name(&disk.volume))
}
