//! Cgroups of pods: their paths, their limits, and their removal after the runtime has removed the
//! containers. [`qos`] has the cgroups of the QoS classes, [`node_allocatable`] the limits on all
//! pods.
//!
//! The runtime removes the cgroups of containers, but not the parent cgroup of the pod. A runtime
//! that was killed while it created a container may not know the container any more. Its processes
//! would then stay forever, so [`remove_pod_cgroup`] kills them.
//!
//! Upstream: `pkg/kubelet/cm`.

mod node_allocatable;
mod qos;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use api::resources::{pod_resources, resource_list};
use k8s_openapi::api::core::v1::Pod;
use reconcile::Object as _;
use rustix::process::{Pid, Signal, kill_process};
use schema::quantity::Quantity;
use sys::cgroup::{Cgroups, Limits, Usage};

use crate::admission::requests;
use crate::config::resources;
use crate::pod::resource_spec;
use crate::{Node, Settings};
pub use node_allocatable::NodeReservation;

/// The detected hierarchies. They do not change while the machine runs.
static HOST_CGROUPS: OnceLock<Cgroups> = OnceLock::new();
/// The unified hierarchy of version 2, or the parent of the hierarchies of version 1.
const CGROUP_MOUNT: &str = "/sys/fs/cgroup";
/// The parent of all pod cgroups. Removing it removes everything.
const ROOT_CGROUP: &str = "skiff";
/// The cgroups of the QoS classes below a node's cgroup. Guaranteed pods are directly below the
/// node.
const QOS_CGROUPS: [&str; 2] = ["burstable", "besteffort"];

/// Keeps the limits of the QoS classes and of all pods up to date.
pub(crate) async fn run(node: &Node) {
    tokio::join!(node_allocatable::enforce(node), qos::run(node));
}

/// The cgroup of all pods of a node, derived from its pods directory. Several nodes can run on one
/// machine and must not share limits.
pub(crate) fn node_cgroup(pods: &Path) -> String {
    // Device and inode, not the path: nodes in different mount namespaces may use the same path.
    match fs::metadata(pods) {
        Ok(metadata) => format!("{ROOT_CGROUP}/node-{:x}-{:x}", metadata.dev(), metadata.ino()),
        Err(_) => ROOT_CGROUP.to_owned(),
    }
}

fn host_cgroups() -> io::Result<&'static Cgroups> {
    match HOST_CGROUPS.get() {
        Some(known) => Ok(known),
        None => Cgroups::of_host().map(|found| HOST_CGROUPS.get_or_init(|| found)),
    }
}

/// The cgroup of a pod, by its QoS class.
pub(crate) fn pod_cgroup(pod: &Pod, settings: &Settings) -> String {
    pod_cgroup_under(&node_cgroup(&settings.pods), pod)
}

fn pod_cgroup_under(node: &str, pod: &Pod) -> String {
    let level = match qos_class(pod).as_ref() {
        "Burstable" => "burstable/",
        "BestEffort" => "besteffort/",
        _ => "",
    };
    format!("/{node}/{level}pod{}", pod.uid())
}

/// The QoS class of a pod.
pub(crate) fn qos_class(pod: &Pod) -> Cow<'_, str> {
    match pod.status.as_ref().and_then(|status| status.qos_class.as_deref()) {
        Some(class) if !class.is_empty() => class.into(),
        _ => api::core::pod::qos_class(&serde_json::to_value(pod).unwrap_or_default()).into(),
    }
}

/// The limits on the cgroup of a pod, with at most `pids` processes. `pids` of zero or less means
/// no limit.
pub(crate) fn pod_limits(pod: &Pod, pids: i64) -> Limits {
    let spec = resource_spec(pod);
    let (requested, limit_list) = (requests(&spec), pod_resources(&spec, "limits"));
    let overhead = resource_list(&spec, "overhead");
    // As upstream: one container without a limit makes the pod unlimited, unless the pod itself
    // sets a limit.
    let is_bounded = |name: &str| {
        let has = |resources: &serde_json::Value| resources["limits"][name].is_string();
        let containers = ["initContainers", "containers"].map(|field| spec[field].as_array().cloned());
        has(&spec["resources"]) || containers.iter().flatten().flatten().all(|one| has(&one["resources"]))
    };
    let bound = |name: &str| {
        let bound = limit_list.get(name).filter(|_| is_bounded(name))?;
        Some(overhead.get(name).map_or(*bound, |more| *bound + *more))
    };
    Limits {
        cpu_quota: bound("cpu").map_or(0, |cpu| resources::quota(cpu.milli())),
        cpu_period: resources::CFS_PERIOD_MICROS,
        memory: bound("memory").map_or(0, |memory| memory.value()),
        pids: pids.max(0),
        ..cpu_weight_limits(requested.get("cpu").map_or(0, Quantity::milli))
    }
}

