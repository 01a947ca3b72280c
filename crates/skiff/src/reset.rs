//! `skiff reset`: removes what skiff has made on this host. Goes on after a failure and tells of all of them.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use runtime::Runtime as _;
use rustix::fs::FlockOperation;
use sys::netlink::Netlink;

use crate::containerd::{self, NETWORK_PROGRAMS};
use crate::flags::{RegistryFlags, ResetFlags};
use crate::{node, services};

const POD_UID: &str = "io.kubernetes.pod.uid";
/// How long processes may take to leave a cgroup, and others a disk.
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
    // What could not be unmounted may be on somebody else's disk, and what a disk is let go by is written down there.
    if flags.yes && failures.0.is_empty() {
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
    failures.note(containerd::end(data_dir).await.context("cannot end containerd"));
    // Those whose containers are gone may have left a cgroup.
    let place = node::pods_dir(data_dir);
    let volumes = std::fs::read_dir(&place).into_iter().flatten().flatten();
    uids.extend(volumes.map(|entry| entry.file_name().to_string_lossy().into_owned()));
    for uid in uids.iter().filter(|uid| !uid.is_empty()) {
        let clear = async || Ok(kubelet::cgroups::clear(&place, uid)?);
        failures.note(patiently(clear).await.context("cannot remove what a pod was in"));
    }
    kubelet::cgroups::remove_levels(&place);
    failures.note(node::logs(data_dir).leave().context("cannot remove logs of pods"));
    failures.note(sys::mounts::unmount_below(data_dir).map_err(Into::into));
    let root = node::kubelet_root(data_dir);
    let let_go = async || kubelet::let_disks_go(&root, &place).await.map_err(anyhow::Error::msg);
    failures.note(patiently(let_go).await.context("cannot let a disk go"));
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

/// Tries again for a while: what has ended may be on its way out.
async fn patiently(attempt: impl AsyncFn() -> anyhow::Result<()>) -> anyhow::Result<()> {
    let begun = tokio::time::Instant::now();
    loop {
        match attempt().await {
            Err(_) if begun.elapsed() < LEAVE => tokio::time::sleep(AGAIN).await,
            done => return done,
        }
    }
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

/// Removes a directory and all in it. Of one behind a link, or with a disk of its own, only what is in it: the rest is its
/// administrator's.
pub fn remove_dir(path: &Path) -> anyhow::Result<()> {
    use std::io::ErrorKind::{NotADirectory, NotFound, ResourceBusy};
    let empty = || -> std::io::Result<()> {
        for entry in std::fs::read_dir(path)? {
            let entry = entry?;
            match entry.file_type()?.is_dir() {
                true => std::fs::remove_dir_all(entry.path())?,
                false => std::fs::remove_file(entry.path())?,
            }
        }
        match std::fs::remove_dir(path) {
            Err(error) if [NotADirectory, ResourceBusy].contains(&error.kind()) => Ok(()),
            done => done,
        }
    };
    match empty() {
        Err(error) if error.kind() != NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn a_directory_behind_a_link_is_emptied() {
        let dir = tempfile::tempdir().unwrap();
        let [data, link] = ["data", "link"].map(|name| dir.path().join(name));
        std::fs::create_dir_all(data.join("store")).unwrap();
        std::fs::write(data.join("lock"), "").unwrap();
        std::os::unix::fs::symlink(&data, &link).unwrap();
        remove_dir(&link).unwrap();
        assert_eq!(std::fs::read_dir(&link).unwrap().count(), 0);
        remove_dir(&data).unwrap();
        remove_dir(&data).unwrap();
        assert!(!data.exists());
    }
}
