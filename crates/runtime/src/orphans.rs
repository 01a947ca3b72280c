//! Finds and removes what a killed containerd leaves behind: shims that it started and did not record,
//! and network namespaces of pods that it did not get to start. A later containerd does not clean them
//! up.
//!
//! They are found by kernel state: a shim by its command line, which names its containerd, and a
//! network namespace by having no processes.

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

/// The shims of runc containers, whose processes are children of the shim. Other shims may keep them
/// elsewhere.
const SHIM_NAMES: [&str; 2] = ["containerd-shim-runc-v2", "containerd-shim-runc-v1"];
/// containerd's namespace for Kubernetes.
const KUBERNETES_NAMESPACE: &str = "k8s.io";
/// A shim usually has its first container in less than a second.
const SHIM_START_TIMEOUT: Duration = Duration::from_secs(15);
/// `USER_HZ`: clock ticks per second, 100 on all current architectures.
const TICKS_PER_SECOND: u64 = 100;
const DEFAULT_NETNS_DIR: &str = "/run/netns";
const NETNS_NAME_PREFIX: &str = "cni-";

/// A process identified by PID and start time, since PIDs are reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessInstance {
    pid: Pid,
    /// Clock ticks since boot.
    start_ticks: u64,
}

impl ProcessInstance {
    pub fn of(pid: i32) -> Option<ProcessInstance> {
        ProcessInfo::read(pid).map(|process| process.instance)
    }
}

struct ProcessInfo {
    instance: ProcessInstance,
    parent: i32,
    args: Vec<String>,
}

impl ProcessInfo {
    fn read(number: i32) -> Option<ProcessInfo> {
        let stat = std::fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
        let words = std::fs::read(format!("/proc/{number}/cmdline")).ok()?;
        let (parent, at) = parse_stat(&stat)?;
        let words = words.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned());
        Some(ProcessInfo {
            instance: ProcessInstance { pid: Pid::from_raw(number)?, start_ticks: at },
            parent,
            args: words.collect(),
        })
    }

    fn all() -> Vec<ProcessInfo> {
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        numbers.filter_map(ProcessInfo::read).collect()
    }

    fn flag_value(&self, flag: &str) -> Option<&str> {
        let at = self.args.iter().position(|word| word == flag)?;
        self.args.get(at + 1).map(String::as_str)
    }

    fn is_shim_of(&self, socket: &Path) -> bool {
        let program = self.args.first().and_then(|word| Path::new(word).file_name());
        program.is_some_and(|program| SHIM_NAMES.iter().any(|shim| program == *shim))
            && self.flag_value("-namespace") == Some(KUBERNETES_NAMESPACE)
            && self.flag_value("-address").is_some_and(|address| Path::new(address) == socket)
    }

    fn kill(&self) {
        if ProcessInstance::of(self.instance.pid.as_raw_nonzero().get()) == Some(self.instance) {
            // Fails only if it has already exited.
            let _ = rustix::process::kill_process(self.instance.pid, Signal::KILL);
        }
    }
}

/// The uptime in clock ticks, the unit of process start times.
fn uptime_ticks() -> u64 {
    let text = std::fs::read_to_string("/proc/uptime").unwrap_or_default();
    let seconds = text.split('.').next().and_then(|seconds| seconds.parse().ok()).unwrap_or(0_u64);
    seconds.saturating_mul(TICKS_PER_SECOND)
}

/// Parses parent PID and start time. The name is in parentheses and may contain parentheses.
fn parse_stat(stat: &str) -> Option<(i32, u64)> {
    let rest: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    Some((rest.get(1)?.parse().ok()?, rest.get(19)?.parse().ok()?))
}

/// Kills the shims of the containerd at `socket` that have had no container for longer than a start
/// takes, unless they belong to sandboxes that it reports as running. Returns their number.
pub fn kill_orphan_shims(socket: &Path, running: &BTreeSet<String>) -> usize {
    let all = ProcessInfo::all();
    let now = uptime_ticks();
    let has_children = |shim: &ProcessInfo| {
        let pid = shim.instance.pid.as_raw_nonzero().get();
        all.iter().any(|process| process.parent == pid)
    };
    let is_orphan = |shim: &&ProcessInfo| {
        shim.is_shim_of(socket)
            && now.saturating_sub(shim.instance.start_ticks) > SHIM_START_TIMEOUT.as_secs() * TICKS_PER_SECOND
            && !shim.flag_value("-id").is_some_and(|id| running.contains(id))
            && !has_children(shim)
    };
    all.iter().filter(is_orphan).map(ProcessInfo::kill).count()
}

/// Kills everything that a containerd has started for Kubernetes. Called after containerd itself has
/// exited.
pub fn kill_all(socket: &Path) {
    let all = ProcessInfo::all();
    let mut to_kill: Vec<&ProcessInfo> = all.iter().filter(|process| process.is_shim_of(socket)).collect();
    let mut next = 0;
    let shim_count = to_kill.len();
    while let Some(process) = to_kill.get(next) {
        let pid = process.instance.pid.as_raw_nonzero().get();
        to_kill.extend(all.iter().filter(|child| child.parent == pid));
        next += 1;
    }
    let (shims, containers) = to_kill.split_at(shim_count);
    delete_links(shims, containers);
    to_kill.iter().for_each(|process| process.kill());
}