/// The CPU weight for a request in millicores.
fn cpu_weight_limits(milli: i64) -> Limits {
    shares_only(resources::shares(milli))
}

/// The CPU weight for CPU shares.
pub(crate) fn shares_only(shares: i64) -> Limits {
    // The kubelet maps 2..262144 to 1..10000 linearly. Newer runtimes use another formula for
    // containers.
    let weight = 1 + (shares - resources::MIN_CPU_SHARES) * 9_999 / 262_142;
    let unified = vec![("cpu.weight".to_owned(), weight.to_string())];
    Limits { cpu_shares: shares, unified, ..Limits::default() }
}

/// The CPU quota per CFS period.
pub(crate) fn quota_only(cpu_quota: i64) -> Limits {
    Limits { cpu_quota, cpu_period: resources::CFS_PERIOD_MICROS, ..Limits::default() }
}

/// The memory usage of a cgroup in bytes.
pub(crate) fn memory_used(group: &str) -> u64 {
    host_cgroups().map_or(0, |cgroups| cgroups.usage(group).memory)
}

/// The usage and limits of all pods of a node.
pub(crate) fn usage(settings: &Settings) -> Usage {
    host_cgroups().map(|cgroups| cgroups.usage(&node_cgroup(&settings.pods))).unwrap_or_default()
}

/// Creates a cgroup if needed and sets its limits.
pub(crate) fn limit(group: &str, limits: &Limits) -> io::Result<()> {
    let cgroups = host_cgroups()?;
    cgroups.create(group)?;
    cgroups.limit(group, limits)
}

/// Kills processes that are left in the pod's cgroup and removes the cgroup. Fails while processes
/// remain: the kernel takes a moment to end them. `pods` is the node's pods directory.
pub fn remove_pod_cgroup(pods: &Path, uid: &str) -> io::Result<()> {
    remove_pod_cgroup_under(Path::new(CGROUP_MOUNT), &node_cgroup(pods), uid)
}

/// Removes the cgroups of the QoS classes, the node and the root, unless pods are left in them.
pub fn remove_qos_cgroups(pods: &Path) {
    let node = node_cgroup(pods);
    for base in controller_roots(Path::new(CGROUP_MOUNT)) {
        let node_dir = base.join(&node);
        let qos_dirs = QOS_CGROUPS.map(|level| node_dir.join(level));
        let root = base.join(ROOT_CGROUP);
        qos_dirs.iter().chain([&node_dir, &root]).for_each(|dir| drop(fs::remove_dir(dir)));
    }
}

/// The mount points of the hierarchies (version 1), and the parent itself (version 2).
fn controller_roots(root: &Path) -> Vec<PathBuf> {
    child_cgroups(root).into_iter().chain([root.to_owned()]).collect()
}

fn remove_pod_cgroup_under(root: &Path, node: &str, uid: &str) -> io::Result<()> {
    // The QoS class is not known any more, so look in all of them.
    let names = ["", "burstable/", "besteffort/"].map(|level| format!("{node}/{level}pod{uid}"));
    let controller_roots = controller_roots(root);
    let paths = controller_roots.iter().flat_map(|base| names.iter().map(|name| base.join(name)));
    let groups: Vec<PathBuf> = paths.filter(|group| group.is_dir()).collect();
    for group in &groups {
        remove(group);
    }
    let remaining: Vec<&PathBuf> = groups.iter().filter(|group| group.exists()).collect();
    // With version 1 every hierarchy lists the same processes.
    let orphans: BTreeSet<i32> = remaining.iter().flat_map(|group| processes(group)).collect();
    for pid in orphans {
        tracing::warn!(pid, uid, "killing a process that the runtime no longer tracks");
        // Fails only if the process has ended meanwhile.
        let _ = Pid::from_raw(pid).map(|pid| kill_process(pid, Signal::KILL));
    }
    match remaining.first() {
        Some(group) => Err(io::Error::other(format!("the cgroup {} is still in use", group.display()))),
        None => Ok(()),
    }
}

/// Removes a cgroup and its children. The kernel keeps those that have processes.
fn remove(group: &Path) {
    child_cgroups(group).iter().for_each(|group| remove(group));
    let _ = fs::remove_dir(group);
}

fn processes(group: &Path) -> Vec<i32> {
    let own = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    let own = own.lines().filter_map(|line| line.parse().ok());
    own.chain(child_cgroups(group).iter().flat_map(|group| processes(group))).collect()
}

fn child_cgroups(group: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(group).into_iter().flatten().flatten();
    let groups = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    groups.map(|entry| entry.path()).collect()
}

#[cfg(test)]
mod tests;
