//! The cgroup of a pod: where it is, what its containers may use together, and its end after the runtime has said that
//! nothing of the pod is left. What pods of a kind have together is in [`levels`], what all of them have in [`whole`].
//!
//! The runtime removes the cgroups of containers, not the one of their pod that they are in. One that was killed while
//! it began a container may have forgotten it altogether: what it had started then waits there for ever, and nobody but
//! the kernel knows of it.

mod levels;
mod whole;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use api::resources::{list, of_pod};
use k8s_openapi::api::core::v1::Pod;
use reconcile::Object as _;
use rustix::process::{Pid, Signal, kill_process};
use schema::quantity::Quantity;
use sys::cgroup::{Cgroups, Limits, Usage};

use crate::admission::requests;
use crate::config::resources;
use crate::pod::needs;
use crate::{Node, Settings};
pub use whole::Reserved;

/// Where it was found that they are, which nobody changes while anything runs.
static HOST: OnceLock<Cgroups> = OnceLock::new();
/// Where the kernel shows them: one hierarchy for all controllers, or one for each of them inside.
const MOUNTED: &str = "/sys/fs/cgroup";
/// All pods live under one cgroup of ours, so that all of it can be removed.
const ROOT: &str = "skiff";
/// Inside that of a node: pods that were promised all they may use are in none of these.
const LEVELS: [&str; 2] = ["burstable", "besteffort"];

/// Keeps what pods may use together as it is to be.
pub(crate) async fn keep(node: &Node) {
    tokio::join!(whole::enforce(node), levels::keep(node));
}

/// The cgroup of all pods of a node, by where it keeps them: other nodes on this machine must not share its limits.
pub(crate) fn of_node(pods: &Path) -> String {
    // Not by the path, which another one may have as well, in a view of the machine of its own.
    match fs::metadata(pods) {
        Ok(place) => format!("{ROOT}/node-{:x}-{:x}", place.dev(), place.ino()),
        Err(_) => ROOT.to_owned(),
    }
}

fn host() -> io::Result<&'static Cgroups> {
    match HOST.get() {
        Some(known) => Ok(known),
        None => Cgroups::of_host().map(|found| HOST.get_or_init(|| found)),
    }
}

/// The cgroup of a pod, by how much was promised to it.
pub(crate) fn of(pod: &Pod, settings: &Settings) -> String {
    of_below(&of_node(&settings.pods), pod)
}

fn of_below(node: &str, pod: &Pod) -> String {
    let level = match class(pod).as_ref() {
        "Burstable" => "burstable/",
        "BestEffort" => "besteffort/",
        _ => "",
    };
    format!("/{node}/{level}pod{}", pod.uid())
}

/// Its quality of service.
pub(crate) fn class(pod: &Pod) -> Cow<'_, str> {
    match pod.status.as_ref().and_then(|status| status.qos_class.as_deref()) {
        Some(class) if !class.is_empty() => class.into(),
        _ => api::core::pod::qos_class(&serde_json::to_value(pod).unwrap_or_default()).into(),
    }
}

/// What a pod may use as a whole; no more than `pids` processes where that is more than none.
pub(crate) fn limits(pod: &Pod, pids: i64) -> Limits {
    let spec = needs(pod);
    let (asked, most) = (requests(&spec), of_pod(&spec, "limits"));
    let overhead = list(&spec, "overhead");
    // What one container has no limit for, the pod has none for either, unless it says so itself.
    let is_bounded = |name: &str| {
        let has = |resources: &serde_json::Value| resources["limits"][name].is_string();
        let containers = ["initContainers", "containers"].map(|field| spec[field].as_array().cloned());
        has(&spec["resources"]) || containers.iter().flatten().flatten().all(|one| has(&one["resources"]))
    };
    let bound = |name: &str| {
        let bound = most.get(name).filter(|_| is_bounded(name))?;
        Some(overhead.get(name).map_or(*bound, |more| *bound + *more))
    };
    Limits {
        cpu_quota: bound("cpu").map_or(0, |cpu| resources::quota(cpu.milli())),
        cpu_period: resources::PERIOD,
        memory: bound("memory").map_or(0, |memory| memory.value()),
        pids: pids.max(0),
        ..weighed(asked.get("cpu").map_or(0, Quantity::milli))
    }
}