/// Deletes the links in the network namespaces of containers, and with them their peers on the node.
/// The kernel deletes them only some time after the last process has exited.
fn delete_links(shims: &[&ProcessInfo], containers: &[&ProcessInfo]) {
    let open = |process: &&ProcessInfo| {
        let path = format!("/proc/{}/ns/net", process.instance.pid.as_raw_nonzero());
        let netns = std::fs::File::open(path).ok()?;
        let inode = netns.metadata().ok()?.st_ino();
        Some((inode, netns))
    };
    // Shims and pods with `hostNetwork` are in the network namespace of the node.
    let mut done: BTreeSet<u64> = shims.iter().filter_map(open).map(|(inode, _)| inode).collect();
    done.extend(std::fs::metadata("/proc/thread-self/ns/net").map(|own| own.st_ino()));
    for (inode, netns) in containers.iter().filter_map(open) {
        if !done.insert(inode) {
            continue;
        }
        let delete = move || -> io::Result<()> {
            let kind = Some(LinkNameSpaceType::Network);
            rustix::thread::move_into_link_name_space(netns.as_fd(), kind)?;
            let mut netlink = sys::netlink::Netlink::open()?;
            for link in netlink.links()?.iter().filter(|link| link.name != "lo") {
                netlink.delete_link(&link.name)?;
            }
            Ok(())
        };
        // What cannot be deleted here goes with the namespace.
        std::thread::scope(|scope| drop(scope.spawn(delete).join()));
    }
}

/// The directory of the pods' network namespaces, from the configuration that containerd reports.
pub fn netns_dir(config: &str) -> PathBuf {
    let config: Value = serde_json::from_str(config).unwrap_or_default();
    match (config["netnsMountsUnderStateDir"].as_bool(), config["stateDir"].as_str()) {
        (Some(true), Some(state)) => Path::new(state).join("netns"),
        _ => DEFAULT_NETNS_DIR.into(),
    }
}

/// The network namespace of a sandbox, from its verbose status.
pub fn sandbox_netns(info: &str) -> Option<PathBuf> {
    let info: Value = serde_json::from_str(info).ok()?;
    let namespaces = info.pointer("/runtimeSpec/linux/namespaces")?.as_array()?;
    let network = namespaces.iter().find(|namespace| namespace["type"] == "network")?;
    network["path"].as_str().map(PathBuf::from)
}

/// Removes the network namespaces in `dir` that have no processes and belong to no known sandbox. No
/// sandbox may be in creation, since its network namespace gets its process last. Returns their number.
pub fn remove_unused_netns(
    containerd: ProcessInstance,
    dir: &Path,
    known: &BTreeSet<PathBuf>,
) -> io::Result<usize> {
    let is_known = |path: &Path| known.iter().any(|known| known.file_name() == path.file_name());
    // They are mounts, visible only in containerd's mount namespace.
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
            let mut named = list_netns(dir)?;
            named.retain(|(path, _)| !is_known(path));
            // Listed after the namespaces, so that one that is created meanwhile is not in the list;
            // and in this mount namespace, whose /proc has the processes that we see.
            move_into(&own)?;
            let occupied = netns_in_use();
            move_into(&mounts)?;
            remove_unused(&named, &occupied)
        });
        removal.join().unwrap_or_else(|_| Err(io::Error::other("the cleanup of network namespaces panicked")))
    })
}

/// The inodes of the network namespaces of all visible threads.
fn netns_in_use() -> BTreeSet<u64> {
    let below =
        |dir: PathBuf| std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let threads = below("/proc".into()).flat_map(|process| below(process.join("task")));
    threads.filter_map(|thread| Some(thread.join("ns/net").metadata().ok()?.st_ino())).collect()
}

/// The entries that look like a pod's network namespace, with their inodes.
fn list_netns(dir: &Path) -> io::Result<Vec<(PathBuf, u64)>> {
    let entries = match std::fs::read_dir(dir) {
        // No pod has been created yet.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let networks =
        entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with(NETNS_NAME_PREFIX));
    // Entries that have disappeared are skipped.
    Ok(networks.filter_map(|entry| Some((entry.path(), entry.path().metadata().ok()?.st_ino()))).collect())
}

