//! What a containerd that was killed has forgotten: shims that it had begun but not noted, and networks of pods that it
//! did not come to begin. No later containerd looks for them, so whoever uses it does.
//!
//! Found by what the kernel knows: a shim by its command line, which names its containerd, a network by nobody being in
//! it.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::linux::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, Signal};
use rustix::thread::{LinkNameSpaceType, UnshareFlags};
use serde_json::Value;

/// The shims of ordinary containers: what runs in them are their children. Others may keep it elsewhere.
const SHIMS: [&str; 2] = ["containerd-shim-runc-v2", "containerd-shim-runc-v1"];
/// How containerd keeps apart what it runs for Kubernetes.
const KUBERNETES: &str = "k8s.io";
/// Between a shim and its first container there is less than a second, mostly.
const TO_BEGIN: Duration = Duration::from_secs(15);
/// A second, as the kernel tells it to programs on all machines that there still are.
const TICKS: u64 = 100;
const NETWORKS: &str = "/run/netns";
const NETWORK: &str = "cni-";

/// A process, and when it began: its number alone may be another's later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Begun {
    pid: Pid,
    /// In the kernel's ticks since it was started itself.
    at: u64,
}

impl Begun {
    pub fn of(pid: i32) -> Option<Begun> {
        Process::read(pid).map(|process| process.begun)
    }
}

struct Process {
    begun: Begun,
    parent: i32,
    words: Vec<String>,
}

impl Process {
    fn read(number: i32) -> Option<Process> {
        let stat = std::fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
        let words = std::fs::read(format!("/proc/{number}/cmdline")).ok()?;
        let (parent, at) = parse_stat(&stat)?;
        let words = words.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned());
        Some(Process { begun: Begun { pid: Pid::from_raw(number)?, at }, parent, words: words.collect() })
    }

    fn all() -> Vec<Process> {
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        numbers.filter_map(Process::read).collect()
    }

    fn word_after(&self, flag: &str) -> Option<&str> {
        let at = self.words.iter().position(|word| word == flag)?;
        self.words.get(at + 1).map(String::as_str)
    }

    fn is_shim_of(&self, socket: &Path) -> bool {
        let program = self.words.first().and_then(|word| Path::new(word).file_name());
        program.is_some_and(|program| SHIMS.iter().any(|shim| program == *shim))
            && self.word_after("-namespace") == Some(KUBERNETES)
            && self.word_after("-address").is_some_and(|address| Path::new(address) == socket)
    }

    fn end(&self) {
        if Begun::of(self.begun.pid.as_raw_nonzero().get()) == Some(self.begun) {
            // Fails only when it has gone by itself.
            let _ = rustix::process::kill_process(self.begun.pid, Signal::KILL);
        }
    }
}

/// Since the kernel was started, by which it says when processes began.
fn ticks() -> u64 {
    let text = std::fs::read_to_string("/proc/uptime").unwrap_or_default();
    let seconds = text.split('.').next().and_then(|seconds| seconds.parse().ok()).unwrap_or(0_u64);
    seconds.saturating_mul(TICKS)
}

/// The parent of a process and when it began. Its name is in brackets and may have brackets in it.
fn parse_stat(stat: &str) -> Option<(i32, u64)> {
    let rest: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    Some((rest.get(1)?.parse().ok()?, rest.get(19)?.parse().ok()?))
}

/// Ends shims of the containerd behind `socket` that have had no container for longer than it takes to begin one, unless
/// they are of pods that it holds to be running. How many there were.
pub fn end_forgotten_shims(socket: &Path, running: &BTreeSet<String>) -> usize {
    let all = Process::all();
    let now = ticks();
    let has_children = |shim: &Process| {
        let pid = shim.begun.pid.as_raw_nonzero().get();
        all.iter().any(|process| process.parent == pid)
    };
    let is_forgotten = |shim: &&Process| {
        shim.is_shim_of(socket)
            && now.saturating_sub(shim.begun.at) > TO_BEGIN.as_secs() * TICKS
            && !shim.word_after("-id").is_some_and(|id| running.contains(id))
            && !has_children(shim)
    };
    all.iter().filter(is_forgotten).map(Process::end).count()
}

/// Ends everything that a containerd has begun for Kubernetes, for when it is itself no more.
pub fn end_all(socket: &Path) {
    let all = Process::all();
    let mut ending: Vec<&Process> = all.iter().filter(|process| process.is_shim_of(socket)).collect();
    let mut next = 0;
    while let Some(process) = ending.get(next) {
        let pid = process.begun.pid.as_raw_nonzero().get();
        process.end();
        ending.extend(all.iter().filter(|child| child.parent == pid));
        next += 1;
    }
}

/// Where containerd keeps its pods' networks, by its own account of its configuration.
pub fn networks(config: &str) -> PathBuf {
    let config: Value = serde_json::from_str(config).unwrap_or_default();
    match (config["netnsMountsUnderStateDir"].as_bool(), config["stateDir"].as_str()) {
        (Some(true), Some(state)) => Path::new(state).join("netns"),
        _ => NETWORKS.into(),
    }
}

/// The network of a pod, by what containerd says of it beyond what was agreed on.
pub fn network_of(info: &str) -> Option<PathBuf> {
    let info: Value = serde_json::from_str(info).ok()?;
    let namespaces = info.pointer("/runtimeSpec/linux/namespaces")?.as_array()?;
    let network = namespaces.iter().find(|namespace| namespace["type"] == "network")?;
    network["path"].as_str().map(PathBuf::from)
}