/// The weight among others of somebody who asks for so many thousandths of a processor.
fn weighed(milli: i64) -> Limits {
    shares_only(resources::shares(milli))
}

/// The weight among others.
pub(crate) fn shares_only(shares: i64) -> Limits {
    // Not as runtimes weigh containers: upstream's nodes have kept to a straight line from 2..262144 to 1..10000.
    let weight = 1 + (shares - resources::LEAST_SHARES) * 9_999 / 262_142;
    let unified = vec![("cpu.weight".to_owned(), weight.to_string())];
    Limits { cpu_shares: shares, unified, ..Limits::default() }
}

/// The time of processors in each period.
pub(crate) fn quota_only(cpu_quota: i64) -> Limits {
    Limits { cpu_quota, cpu_period: resources::PERIOD, ..Limits::default() }
}

/// The memory that is in use in a group.
pub(crate) fn memory_used(group: &str) -> u64 {
    host().map_or(0, |cgroups| cgroups.usage(group).memory)
}

/// What all pods of a node use and may use.
pub(crate) fn usage(settings: &Settings) -> Usage {
    host().map(|cgroups| cgroups.usage(&of_node(&settings.pods))).unwrap_or_default()
}

/// Makes a cgroup that has these limits.
pub(crate) fn limit(group: &str, limits: &Limits) -> io::Result<()> {
    let cgroups = host()?;
    cgroups.create(group)?;
    cgroups.limit(group, limits)
}

/// Ends what runs in the pod's cgroup although nobody knows of it, and removes the cgroup. Fails while something is left:
/// the kernel takes a moment. `pods` is where its node keeps them.
pub fn clear(pods: &Path, uid: &str) -> io::Result<()> {
    clear_below(Path::new(MOUNTED), &of_node(pods), uid)
}

/// Removes what the pods of a node are in, unless there still are some.
pub fn remove_levels(pods: &Path) {
    let node = of_node(pods);
    for base in bases(Path::new(MOUNTED)) {
        let around = base.join(&node);
        let levels = LEVELS.map(|level| around.join(level));
        let root = base.join(ROOT);
        levels.iter().chain([&around, &root]).for_each(|place| drop(fs::remove_dir(place)));
    }
}

/// The hierarchies, and what else is there.
fn bases(root: &Path) -> Vec<PathBuf> {
    inside(root).into_iter().chain([root.to_owned()]).collect()
}

fn clear_below(root: &Path, node: &str, uid: &str) -> io::Result<()> {
    // Whatever was promised to it.
    let names = ["", "burstable/", "besteffort/"].map(|level| format!("{node}/{level}pod{uid}"));
    let bases = bases(root);
    let places = bases.iter().flat_map(|base| names.iter().map(|name| base.join(name)));
    let groups: Vec<PathBuf> = places.filter(|group| group.is_dir()).collect();
    for group in &groups {
        remove(group);
    }
    let left: Vec<&PathBuf> = groups.iter().filter(|group| group.exists()).collect();
    // Every hierarchy knows of them.
    let forgotten: BTreeSet<i32> = left.iter().flat_map(|group| processes(group)).collect();
    for pid in forgotten {
        tracing::warn!(pid, uid, "ending what the runtime has forgotten");
        // Fails only when it has ended by itself, which is as good.
        let _ = Pid::from_raw(pid).map(|pid| kill_process(pid, Signal::KILL));
    }
    match left.first() {
        Some(group) => Err(io::Error::other(format!("the cgroup {} is still in use", group.display()))),
        None => Ok(()),
    }
}

/// Removes a cgroup and those below it; the kernel keeps those in which something runs.
fn remove(group: &Path) {
    inside(group).iter().for_each(|group| remove(group));
    let _ = fs::remove_dir(group);
}

fn processes(group: &Path) -> Vec<i32> {
    let own = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    let own = own.lines().filter_map(|line| line.parse().ok());
    own.chain(inside(group).iter().flat_map(|group| processes(group))).collect()
}

fn inside(group: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(group).into_iter().flatten().flatten();
    let groups = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    groups.map(|entry| entry.path()).collect()
}

#[cfg(test)]
mod tests;