fn remove_unused(named: &[(PathBuf, u64)], occupied: &BTreeSet<u64>) -> io::Result<usize> {
    let mut removed = 0;
    for (path, _) in named.iter().filter(|(_, network)| !occupied.contains(network)) {
        // If it is not a mount any more, only the file is left.
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
    fn reads_proc_stat() {
        let stat = "7 (a) b) S 3 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4711 9 9";
        assert_eq!(parse_stat(stat), Some((3, 4711)));
        assert_eq!(parse_stat("7 (a"), None);
        let own = i32::try_from(std::process::id()).unwrap();
        let process = ProcessInfo::read(own).unwrap();
        assert_eq!(process.parent, i32::try_from(std::os::unix::process::parent_id()).unwrap());
        assert_eq!(ProcessInstance::of(own), Some(process.instance));
        assert!(ProcessInfo::all().iter().any(|other| other.instance == process.instance));
        assert!(process.instance.start_ticks <= uptime_ticks() + TICKS_PER_SECOND);
    }

    #[test]
    fn matches_shims_by_namespace_and_address() {
        let check = |words: &str, expected: bool| {
            let words = words.split(' ').map(str::to_owned).collect();
            let instance = ProcessInstance { pid: Pid::INIT, start_ticks: 1 };
            let is_shim =
                ProcessInfo { instance, parent: 1, args: words }.is_shim_of(Path::new("/run/a.sock"));
            assert_eq!(is_shim, expected);
        };
        check("/usr/bin/containerd-shim-runc-v2 -namespace k8s.io -id 1 -address /run/a.sock", true);
        check("containerd-shim-runc-v2 -namespace k8s.io -id 1 -address /run/b.sock", false);
        check("containerd-shim-runc-v2 -namespace moby -id 1 -address /run/a.sock", false);
        check("containerd-shim-kata-v2 -namespace k8s.io -id 1 -address /run/a.sock", false);
        check("grep containerd-shim-runc-v2 -namespace k8s.io -address /run/a.sock", false);
        check("containerd-shim-runc-v2 -namespace k8s.io -address", false);
    }

    /// A shell that has a shim's name and arguments, with a child in a network namespace.
    #[test]
    fn killed_containers_leave_no_links() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: needs root");
        }
        let dir = tempfile::tempdir().unwrap();
        let (shim, socket) = (dir.path().join(SHIM_NAMES[0]), dir.path().join("containerd.sock"));
        std::fs::copy("/bin/sh", &shim).unwrap();
        let run = move || {
            sys::process::unshare(UnshareFlags::NEWNET).unwrap();
            let script = "unshare --net sh -c 'echo $$; exec sleep 1000' & wait";
            let mut command = std::process::Command::new(&shim);
            command.args(["-c", script, "-namespace", KUBERNETES_NAMESPACE, "-address"]).arg(&socket);
            let mut child = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
            let mut pid = String::new();
            let mut stdout = io::BufReader::new(child.stdout.take().unwrap());
            io::BufRead::read_line(&mut stdout, &mut pid).unwrap();
            let peer = ["type", "veth", "peer", "name", "eth0", "netns", pid.trim()];
            let mut ip = std::process::Command::new("ip");
            assert!(ip.args(["link", "add", "on-node"]).args(peer).status().unwrap().success());
            let mut netlink = sys::netlink::Netlink::open().unwrap();
            kill_all(&socket);
            let names: Vec<String> = netlink.links().unwrap().into_iter().map(|link| link.name).collect();
            assert_eq!(names, ["lo"]);
            child.wait().unwrap();
        };
        std::thread::spawn(run).join().unwrap();
    }

    #[test]
    fn reads_netns_dir_from_the_config() {
        assert_eq!(netns_dir(r#"{"stateDir":"/s","netnsMountsUnderStateDir":true}"#), Path::new("/s/netns"));
        assert_eq!(
            netns_dir(r#"{"stateDir":"/s","netnsMountsUnderStateDir":false}"#),
            Path::new(DEFAULT_NETNS_DIR)
        );
        assert_eq!(netns_dir("no JSON"), Path::new(DEFAULT_NETNS_DIR));
    }

    #[test]
    fn reads_sandbox_netns_from_the_info() {
        let info = r#"{"pid":7,"runtimeSpec":{"linux":{"namespaces":[{"type":"pid"},
            {"type":"network","path":"/run/netns/cni-1"}]}}}"#;
        assert_eq!(sandbox_netns(info), Some(PathBuf::from("/run/netns/cni-1")));
        let of_host = r#"{"runtimeSpec":{"linux":{"namespaces":[{"type":"pid"}]}}}"#;
        assert_eq!((sandbox_netns(of_host), sandbox_netns("{}"), sandbox_netns("")), (None, None, None));
    }

    #[test]
    fn deletes_only_unused_netns() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["cni-left", "cni-used", "other"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        let used = std::fs::metadata(dir.path().join("cni-used")).unwrap().st_ino();
        let networks = list_netns(dir.path()).unwrap();
        assert_eq!(remove_unused(&networks, &BTreeSet::from([used])).unwrap(), 1);
        let mut names: Vec<_> =
            std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["cni-used", "other"]);
        assert_eq!(list_netns(&dir.path().join("none")).unwrap(), Vec::new());
        let own = std::fs::metadata("/proc/self/ns/net").unwrap().st_ino();
        assert!(netns_in_use().contains(&own));
    }
}
