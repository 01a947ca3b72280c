//! `skiff reset`: removes everything that skiff created on this host. Continues after failures and
//! reports all of them.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use futures_util::future::join_all;
use runtime::Runtime as _;
use rustix::fs::FlockOperation;
use sys::cgroup::Cgroups;
use sys::netlink::Netlink;

use crate::containerd::{self, CNI_BIN_DIRS};
use crate::flags::{RegistryFlags, ResetFlags};
use crate::{host_state, node, services, stop};

const POD_UID_LABEL: &str = "io.kubernetes.pod.uid";
/// How long to retry while processes leave a cgroup or other users release a disk.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(10);
const REMOVE_RETRY: Duration = Duration::from_millis(50);

/// Collects the errors of steps that do not stop the whole operation.
#[derive(Default)]
pub struct Failures(Vec<String>);

impl Failures {
    pub fn record<T>(&mut self, result: anyhow::Result<T>) -> Option<T> {
        result.map_err(|error| self.0.push(format!("{error:#}"))).ok()
    }

    pub fn check(self, summary: &str) -> anyhow::Result<()> {
        anyhow::ensure!(self.0.is_empty(), "{summary}: {}", self.0.join("; "));
        Ok(())
    }
}

pub fn run(flags: &ResetFlags) -> anyhow::Result<()> {
    anyhow::ensure!(rustix::process::geteuid().is_root(), "skiff reset needs root");
    // All nodes of this host share the network, so all of them must be stopped.
    for node in stop::running_processes(&flags.data_dir)? {
        anyhow::ensure!(flags.stop, "{node} is running on this host: stop it first, or use --stop");
        stop::stop_process(&node)?;
    }
    let lock = lock(&flags.data_dir)?;
    let mut failures = Failures::default();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(remove_pods(&flags.data_dir, &mut failures));
    remove_network(&mut failures);
    restore_host(&flags.data_dir, &mut failures);
    drop(lock);
    // If an unmount failed, the data directory may contain a mounted disk of another owner, whose data
    // would be deleted. The records needed to detach a disk are in the data directory as well.
    if flags.yes && failures.0.is_empty() {
        failures.record(remove_dir(&flags.data_dir));
    }
    failures.check("not everything could be removed")?;
    match flags.yes {
        true => println!("removed everything, and all data in {}", flags.data_dir.display()),
        false => {
            println!(
                "removed everything except the data in {}; use --yes to remove it as well",
                flags.data_dir.display()
            )
        }
    }
    Ok(())
}

/// Takes the lock of a data directory, held until the file is dropped, and writes this process' PID
/// into it. `None` if the directory does not exist.
pub fn lock(data_dir: &Path) -> anyhow::Result<Option<File>> {
    let Some(mut file) = open_lock(data_dir)? else { return Ok(None) };
    let locked = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive);
    locked.with_context(|| format!("another skiff uses {}", data_dir.display()))?;
    // The PID is only informative, so a full disk is not an error.
    let _ = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
    Ok(Some(file))
}

/// The process that holds the lock of a data directory.
pub fn lock_holder(data_dir: &Path) -> Option<u32> {
    let mut file = open_lock(data_dir).ok()??;
    // Only a failure to take the lock proves that the PID in the file is that of a live process.
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).err()?;
    let mut text = String::new();
    file.read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

fn open_lock(data_dir: &Path) -> anyhow::Result<Option<File>> {
    let path = data_dir.join("lock");
    match File::options().create(true).truncate(false).read(true).write(true).open(&path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot open {}", path.display())),
    }
}

/// Ends the pods of a data directory and removes their cgroups and all mounts below it.
pub async fn remove_pods(data_dir: &Path, failures: &mut Failures) {
    let mut uids: Vec<String> = Vec::new();
    if node::runtime_dir(data_dir).join("pods").exists() {
        uids.extend(end_pods(data_dir, failures).await);
    }
    failures.record(containerd::stop_all(data_dir).await.context("cannot stop containerd"));
    // Pods whose containers are gone may have left a cgroup.
    let pods_dir = node::pods_dir(data_dir);
    let volumes = std::fs::read_dir(&pods_dir).into_iter().flatten().flatten();
    uids.extend(volumes.map(|entry| entry.file_name().to_string_lossy().into_owned()));
    for uid in uids.iter().filter(|uid| !uid.is_empty()) {
        let clear = async || Ok(kubelet::cgroups::remove_pod_cgroup(&pods_dir, uid)?);
        failures.record(retry(clear).await.context("cannot remove the cgroups of a pod"));
    }
    // Fails if another node on this host still has supervisors in the cgroup.
    let _ = Cgroups::of_host().and_then(|cgroups| cgroups.remove(runtime::embedded::SUPERVISORS_CGROUP));
    kubelet::cgroups::remove_qos_cgroups(&pods_dir);
    failures.record(node::logs(data_dir).remove_all().context("cannot remove logs of pods"));
    failures.record(sys::mounts::unmount_below(data_dir).map_err(Into::into));
    let root = node::kubelet_root(data_dir);
    let detach = async || kubelet::let_disks_go(&root, &pods_dir).await.map_err(anyhow::Error::msg);
    failures.record(retry(detach).await.context("cannot detach a disk"));
}

