//! The cgroup of a pod: where it is, what its containers may use together, and its end after the runtime has said that
//! nothing of the pod is left. What pods of a kind have together is in [`levels`], what all of them have in [`whole`].
//!
//! The runtime removes the cgroups of containers, not the one of their pod that they are in. One that was killed while
//! it began a container may have forgotten it altogether: what it had started then waits there for ever, and nobody but
//! the kernel knows of it.

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

/// Where it was found that they are, which nobody changes while anything runs.
static HOST_CGROUPS: OnceLock<Cgroups> = OnceLock::new();
/// Where the kernel shows them: one hierarchy for all controllers, or one for each of them inside.
const CGROUP_MOUNT: &str = "/sys/fs/cgroup";
/// All pods live under one cgroup of ours, so that all of it can be removed.
const ROOT_CGROUP: &str = "skiff";
/// Inside that of a node: pods that were promised all they may use are in none of these.
const QOS_CGROUPS: [&str; 2] = ["burstable", "besteffort"];

/// Keeps what pods may use together as it is to be.
pub(crate) async fn run(node: &Node) {
    tokio::join!(node_allocatable::enforce(node), qos::run(node));
}

/// The cgroup of all pods of a node, by where it keeps them: other nodes on this machine must not share its limits.
pub(crate) fn node_cgroup(pods: &Path) -> String {
    // Not by the path, which another one may have as well, in a view of the machine of its own.
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

/// The cgroup of a pod, by how much was promised to it.
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

/// Its quality of service.
pub(crate) fn qos_class(pod: &Pod) -> Cow<'_, str> {
    match pod.status.as_ref().and_then(|status| status.qos_class.as_deref()) {
        Some(class) if !class.is_empty() => class.into(),
        _ => api::core::pod::qos_class(&serde_json::to_value(pod).unwrap_or_default()).into(),
    }
}

/// What a pod may use as a whole; no more than `pids` processes where that is more than none.
pub(crate) fn pod_limits(pod: &Pod, pids: i64) -> Limits {
    let spec = resource_spec(pod);
    let (requested, limit_list) = (requests(&spec), pod_resources(&spec, "limits"));
    let overhead = resource_list(&spec, "overhead");
    // What one container has no limit for, the pod has none for either, unless it says so itself.
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

/// The weight among others of somebody who asks for so many thousandths of a processor.
fn cpu_weight_limits(milli: i64) -> Limits {
    shares_only(resources::shares(milli))
}

/// The weight among others.
pub(crate) fn shares_only(shares: i64) -> Limits {
    // Not as runtimes weigh containers: upstream's nodes have kept to a straight line from 2..262144 to 1..10000.
    let weight = 1 + (shares - resources::MIN_CPU_SHARES) * 9_999 / 262_142;
    let unified = vec![("cpu.weight".to_owned(), weight.to_string())];
    Limits { cpu_shares: shares, unified, ..Limits::default() }
}

/// The time of processors in each period.
pub(crate) fn quota_only(cpu_quota: i64) -> Limits {
    Limits { cpu_quota, cpu_period: resources::CFS_PERIOD_MICROS, ..Limits::default() }
}

/// The memory that is in use in a group.
pub(crate) fn memory_used(group: &str) -> u64 {
    host_cgroups().map_or(0, |cgroups| cgroups.usage(group).memory)
}

/// What all pods of a node use and may use.
pub(crate) fn usage(settings: &Settings) -> Usage {
    host_cgroups().map(|cgroups| cgroups.usage(&node_cgroup(&settings.pods))).unwrap_or_default()
}

/// Makes a cgroup that has these limits.
pub(crate) fn limit(group: &str, limits: &Limits) -> io::Result<()> {
    let cgroups = host_cgroups()?;
    cgroups.create(group)?;
    cgroups.limit(group, limits)
}

/// Ends what runs in the pod's cgroup although nobody knows of it, and removes the cgroup. Fails while something is left:
/// the kernel takes a moment. `pods` is where its node keeps them.
pub fn remove_pod_cgroup(pods: &Path, uid: &str) -> io::Result<()> {
    remove_pod_cgroup_under(Path::new(CGROUP_MOUNT), &node_cgroup(pods), uid)
}

/// Removes what the pods of a node are in, unless there still are some.
pub fn remove_qos_cgroups(pods: &Path) {
    let node = node_cgroup(pods);
    for base in controller_roots(Path::new(CGROUP_MOUNT)) {
        let node_dir = base.join(&node);
        let qos_dirs = QOS_CGROUPS.map(|level| node_dir.join(level));
        let root = base.join(ROOT_CGROUP);
        qos_dirs.iter().chain([&node_dir, &root]).for_each(|dir| drop(fs::remove_dir(dir)));
    }
}

/// The hierarchies, and what else is there.
fn controller_roots(root: &Path) -> Vec<PathBuf> {
    child_cgroups(root).into_iter().chain([root.to_owned()]).collect()
}

fn remove_pod_cgroup_under(root: &Path, node: &str, uid: &str) -> io::Result<()> {
    // Whatever was promised to it.
    let names = ["", "burstable/", "besteffort/"].map(|level| format!("{node}/{level}pod{uid}"));
    let controller_roots = controller_roots(root);
    let paths = controller_roots.iter().flat_map(|base| names.iter().map(|name| base.join(name)));
    let groups: Vec<PathBuf> = paths.filter(|group| group.is_dir()).collect();
    for group in &groups {
        remove(group);
    }
    let remaining: Vec<&PathBuf> = groups.iter().filter(|group| group.exists()).collect();
    // Every hierarchy knows of them.
    let orphans: BTreeSet<i32> = remaining.iter().flat_map(|group| processes(group)).collect();
    for pid in orphans {
        tracing::warn!(pid, uid, "ending what the runtime has forgotten");
        // Fails only when it has ended by itself, which is as good.
        let _ = Pid::from_raw(pid).map(|pid| kill_process(pid, Signal::KILL));
    }
    match remaining.first() {
        Some(group) => Err(io::Error::other(format!("the cgroup {} is still in use", group.display()))),
        None => Ok(()),
    }
}

/// Removes a cgroup and those below it; the kernel keeps those in which something runs.
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