/// Removes the networks in `dir` in which there is nobody and that no pod is known to have. A pod that is being made is in
/// its network last, so none may be. How many there were.
pub fn remove_empty_networks(containerd: Begun, dir: &Path, known: &BTreeSet<PathBuf>) -> io::Result<usize> {
    let is_known = |path: &Path| known.iter().any(|known| known.file_name() == path.file_name());
    // They are mounts, and seen only by whoever sees containerd's.
    std::thread::scope(|scope| {
        let removal = scope.spawn(|| {
            let pid = containerd.pid.as_raw_nonzero();
            let mounts = rustix::fs::open(format!("/proc/{pid}/ns/mnt"), OFlags::RDONLY, Mode::empty())?;
            let own = rustix::fs::open("/proc/thread-self/ns/mnt", OFlags::RDONLY, Mode::empty())?;
            sys::process::unshare(UnshareFlags::FS)?;
            let move_into = |mounts: &OwnedFd| {
                rustix::thread::move_into_link_name_space(mounts.as_fd(), Some(LinkNameSpaceType::Mount))
            };
            move_into(&mounts)?;
            let mut named = named(dir)?;
            named.retain(|(path, _)| !is_known(path));
            // Asked after they were listed: one that somebody else makes meanwhile is not among them. Here, where the
            // processes are those that we see.
            move_into(&own)?;
            let occupied = occupied();
            move_into(&mounts)?;
            remove_others(&named, &occupied)
        });
        removal.join().unwrap_or_else(|_| Err(io::Error::other("cannot look at networks")))
    })
}

/// The networks that some process is in, as far as we may look.
fn occupied() -> BTreeSet<u64> {
    let below =
        |dir: PathBuf| std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let threads = below("/proc".into()).flat_map(|process| below(process.join("task")));
    threads.filter_map(|thread| Some(thread.join("ns/net").metadata().ok()?.st_ino())).collect()
}

/// What looks like the network of a pod, and which it is.
fn named(dir: &Path) -> io::Result<Vec<(PathBuf, u64)>> {
    let entries = match std::fs::read_dir(dir) {
        // There has been no pod yet.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let networks = entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with(NETWORK));
    // Those that are gone by now are fine.
    Ok(networks.filter_map(|entry| Some((entry.path(), entry.path().metadata().ok()?.st_ino()))).collect())
}

fn remove_others(named: &[(PathBuf, u64)], occupied: &BTreeSet<u64>) -> io::Result<usize> {
    let mut removed = 0;
    for (path, _) in named.iter().filter(|(_, network)| !occupied.contains(network)) {
        // One that is no mount any more is but a name.
        let _ = rustix::mount::unmount(path, UnmountFlags::DETACH);
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => removed += 1,
        }
    }
    Ok(removed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_says_of_a_process() {
        let stat = "7 (a) b) S 3 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4711 9 9";
        assert_eq!(parse_stat(stat), Some((3, 4711)));
        assert_eq!(parse_stat("7 (a"), None);
        let own = i32::try_from(std::process::id()).unwrap();
        let process = Process::read(own).unwrap();
        assert_eq!(process.parent, i32::try_from(std::os::unix::process::parent_id()).unwrap());
        assert_eq!(Begun::of(own), Some(process.begun));
        assert!(Process::all().iter().any(|other| other.begun == process.begun));
        assert!(process.begun.at <= ticks() + TICKS);
    }

    #[test]
    fn whose_shim_it_is() {
        let check = |words: &str, expected: bool| {
            let words = words.split(' ').map(str::to_owned).collect();
            let begun = Begun { pid: Pid::INIT, at: 1 };
            let is_ours = Process { begun, parent: 1, words }.is_shim_of(Path::new("/run/a.sock"));
            assert_eq!(is_ours, expected);
        };
        check("/usr/bin/containerd-shim-runc-v2 -namespace k8s.io -id 1 -address /run/a.sock", true);
        check("containerd-shim-runc-v2 -namespace k8s.io -id 1 -address /run/b.sock", false);
        check("containerd-shim-runc-v2 -namespace moby -id 1 -address /run/a.sock", false);
        check("containerd-shim-kata-v2 -namespace k8s.io -id 1 -address /run/a.sock", false);
        check("grep containerd-shim-runc-v2 -namespace k8s.io -address /run/a.sock", false);
        check("containerd-shim-runc-v2 -namespace k8s.io -address", false);
    }

    #[test]
    fn where_networks_are() {
        assert_eq!(networks(r#"{"stateDir":"/s","netnsMountsUnderStateDir":true}"#), Path::new("/s/netns"));
        assert_eq!(networks(r#"{"stateDir":"/s","netnsMountsUnderStateDir":false}"#), Path::new(NETWORKS));
        assert_eq!(networks("no JSON"), Path::new(NETWORKS));
    }

    #[test]
    fn which_network_a_pod_has() {
        let info = r#"{"pid":7,"runtimeSpec":{"linux":{"namespaces":[{"type":"pid"},
            {"type":"network","path":"/run/netns/cni-1"}]}}}"#;
        assert_eq!(network_of(info), Some(PathBuf::from("/run/netns/cni-1")));
        let of_host = r#"{"runtimeSpec":{"linux":{"namespaces":[{"type":"pid"}]}}}"#;
        assert_eq!((network_of(of_host), network_of("{}"), network_of("")), (None, None, None));
    }

    #[test]
    fn only_networks_without_anybody_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["cni-left", "cni-used", "other"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        let used = std::fs::metadata(dir.path().join("cni-used")).unwrap().st_ino();
        let networks = named(dir.path()).unwrap();
        assert_eq!(remove_others(&networks, &BTreeSet::from([used])).unwrap(), 1);
        let mut names: Vec<_> =
            std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["cni-used", "other"]);
        assert_eq!(named(&dir.path().join("none")).unwrap(), Vec::new());
        let own = std::fs::metadata("/proc/self/ns/net").unwrap().st_ino();
        assert!(occupied().contains(&own));
    }
}
