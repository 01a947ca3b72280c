//! Cleans up what a node under test created on the host, found by the node's directory. Runs after
//! every test, including failed ones, and reports what cannot be removed.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::mount::UnmountFlags;
use rustix::process::{Pid, Signal};

const POLL_INTERVAL: Duration = Duration::from_millis(10);
const EXIT_TIMEOUT: Duration = Duration::from_secs(60);
/// Cgroups that all nodes of a host share; they are kept.
const SHARED_CGROUPS: [&str; 2] = ["skiff", "k8s.io"];
/// Name prefix of the cgroup of one node.
const NODE_CGROUP_PREFIX: &str = "node-";
/// QoS levels inside the cgroup of a node.
const QOS_LEVELS: [&str; 3] = ["", "burstable", "besteffort"];

/// Ends the pods of an embedded runtime below `dir`, unmounts everything there, and removes the cgroups
/// of pods whose directories are in `pods`. Cgroups with processes belong to another runtime, which
/// removes them itself.
pub fn cleanup_node(dir: &Path, pods: &Path) {
    let marker = format!(" supervise {}", dir.display());
    let supervisors = processes().into_iter().filter(|(_, words)| words.contains(&marker));
    let supervisors: Vec<u32> = supervisors.map(|(pid, _)| pid).collect();
    supervisors.iter().for_each(|pid| kill_and_wait(*pid));
    for mount_point in mounts_below(dir).iter().rev() {
        let _ = rustix::mount::unmount(mount_point, UnmountFlags::DETACH);
    }
    let uids = std::fs::read_dir(pods).into_iter().flatten().flatten().map(|entry| entry.file_name());
    for uid in uids {
        cgroups_of_pod(&uid.to_string_lossy()).iter().for_each(|cgroup| remove_empty(cgroup));
    }
    if let Some(node) = node_cgroup_name(pods) {
        match supervisors.is_empty() {
            true => remove_cgroup(&node),
            // The pods' processes exit with their supervisor, but the kernel needs a moment for that.
            false => drop(remove_cgroups(&BTreeSet::from([node]))),
        }
    }
}

/// The name of the cgroup of the node with this pods directory.
fn node_cgroup_name(pods: &Path) -> Option<String> {
    let metadata = std::fs::metadata(pods).ok()?;
    Some(format!("skiff/{NODE_CGROUP_PREFIX}{:x}-{:x}", metadata.dev(), metadata.ino()))
}

/// The existing cgroups of a node, in all hierarchies.
pub fn cgroups_of_node(pods: &Path) -> Vec<PathBuf> {
    let name = node_cgroup_name(pods).into_iter();
    let cgroups = name.flat_map(|name| hierarchies().map(move |base| base.join(&name)));
    cgroups.filter(|cgroup| cgroup.exists()).collect()
}

/// What remains of a test that ran in `dir`: one line for each process and mount.
pub fn remaining_state(dir: &Path) -> Vec<String> {
    let name = dir.display().to_string();
    let running = processes().into_iter().filter(|(_, words)| words.contains(&name));
    let running = running.map(|(pid, words)| format!("process {pid}: {words}"));
    running
        .chain(mounts_below(dir).iter().map(|mount_point| format!("mount {}", mount_point.display())))
        .collect()
}

/// All processes with their command lines.
pub fn processes() -> Vec<(u32, String)> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let named = entries.filter_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let words = std::fs::read(entry.path().join("cmdline")).ok()?;
        Some((pid, String::from_utf8_lossy(&words).replace('\0', " ")))
    });
    named.collect()
}

/// Kills a process and waits until it has exited.
pub(crate) fn kill_and_wait(pid: u32) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        // Fails only if the process has already exited.
        let _ = rustix::process::kill_process(pid, Signal::KILL);
    }
    wait_for_exit(pid);
}

/// Waits until a process has exited; a zombie counts as exited.
pub(crate) fn wait_for_exit(pid: u32) {
    let started = Instant::now();
    while stat(pid).is_some_and(|(state, _)| state != 'Z') && started.elapsed() < EXIT_TIMEOUT {
        std::thread::park_timeout(POLL_INTERVAL);
    }
}

/// The state of a process and its parent.
fn stat(pid: u32) -> Option<(char, u32)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The process name is in parentheses and may contain any character.
    let mut words = text.rsplit_once(") ")?.1.split(' ');
    Some((words.next()?.chars().next()?, words.next()?.parse().ok()?))
}

/// The only child of a process, such as the program that `nsenter` runs.
pub(crate) fn child_of(parent: u32) -> Option<u32> {
    processes().into_iter().map(|(pid, _)| pid).find(|pid| stat(*pid).is_some_and(|(_, of)| of == parent))
}

/// A process and all its descendants.
pub(crate) fn process_tree(first: u32) -> BTreeSet<u32> {
    let parent_pids: Vec<(u32, u32)> =
        processes().iter().filter_map(|(pid, _)| Some((*pid, stat(*pid)?.1))).collect();
    let mut tree = BTreeSet::from([first]);
    loop {
        let extended = parent_pids.iter().filter(|(_, parent)| tree.contains(parent)).map(|(pid, _)| *pid);
        let extended: BTreeSet<u32> = extended.chain(tree.iter().copied()).collect();
        if extended.len() == tree.len() {
            return tree;
        }
        tree = extended;
    }
}

