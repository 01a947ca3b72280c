//! The cgroup of a pod: what its containers may use together, and its end after the runtime has said that nothing of the pod
//! is left.
//!
//! The runtime removes the cgroups of containers, not the one of their pod that they are in. One that was killed while
//! it began a container may have forgotten it altogether: what it had started then waits there for ever, and nobody but
//! the kernel knows of it.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use api::resources::{add, list, of_pod};
use k8s_openapi::api::core::v1::Pod;
use rustix::process::{Pid, Signal, kill_process};
use schema::quantity::Quantity;
use sys::cgroup::{Cgroups, Limits};

use crate::config::resources;

/// What a pod may use as a whole; no more than `pids` processes where that is more than none.
pub fn limits(pod: &Pod, pids: i64) -> Limits {
    let spec = serde_json::to_value(&pod.spec).unwrap_or_default();
    let (mut asked, most) = (of_pod(&spec, "requests"), of_pod(&spec, "limits"));
    let overhead = list(&spec, "overhead");
    add(&mut asked, &overhead);
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
    let milli = asked.get("cpu").map_or(0, Quantity::milli);
    Limits {
        cpu_shares: if milli > 0 { resources::shares(milli) } else { resources::LEAST_SHARES },
        cpu_quota: bound("cpu").map_or(0, |cpu| resources::quota(cpu.milli())),
        cpu_period: resources::PERIOD,
        memory: bound("memory").map_or(0, |memory| memory.value()),
        pids: pids.max(0),
        ..Limits::default()
    }
}

/// The part that is about processors.
pub fn time_only(limits: &Limits) -> Limits {
    let Limits { cpu_shares, cpu_quota, cpu_period, .. } = *limits;
    Limits { cpu_shares, cpu_quota, cpu_period, ..Limits::default() }
}

/// Makes a cgroup that has these limits.
pub fn limit(group: &str, limits: &Limits) -> io::Result<()> {
    let cgroups = Cgroups::of_host()?;
    cgroups.create(group)?;
    cgroups.limit(group, limits)
}

/// Ends what runs in the pod's cgroup although nobody knows of it, and removes the cgroup. Fails while something is left:
/// the kernel takes a moment.
pub fn clear(uid: &str) -> io::Result<()> {
    clear_below(Path::new("/sys/fs/cgroup"), uid)
}

fn clear_below(root: &Path, uid: &str) -> io::Result<()> {
    // One hierarchy for all controllers, or one for each of them; most of these are not there.
    let inner = fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path());
    let bases = inner.chain([root.to_owned()]);
    let groups: Vec<PathBuf> =
        bases.map(|base| base.join(format!("skiff/pod{uid}"))).filter(|group| group.is_dir()).collect();
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
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn what_pods_may_use_together() {
        let check = |spec: Value, expected: (i64, i64, i64)| {
            let pod: Pod =
                serde_json::from_value(json!({"metadata": {}, "spec": spec.clone()})).expect("a pod");
            let found = limits(&pod, 0);
            assert_eq!((found.cpu_shares, found.cpu_quota, found.memory), expected, "{spec}");
        };
        let one = |requests: Value, limits: Value| json!({"name": "c", "resources": {"requests": requests, "limits": limits}});
        let whole = || one(json!({"cpu": "500m"}), json!({"cpu": "1", "memory": "64Mi"}));
        let open = || one(json!({"cpu": "250m"}), json!({"memory": "32Mi"}));
        check(json!({"containers": [{"name": "c"}]}), (2, 0, 0));
        check(json!({"containers": [whole()]}), (512, 100_000, 64 << 20));
        check(json!({"containers": [whole(), open()]}), (768, 0, 96 << 20));
        check(
            json!({"containers": [whole()], "overhead": {"cpu": "500m", "memory": "1Mi"}}),
            (1024, 150_000, 65 << 20),
        );
        let own = json!({"requests": {"cpu": "2"}, "limits": {"cpu": "3", "memory": "1Gi"}});
        check(json!({"containers": [{"name": "c"}], "resources": own}), (2048, 300_000, 1 << 30));
        let pod: Pod = serde_json::from_value(json!({"metadata": {}})).expect("a pod");
        assert_eq!(limits(&pod, 100).pids, 100);
    }

    #[test]
    fn what_is_empty_goes_and_what_runs_is_ended_first() {
        let dir = tempfile::tempdir().expect("a directory");
        let group = |name: &str| dir.path().join(name);
        fs::create_dir_all(group("memory/skiff/pod1/a/b")).expect("made");
        fs::create_dir_all(group("skiff/pod1")).expect("made");
        fs::create_dir_all(group("skiff/pod2/a")).expect("made");
        let mut forgotten = std::process::Command::new("sleep").arg("1000").spawn().expect("a process");
        // In the place of what the kernel does not let go.
        fs::write(group("skiff/pod2/a/cgroup.procs"), format!("{}\n", forgotten.id())).expect("written");
        clear_below(dir.path(), "1").expect("empty");
        assert!(!group("memory/skiff/pod1").exists() && !group("skiff/pod1").exists());
        let error = clear_below(dir.path(), "2").expect_err("in use");
        assert!(error.to_string().ends_with("skiff/pod2 is still in use"), "{error}");
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&forgotten.wait().expect("ended")), Some(9));
        fs::remove_file(group("skiff/pod2/a/cgroup.procs")).expect("removed");
        clear_below(dir.path(), "2").expect("empty");
        clear_below(dir.path(), "2").expect("gone already");
    }
}
