//! iSCSI volumes: the host's `iscsiadm` logs in to a target, and the disk that appears is mounted
//! once for all pods of the node.
//!
//! A record of each disk and of the pods that use it is written beside its mount point before
//! anything else is done. So the last pod detaches the disk, even if the kubelet was restarted in
//! between.

mod attach;
mod records;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{PersistentVolume, Pod, Volume};
use reconcile::Object as _;
use serde_json::{Value, json};

use super::host_commands::is_mounted;
use super::{VolumeContext, disk, secret_data};
use crate::config::Settings;
use crate::csi::{self, volume::SetUpError};
use attach::IscsiHost;

const RECORD_FILE: &str = "iscsi.json";
const USERS_DIR: &str = "users";
const DEFAULT_PORT: &str = "3260";
/// The directory of global mount points.
const GLOBAL_MOUNT_DIR: &str = "plugins/kubernetes.io/iscsi";
/// The directory of iSCSI volumes in a pod's directory.
const POD_VOLUME_DIR: &str = "volumes/kubernetes.io~iscsi";

/// A disk of a target and how it is reached. This is what is recorded.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    portals: Vec<String>,
    iqn: String,
    lun: i64,
    /// The interface of `iscsiadm` that is used.
    interface: String,
    /// The interface that it is copied from, if the volume has its own initiator name.
    interface_copy: Option<InterfaceCopy>,
}

#[derive(Clone, Debug, PartialEq)]
struct InterfaceCopy {
    from: String,
    initiator: String,
}

/// A pod's request for a disk.
pub struct DiskRequest {
    target: Target,
    /// The name of the PersistentVolume, or of the volume in the pod.
    name: String,
    fs_type: String,
    pub read_only: bool,
    pub is_block: bool,
    mount_options: Vec<String>,
    discovery_chap: bool,
    session_chap: bool,
    /// Namespace and name.
    secret: Option<(String, String)>,
    /// The name of the volume in node statuses, if the attach/detach controller has to attach it.
    unique_volume_name: Option<String>,
}

/// CHAP credentials, which are never logged.
#[derive(Default)]
pub struct ChapCredentials {
    discovery: bool,
    session: bool,
    secrets: BTreeMap<String, String>,
}

/// A disk that is ready to use.
pub struct ReadyDisk {
    pub path: PathBuf,
    /// It was not attached before.
    pub is_new: bool,
}

impl DiskRequest {
    /// For a volume in the pod's spec.
    pub fn inline(pod: &Pod, volume: &Volume) -> Option<DiskRequest> {
        let source = json!(volume.iscsi.as_ref()?);
        Some(DiskRequest::from(&volume.name, pod.namespace(), &source))
    }

    /// For a PersistentVolume.
    pub fn persistent(pod: &Pod, volume: &PersistentVolume, read_only: bool) -> Option<DiskRequest> {
        let spec = volume.spec.as_ref()?;
        let disk = spec.iscsi.as_ref()?;
        let request = DiskRequest::from(volume.name(), pod.namespace(), &json!(disk));
        Some(DiskRequest {
            unique_volume_name: Some(unique_name(&disk.target_portal, &disk.iqn, disk.lun.into())),
            read_only: read_only || request.read_only,
            is_block: spec.volume_mode.as_deref() == Some("Block"),
            mount_options: spec.mount_options.clone().unwrap_or_default(),
            ..request
        })
    }

