//! The cgroup of a pod, after the runtime has said that nothing of the pod is left.
//!
//! The runtime removes the cgroups of containers, not the one of their pod that they are in. One that was killed while
//! it began a container may have forgotten it altogether: what it had started then waits there for ever, and nobody but
//! the kernel knows of it.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, Signal, kill_process};

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
    use super::*;

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