/// Ends and removes all pods of the embedded runtime and returns their UIDs. A failure of one pod does
/// not affect the others.
async fn end_pods(data_dir: &Path, failures: &mut Failures) -> Vec<String> {
    let open = async { anyhow::Ok(runtime::Embedded::open(runtime_config(data_dir)?).await?) };
    let Some(runtime) = failures.record(open.await.context("cannot open the container runtime")) else {
        return Vec::new();
    };
    let sandboxes = runtime.sandboxes(&[]).await.map_err(anyhow::Error::from);
    let sandboxes = failures.record(sandboxes.context("cannot list the pods")).unwrap_or_default();
    let ended = join_all(sandboxes.iter().map(|sandbox| async {
        runtime.stop_sandbox(&sandbox.id).await?;
        runtime.remove_sandbox(&sandbox.id).await
    }));
    for (sandbox, ended) in sandboxes.iter().zip(ended.await) {
        let name = sandbox.metadata.as_ref().map(|pod| format!("{}/{}", pod.namespace, pod.name));
        let ended = ended.with_context(|| format!("cannot end the pod {}", name.unwrap_or_default()));
        failures.record(ended);
    }
    sandboxes.into_iter().filter_map(|mut sandbox| sandbox.labels.remove(POD_UID_LABEL)).collect()
}

/// Configuration of the embedded runtime of a data directory whose node does not run.
pub fn runtime_config(data_dir: &Path) -> anyhow::Result<runtime::embedded::Config> {
    let cni = runtime::embedded::Cni {
        conf_dir: "/etc/cni/net.d".into(),
        bin_dirs: CNI_BIN_DIRS.map(PathBuf::from).to_vec(),
    };
    node::embedded_config(data_dir, cni, &RegistryFlags::default())
}

/// Restores the host state that the node has changed.
fn restore_host(data_dir: &Path, failures: &mut Failures) {
    for error in host_state::restore(data_dir) {
        failures.record::<()>(Err(error));
    }
    let removed = runtime::embedded::remove_default_profile();
    failures.record(removed.context("cannot remove the AppArmor profile of skiff"));
}

/// Retries for a while, because processes that were killed may not have exited yet.
async fn retry(attempt: impl AsyncFn() -> anyhow::Result<()>) -> anyhow::Result<()> {
    let started = tokio::time::Instant::now();
    loop {
        match attempt().await {
            Err(_) if started.elapsed() < REMOVE_TIMEOUT => tokio::time::sleep(REMOVE_RETRY).await,
            done => return done,
        }
    }
}

/// Removes links, routes and nftables rules of this network namespace.
fn remove_network(failures: &mut Failures) {
    failures.record(services::remove_rules());
    failures.record(proxy::routes::remove_all().context("cannot remove routes"));
    let links = || -> std::io::Result<()> {
        let mut netlink = Netlink::open()?;
        for link in netlink.links()? {
            let is_pod_link = link.name == kubelet::network::BRIDGE
                || link.name.starts_with(runtime::embedded::LINK_NAME_PREFIX);
            if is_pod_link || proxy::routes::OVERLAYS.contains(&&*link.name) {
                netlink.delete_link(&link.name)?;
            }
        }
        Ok(())
    };
    failures.record(links().context("cannot remove links"));
}

/// Removes a directory with its content. If it is a symlink or a mount point, only the content is
/// removed: the link or mount belongs to the administrator.
pub fn remove_dir(path: &Path) -> anyhow::Result<()> {
    use std::io::ErrorKind::{NotADirectory, NotFound, ResourceBusy};
    let delete_all = || -> std::io::Result<()> {
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
    match delete_all() {
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
    fn second_lock_of_data_dir_fails() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(lock_holder(dir.path()), None);
        let guard = lock(dir.path()).unwrap();
        assert_eq!(lock_holder(dir.path()), Some(std::process::id()));
        let error = lock(dir.path()).unwrap_err().to_string();
        assert!(error.starts_with("another skiff uses"), "{error}");
        drop(guard);
        assert!(lock(dir.path()).unwrap().is_some());
        assert!(lock(&dir.path().join("none")).unwrap().is_none());
    }

    #[test]
    fn remove_dir_keeps_symlink_and_deletes_contents() {
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