    fn from(name: &str, namespace: &str, source: &Value) -> DiskRequest {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let or = |value: String, other: &str| if value.is_empty() { other.to_owned() } else { value };
        let portals =
            [&source["targetPortal"]].into_iter().chain(source["portals"].as_array().into_iter().flatten());
        let mut portals: Vec<String> = portals.map(|portal| with_port(&text(portal))).collect();
        let mut seen = std::collections::BTreeSet::new();
        portals.retain(|portal| seen.insert(portal.clone()));
        let base = or(text(&source["iscsiInterface"]), "default");
        let initiator = source["initiatorName"].as_str().filter(|name| !name.is_empty());
        let interface_copy =
            initiator.map(|name| InterfaceCopy { from: base.clone(), initiator: name.to_owned() });
        let interface = if interface_copy.is_some() { format!("{}:{name}", portals[0]) } else { base };
        let secret = source["secretRef"]["name"].as_str().filter(|name| !name.is_empty());
        let secret =
            secret.map(|name| (or(text(&source["secretRef"]["namespace"]), namespace), name.to_owned()));
        let (iqn, lun) = (text(&source["iqn"]), source["lun"].as_i64().unwrap_or_default());
        DiskRequest {
            target: Target { portals, iqn, lun, interface, interface_copy },
            name: name.to_owned(),
            fs_type: text(&source["fsType"]),
            read_only: source["readOnly"] == true,
            is_block: false,
            mount_options: Vec::new(),
            discovery_chap: source["chapAuthDiscovery"] == true,
            session_chap: source["chapAuthSession"] == true,
            secret,
            unique_volume_name: None,
        }
    }

    fn failed(&self, step: &str, message: impl ToString) -> SetUpError {
        let operation = match (step, self.is_block) {
            ("begin", false) => "MountVolume.NewMounter initialization",
            ("begin", true) => "MapVolume.NewBlockVolumeMapper initialization",
            ("attach", false) => "MountVolume.WaitForAttach",
            ("attach", true) => "MapVolume.WaitForAttach",
            ("device", _) => "MountVolume.MountDevice",
            _ => "MountVolume.SetUp",
        };
        SetUpError::Failed { operation, message: message.to_string() }
    }
}

/// Sets up a disk for a pod. May be repeated.
pub async fn set_up(
    volume_context: &VolumeContext<'_>,
    pod: &Pod,
    request: &DiskRequest,
) -> Result<ReadyDisk, SetUpError> {
    let disks = DiskManager::new(volume_context.settings, volume_context.csi);
    if let Some(path) = disks.reuse(pod.uid(), request).await? {
        return Ok(ReadyDisk { path, is_new: false });
    }
    if let Some(name) = &request.unique_volume_name {
        // Recorded before the volume is reported as in use, so that the pod releases it even if it
        // is removed meanwhile.
        disks.record_user(pod.uid(), request).await?;
        csi::volume::check_attached(volume_context, name)?;
    }
    let mut chap = ChapCredentials {
        discovery: request.discovery_chap,
        session: request.session_chap,
        ..ChapCredentials::default()
    };
    if let Some((namespace, name)) = request.secret.as_ref().filter(|_| chap.discovery || chap.session) {
        chap.secrets = secret_data(volume_context, namespace, name).await.map_err(|error| {
            request.failed("begin", format!("couldn't get secret {namespace}/{name} error: {error}"))
        })?;
    }
    disks.set_up(pod.uid(), request, &chap).await
}

/// Releases all disks of a terminated pod, whose sub-paths have to be unmounted before. Disks
/// without users are detached from the node.
pub async fn detach_pod(drivers: &csi::Drivers, settings: &Settings, pod: &str) -> Result<(), String> {
    DiskManager::new(settings, drivers).detach_pod(pod).await
}

/// Detaches all disks when no pod is left.
pub async fn detach_all(root: &Path, pods: &Path) -> Result<(), String> {
    let drivers = csi::Drivers::default();
    let disks = DiskManager {
        host: IscsiHost::default(),
        root: root.join(GLOBAL_MOUNT_DIR),
        pods,
        drivers: &drivers,
    };
    let mut result = Ok(());
    for pod in disks.pods_in_use() {
        result = result.and(disks.detach_pod(&pod).await);
    }
    result
}

/// The attached volumes, by their names in node statuses.
pub fn in_use(root: &Path) -> Vec<String> {
    let used = recorded_disks(&root.join(GLOBAL_MOUNT_DIR))
        .into_iter()
        .filter(|dir| !read_dir_paths(&dir.join(USERS_DIR)).is_empty());
    used.flat_map(|dir| names(&dir)).collect()
}