/// The topmost cgroups that belong only to these processes, as paths relative to a hierarchy.
pub(crate) fn cgroups_of(processes: &BTreeSet<u32>) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for pid in processes {
        let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        for path in text.lines().filter_map(|line| line.splitn(3, ':').nth(2)) {
            found.extend(pod_cgroup_of(path.trim_matches('/')));
        }
    }
    found
}

/// The prefix of a path that belongs to one pod or container only.
fn pod_cgroup_of(path: &str) -> Option<String> {
    let parts: Vec<&str> = path.split('/').collect();
    SHARED_CGROUPS.contains(parts.first()?).then_some(())?;
    let is_around = |part: &&str| QOS_LEVELS.contains(part) || part.starts_with(NODE_CGROUP_PREFIX);
    let own = 1 + parts[1..].iter().position(|part| !is_around(part))?;
    Some(parts[..=own].join("/"))
}

/// The existing cgroups of a pod, in all hierarchies, nodes and QoS levels.
pub fn cgroups_of_pod(uid: &str) -> Vec<PathBuf> {
    let nodes = hierarchies().map(|base| base.join("skiff")).flat_map(|around| {
        let inside = std::fs::read_dir(&around).into_iter().flatten().flatten();
        let nodes =
            inside.filter(|entry| entry.file_name().to_string_lossy().starts_with(NODE_CGROUP_PREFIX));
        nodes.map(|entry| entry.path()).chain([around]).collect::<Vec<_>>()
    });
    let cgroups = nodes.flat_map(|node| QOS_LEVELS.map(|level| node.join(level).join(format!("pod{uid}"))));
    cgroups.filter(|cgroup| cgroup.exists()).collect()
}

/// Removes a cgroup and its children from all hierarchies. Cgroups with processes are kept.
pub fn remove_cgroup(name: &str) {
    for cgroup in hierarchies().map(|base| base.join(name)) {
        remove_empty(&cgroup);
    }
}

/// Removes cgroups; retries until the kernel has released exited processes. Returns those that remain.
pub(crate) fn remove_cgroups(names: &BTreeSet<String>) -> Vec<String> {
    let started = Instant::now();
    loop {
        names.iter().for_each(|name| remove_cgroup(name));
        let still_exists = |name: &&String| hierarchies().any(|base| base.join(name).exists());
        let remaining: Vec<String> =
            names.iter().filter(still_exists).map(|name| format!("cgroup {name}")).collect();
        if remaining.is_empty() || started.elapsed() > EXIT_TIMEOUT {
            names.iter().filter_map(|name| node_cgroup_of(name)).for_each(|node| remove_cgroup(&node));
            return remaining;
        }
        std::thread::park_timeout(POLL_INTERVAL);
    }
}

/// The cgroup of the node that contains a cgroup.
fn node_cgroup_of(name: &str) -> Option<String> {
    let node = name.strip_prefix("skiff/")?.split('/').next()?;
    node.starts_with(NODE_CGROUP_PREFIX).then(|| format!("skiff/{node}"))
}

/// The cgroup hierarchies: one in v2, one per controller in v1.
fn hierarchies() -> impl Iterator<Item = PathBuf> {
    let root = PathBuf::from("/sys/fs/cgroup");
    let inner = std::fs::read_dir(&root).into_iter().flatten().flatten().map(|entry| entry.path());
    inner.collect::<Vec<_>>().into_iter().chain([root])
}

fn remove_empty(cgroup: &Path) {
    for entry in std::fs::read_dir(cgroup).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_empty(&entry.path());
        }
    }
    let _ = std::fs::remove_dir(cgroup);
}

/// The mounts below a directory, the deepest last.
fn mounts_below(dir: &Path) -> Vec<PathBuf> {
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mount_points = table.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
    mount_points.filter(|mount_point| mount_point.starts_with(dir)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Process;

    #[test]
    fn pod_cgroup_of_cgroup_paths() {
        let own = |path: &str| pod_cgroup_of(path).unwrap_or_default();
        assert_eq!(own("skiff/pod1/c1"), "skiff/pod1");
        assert_eq!(own("skiff/burstable/pod1/c1"), "skiff/burstable/pod1");
        assert_eq!(own("skiff/node-1-2/burstable/pod1/c1"), "skiff/node-1-2/burstable/pod1");
        assert_eq!(own("k8s.io/c1"), "k8s.io/c1");
        assert_eq!(node_cgroup_of("skiff/node-1-2/besteffort/pod1").as_deref(), Some("skiff/node-1-2"));
        assert_eq!(node_cgroup_of("skiff/besteffort/pod1"), None);
        assert_eq!(["skiff", "skiff/burstable", "skiff/node-1", "user/1", ""].map(own), [""; 5]);
    }

    #[test]
    fn cleanup_ends_remaining_processes() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(remaining_state(dir.path()), [""; 0]);
        let mut command = std::process::Command::new("sh");
        command.args(["-c", "sleep 1000 & echo up; wait", " supervise"]).arg(dir.path());
        let mut process = Process::spawn(&mut command).unwrap();
        process.wait_until_log(EXIT_TIMEOUT, |log| log.contains("up").then_some(())).unwrap();
        let tree = process_tree(process.id());
        assert_eq!(tree.len(), 2, "{tree:?}");
        assert_eq!(tree, BTreeSet::from([process.id(), child_of(process.id()).unwrap()]));
        assert_eq!(remaining_state(dir.path()).len(), 1);
        cleanup_node(dir.path(), &dir.path().join("pods"));
        assert_eq!(remaining_state(dir.path()), [""; 0]);
        tree.into_iter().for_each(kill_and_wait);
    }
}
