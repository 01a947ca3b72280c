//! `skiff reset`: removes what skiff has made on this host. Goes on after a failure and tells of all of them.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use runtime::Runtime as _;
use rustix::fs::FlockOperation;
use rustix::mount::UnmountFlags;
use sys::netlink::Netlink;

use crate::containerd::NETWORK_PROGRAMS;
use crate::flags::{RegistryFlags, ResetFlags};
use crate::{node, services};

const POD_UID: &str = "io.kubernetes.pod.uid";
/// How long processes may take to leave a cgroup.
const LEAVE: Duration = Duration::from_secs(10);
const AGAIN: Duration = Duration::from_millis(50);

/// What went wrong, and that it did.
#[derive(Default)]
pub struct Failures(Vec<String>);

impl Failures {
    fn note<T>(&mut self, outcome: anyhow::Result<T>) -> Option<T> {
        outcome.map_err(|error| self.0.push(format!("{error:#}"))).ok()
    }

    pub fn check(self) -> anyhow::Result<()> {
        anyhow::ensure!(self.0.is_empty(), "not everything could be removed: {}", self.0.join("; "));
        Ok(())
    }
}

pub fn run(flags: &ResetFlags) -> anyhow::Result<()> {
    anyhow::ensure!(rustix::process::geteuid().is_root(), "only root can remove what root has made");
    let lock = lock(&flags.data_dir)?;
    let mut failures = Failures::default();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(pods(&flags.data_dir, &mut failures));
    network(&mut failures);
    drop(lock);
    if flags.yes {
        failures.note(remove_dir(&flags.data_dir));
    }
    failures.check()?;
    match flags.yes {
        true => println!("removed everything, and all data in {}", flags.data_dir.display()),
        false => {
            println!("removed everything but the data in {}; that goes with --yes", flags.data_dir.display())
        }
    }
    Ok(())
}

/// Says that somebody works with a data directory, for as long as the file is open.
pub fn lock(data_dir: &Path) -> anyhow::Result<Option<File>> {
    let path = data_dir.join("lock");
    let file = match File::options().create(true).truncate(false).write(true).open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("cannot open {}", path.display())),
    };
    let locked = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive);
    locked.with_context(|| format!("another skiff works with {}", data_dir.display()))?;
    Ok(Some(file))
}

/// Ends the pods of a data directory, and removes their cgroups and all mounts in it.
pub async fn pods(data_dir: &Path, failures: &mut Failures) {
    let mut uids: Vec<String> = Vec::new();
    if node::runtime_dir(data_dir).join("pods").exists() {
        uids.extend(failures.note(end_pods(data_dir).await).into_iter().flatten());
    }
    // Those whose containers are gone may have left a cgroup.
    let volumes = std::fs::read_dir(data_dir.join("agent/pods")).into_iter().flatten().flatten();
    uids.extend(volumes.map(|entry| entry.file_name().to_string_lossy().into_owned()));
    for uid in uids.iter().filter(|uid| !uid.is_empty()) {
        failures.note(remove_cgroup(uid).await);
    }
    kubelet::cgroups::remove_levels();
    failures.note(unmount(data_dir));
}

async fn end_pods(data_dir: &Path) -> anyhow::Result<Vec<String>> {
    let cni = runtime::embedded::Cni {
        conf_dir: "/etc/cni/net.d".into(),
        bin_dirs: NETWORK_PROGRAMS.map(PathBuf::from).to_vec(),
    };
    let runtime = runtime::Embedded::open(node::embedded(data_dir, cni, &RegistryFlags::default())?).await?;
    let mut uids = Vec::new();
    for sandbox in runtime.sandboxes(&[]).await? {
        runtime.stop_sandbox(&sandbox.id).await?;
        runtime.remove_sandbox(&sandbox.id).await?;
        uids.extend(sandbox.labels.get(POD_UID).cloned());
    }
    Ok(uids)
}

async fn remove_cgroup(uid: &str) -> anyhow::Result<()> {
    let begun = tokio::time::Instant::now();
    loop {
        match kubelet::cgroups::clear(uid) {
            Err(_) if begun.elapsed() < LEAVE => tokio::time::sleep(AGAIN).await,
            done => return done.context("cannot remove what a pod was in"),
        }
    }
}

/// Unmounts everything below a directory, the innermost first.
fn unmount(data_dir: &Path) -> anyhow::Result<()> {
    let Ok(data_dir) = std::fs::canonicalize(data_dir) else { return Ok(()) };
    let text = std::fs::read_to_string("/proc/self/mountinfo").context("cannot read /proc/self/mountinfo")?;
    for place in mounts_below(&text, &data_dir).into_iter().rev() {
        let gone = rustix::mount::unmount(&place, UnmountFlags::DETACH);
        gone.with_context(|| format!("cannot unmount {}", place.display()))?;
    }
    Ok(())
}

fn mounts_below(mountinfo: &str, dir: &Path) -> Vec<PathBuf> {
    let places = mountinfo.lines().filter_map(|line| line.split(' ').nth(4));
    places.map(|place| PathBuf::from(unescape(place))).filter(|place| place.starts_with(dir)).collect()
}

/// The kernel writes spaces and the like as `\040`.
fn unescape(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let code = part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(code) => {
                plain.push(char::from(code));
                plain.push_str(&part[3..]);
            }
            None => plain = format!("{plain}\\{part}"),
        }
    }
    plain
}

/// Removes links, routes and rules of this network namespace.
fn network(failures: &mut Failures) {
    failures.note(services::remove_rules());
    failures.note(proxy::routes::remove_all().context("cannot remove routes"));
    let links = || -> std::io::Result<()> {
        let mut netlink = Netlink::open()?;
        for link in netlink.links()? {
            let ours =
                link.name == kubelet::network::BRIDGE || link.name.starts_with(runtime::embedded::LINKS);
            if ours || proxy::routes::OVERLAYS.contains(&&*link.name) {
                netlink.delete_link(&link.name)?;
            }
        }
        Ok(())
    };
    failures.note(links().context("cannot remove links"));
}

pub fn remove_dir(path: &Path) -> anyhow::Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mounts_below_are_ours() {
        let text = "1 0 0:1 / / rw - ext4 x rw\n2 1 0:2 / /var/lib/skiff/a\\040b rw - tmpfs x rw\n\
                    3 1 0:2 / /var/lib/skiff-dev/c rw - tmpfs x rw\n4 1 0:2 / /var/lib/skiff/a\\040b/d rw - tmpfs x rw\n";
        let found = mounts_below(text, Path::new("/var/lib/skiff"));
        assert_eq!(found, ["/var/lib/skiff/a b", "/var/lib/skiff/a b/d"].map(PathBuf::from));
        assert_eq!(unescape("a\\b"), "a\\b");
    }

    #[test]
    fn a_data_directory_in_use_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let held = lock(dir.path()).unwrap();
        let error = lock(dir.path()).unwrap_err().to_string();
        assert!(error.starts_with("another skiff works with"), "{error}");
        drop(held);
        assert!(lock(dir.path()).unwrap().is_some());
        assert!(lock(&dir.path().join("none")).unwrap().is_none());
    }
}