/// The pods that use disks, including those whose setup or teardown was interrupted.
pub fn pods_in_use(drivers: &csi::Drivers, settings: &Settings) -> BTreeSet<String> {
    DiskManager::new(settings, drivers).pods_in_use()
}

/// The iSCSI disks of this node.
struct DiskManager<'a> {
    host: IscsiHost,
    /// The directory of global mount points.
    root: PathBuf,
    pods: &'a Path,
    drivers: &'a csi::Drivers,
}

impl<'a> DiskManager<'a> {
    fn new(settings: &'a Settings, drivers: &'a csi::Drivers) -> DiskManager<'a> {
        let root = settings.root.join(GLOBAL_MOUNT_DIR);
        DiskManager { host: IscsiHost::default(), root, pods: &settings.pods, drivers }
    }

    /// Allows one login or logout at a time for each target.
    async fn lock_target(&self, target: &Target) -> impl Drop + use<> {
        self.drivers.volume_locks.lock(&format!("kubernetes.io/iscsi/{}", target.iqn)).await
    }

    fn disk_dir(&self, request: &DiskRequest) -> PathBuf {
        let Target { portals, iqn, lun, interface, .. } = &request.target;
        let root = if request.is_block { self.root.join("volumeDevices") } else { self.root.clone() };
        root.join(format!("iface-{interface}")).join(format!("{}-{iqn}-lun-{lun}", portals[0]))
    }

    fn pod_mount_dir(&self, pod: &str, request: &DiskRequest) -> PathBuf {
        self.pods.join(pod).join(POD_VOLUME_DIR).join(&request.name)
    }

    /// The path of a disk that the pod has already.
    fn existing(&self, pod: &str, request: &DiskRequest) -> Option<PathBuf> {
        if request.is_block {
            let dir = self.disk_dir(request);
            let device = std::fs::read_link(dir.join("device")).ok()?;
            return (dir.join(USERS_DIR).join(pod).exists() && device.exists()).then_some(device);
        }
        Some(self.pod_mount_dir(pod, request)).filter(|mount_dir| is_mounted(mount_dir))
    }

    /// The same. The disk is reported as in use again, because the version that mounted it may not
    /// have done so.
    async fn reuse(&self, pod: &str, request: &DiskRequest) -> Result<Option<PathBuf>, SetUpError> {
        let Some(path) = self.existing(pod, request) else { return Ok(None) };
        if let Some(name) = &request.unique_volume_name {
            self.record_user(pod, request).await?;
            self.drivers.set_in_use(name, true);
        }
        Ok(Some(path))
    }

    /// Records that a pod uses a disk.
    async fn record_user(&self, pod: &str, request: &DiskRequest) -> Result<(), SetUpError> {
        request.target.validate().map_err(|why| request.failed("begin", why))?;
        let _guard = self.lock_target(&request.target).await;
        record_user(&self.disk_dir(request), request, pod).map_err(|error| request.failed("attach", error))
    }

    async fn set_up(
        &self,
        pod: &str,
        request: &DiskRequest,
        chap: &ChapCredentials,
    ) -> Result<ReadyDisk, SetUpError> {
        let target = &request.target;
        target.validate().map_err(|why| request.failed("begin", why))?;
        let dir = self.disk_dir(request);
        let _guard = self.lock_target(target).await;
        if let Some(path) = self.existing(pod, request) {
            return Ok(ReadyDisk { path, is_new: false });
        }
        record_user(&dir, request, pod).map_err(|error| request.failed("attach", error))?;
        let shared = dir.join("mount");
        let ready = |path: PathBuf| ReadyDisk { path, is_new: true };
        if request.is_block || !is_mounted(&shared) {
            let device = attach::attach(&self.host, target, chap).await;
            let device = device.map_err(|why| request.failed("attach", why))?;
            let link = dir.join("device");
            let _ = std::fs::remove_file(&link);
            std::os::unix::fs::symlink(&device, &link).map_err(|error| request.failed("attach", error))?;
            if request.is_block {
                return Ok(ready(device));
            }
            disk::mount(&device, &shared, &request.fs_type, &request.mount_options, request.read_only)
                .await
                .map_err(|why| request.failed("device", why))?;
        }
        let mount_dir = self.pod_mount_dir(pod, request);
        let bound = std::fs::create_dir_all(&mount_dir)
            .and_then(|()| rustix::mount::mount_bind(&shared, &mount_dir).map_err(Into::into));
        bound.map_err(|error| request.failed("set up", format!("mount failed: {error}")))?;
        Ok(ready(mount_dir))
    }

    async fn detach_pod(&self, pod: &str) -> Result<(), String> {
        for mount_dir in read_dir_paths(&self.pods.join(pod).join(POD_VOLUME_DIR)) {
            if is_mounted(&mount_dir) {
                let _ = rustix::mount::unmount(&mount_dir, rustix::mount::UnmountFlags::DETACH);
            }
            // Anything else in there is user data, so only an empty directory is removed.
            let _ = std::fs::remove_dir(mount_dir);
        }
        for dir in self.recorded_disks().into_iter().filter(|dir| dir.join(USERS_DIR).join(pod).exists()) {
            let Some(target) = Target::read(&dir) else { continue };
            let _guard = self.lock_target(&target).await;
            if read_dir_paths(&dir.join(USERS_DIR)).iter().all(|user| user.ends_with(pod)) {
                let error_at = |error: &dyn std::fmt::Display| format!("{}: {error}", dir.display());
                let shared = dir.join("mount");
                if is_mounted(&shared) {
                    let none = rustix::mount::UnmountFlags::empty();
                    rustix::mount::unmount(&shared, none).map_err(|error| error_at(&error))?;
                }
                let others: Vec<Target> = self
                    .recorded_disks()
                    .iter()
                    .filter(|other| **other != dir)
                    .filter_map(|dir| Target::read(dir))
                    .collect();
                let device = std::fs::read_link(dir.join("device")).ok();
                attach::detach(&self.host, &target, device.as_deref(), &others)
                    .await
                    .map_err(|why| error_at(&why))?;
                // This fails if the mount directory is not empty. It is retried then, which needs
                // the record.
                match std::fs::remove_dir(&shared) {
                    Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                        return Err(error_at(&error));
                    }
                    _ => {}
                }
                let other_names: Vec<String> = self
                    .recorded_disks()
                    .iter()
                    .filter(|other| **other != dir)
                    .flat_map(|dir| names(dir))
                    .collect();
                // An earlier version may have reported it by another name.
                for name in names(&dir).iter().chain(&target.names()) {
                    if !other_names.contains(name) {
                        self.drivers.set_in_use(name, false);
                    }
                }
                for name in ["device", &*format!("{USERS_DIR}/{pod}"), RECORD_FILE] {
                    let _ = std::fs::remove_file(dir.join(name));
                }
                let _ = std::fs::remove_dir(dir.join(USERS_DIR));
                let _ = std::fs::remove_dir(&dir);
                let _ = dir.parent().map(std::fs::remove_dir);
            } else {
                let _ = std::fs::remove_file(dir.join(USERS_DIR).join(pod));
            }
        }
        Ok(())
    }

    fn pods_in_use(&self) -> BTreeSet<String> {
        let users = self.recorded_disks().into_iter().flat_map(|dir| read_dir_paths(&dir.join(USERS_DIR)));
        users.filter_map(|user| Some(user.file_name()?.to_str()?.to_owned())).collect()
    }

    /// The directories of all recorded disks.
    fn recorded_disks(&self) -> Vec<PathBuf> {
        recorded_disks(&self.root)
    }
}

fn recorded_disks(root: &Path) -> Vec<PathBuf> {
    let interfaces = read_dir_paths(root).into_iter().chain(read_dir_paths(&root.join("volumeDevices")));
    let dirs = interfaces.filter(|dir| !dir.ends_with("volumeDevices")).flat_map(|dir| read_dir_paths(&dir));
    dirs.filter(|dir| dir.join(RECORD_FILE).exists()).collect()
}

fn read_record(dir: &Path) -> Option<Value> {
    serde_json::from_slice(&std::fs::read(dir.join(RECORD_FILE)).ok()?).ok()
}

/// The names of an attached disk in node statuses. Earlier versions did not record the name, so it
/// may be any of the possible ones.
fn names(dir: &Path) -> Vec<String> {
    match read_record(dir).as_ref().map(|known| known.get("givenAs")) {
        Some(Some(name)) => name.as_str().map(str::to_owned).into_iter().collect(),
        Some(None) => Target::read(dir).map(|target| target.names()).unwrap_or_default(),
        None => Vec::new(),
    }
}

fn unique_name(portal: &str, iqn: &str, lun: i64) -> String {
    format!("kubernetes.io/iscsi/{portal}:{iqn}:{lun}")
}

impl Target {
    /// The possible names in node statuses: the port may be omitted in the volume.
    fn names(&self) -> Vec<String> {
        let portal = self.portals.first().map_or("", String::as_str);
        let short = portal.strip_suffix(DEFAULT_PORT).and_then(|portal| portal.strip_suffix(':'));
        [Some(portal), short]
            .into_iter()
            .flatten()
            .map(|portal| unique_name(portal, &self.iqn, self.lun))
            .collect()
    }

    /// Rejects names that are not safe as names of directories and files.
    fn validate(&self) -> Result<(), String> {
        let names = self.portals.iter().chain([&self.iqn, &self.interface]);
        let names = names.chain(self.interface_copy.iter().map(|interface_copy| &interface_copy.from));
        match names.into_iter().find(|name| name.contains('/') || name.contains("..")) {
            Some(name) => Err(format!("{name:?} is not a valid name of a target, portal or interface")),
            None => Ok(()),
        }
    }

    fn read(dir: &Path) -> Option<Target> {
        let value = read_record(dir)?;
        let text = |name: &str| value[name].as_str().map(str::to_owned);
        let portals = value["portals"].as_array()?.iter();
        let interface_copy = text("initiatorName")
            .map(|initiator| InterfaceCopy { from: text("initIface").unwrap_or_default(), initiator });
        Some(Target {
            portals: portals.filter_map(|portal| portal.as_str().map(str::to_owned)).collect(),
            iqn: text("iqn")?,
            lun: value["lun"].as_i64()?,
            interface: text("iface")?,
            interface_copy,
        })
    }
}

/// Writes the record of a disk and of its user.
fn record_user(dir: &Path, request: &DiskRequest, pod: &str) -> std::io::Result<()> {
    let Target { portals, iqn, lun, interface, interface_copy: copied } = &request.target;
    let before = read_record(dir);
    let mut record = json!({
        "portals": portals, "iqn": iqn, "lun": lun, "iface": interface,
        "initIface": copied.as_ref().map(|interface_copy| &interface_copy.from),
        "initiatorName": copied.as_ref().map(|interface_copy| &interface_copy.initiator),
    });
    // A pod that defines the disk itself does not change the name under which it was attached.
    match (&request.unique_volume_name, &before) {
        (None, Some(before)) => {
            if let Some(name) = before.get("givenAs") {
                record["givenAs"] = name.clone();
            }
        }
        (name, _) => record["givenAs"] = json!(name),
    }
    std::fs::create_dir_all(dir.join(USERS_DIR))?;
    std::fs::write(dir.join(USERS_DIR).join(pod), "")?;
    if before.as_ref() == Some(&record) {
        return Ok(());
    }
    std::fs::write(dir.join(RECORD_FILE), record.to_string())
}

fn with_port(portal: &str) -> String {
    if portal.contains(':') { portal.to_owned() } else { format!("{portal}:{DEFAULT_PORT}") }
}

fn read_dir_paths(dir: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}
