//! The volumes of a pod on this node: set up before its containers, refreshed while they run,
//! removed after them.

pub mod claims;
mod content;
mod disk;
mod host_commands;
mod hosts;
pub mod iscsi;
mod nfs;
pub mod sub_path;
pub mod tmpfs;
mod unsupported;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _, lchown};
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{Container, EmptyDirVolumeSource, Pod, Secret, Volume, VolumeMount};
use reconcile::{Ctx, Key};
use runtime::cri;

use crate::atomic_writer;
use crate::config::Settings;
use crate::csi::{self, volume::SetUpError};
use crate::env::{Addresses, Sources, expand};
use crate::huge_pages;
use crate::user_namespaces;
pub use content::request_token;

/// What the pod's group may do with read-only and writable volumes, and additionally with
/// directories. The setgid bit passes the group on to new files.
const GROUP_READ_MODE: u32 = 0o440;
const GROUP_WRITE_MODE: u32 = 0o660;
const GROUP_DIR_MODE: u32 = 0o2110;

/// Why a volume is not available, with upstream's text.
#[derive(Debug, thiserror::Error)]
#[error("{operation} failed for volume {volume:?} : {message}")]
pub struct VolumeError {
    pub operation: &'static str,
    pub volume: String,
    pub message: String,
    /// Not an error: another component has to do something first.
    pub waits: bool,
}

impl VolumeError {
    fn new(volume: &str, message: impl Into<String>) -> VolumeError {
        let operation = "MountVolume.SetUp";
        VolumeError { operation, volume: volume.to_owned(), message: message.into(), waits: false }
    }

    fn from_csi(volume: &str, trouble: SetUpError) -> VolumeError {
        match trouble {
            SetUpError::Waiting => {
                VolumeError { waits: true, ..VolumeError::new(volume, "the volume is not attached yet") }
            }
            SetUpError::Failed { operation, message } => {
                VolumeError { operation, ..VolumeError::new(volume, message) }
            }
        }
    }
}

/// The host paths of a pod's volumes by volume name.
pub type VolumePaths = BTreeMap<String, VolumeHostPath>;

/// The image volumes of a pod by volume name.
pub type VolumeImages = BTreeMap<String, cri::ImageSpec>;

/// The host path of a volume.
pub struct VolumeHostPath {
    pub path: PathBuf,
    /// Containers may only mount it read-only.
    pub read_only: bool,
    /// It is a block device without a filesystem.
    pub is_block: bool,
}

/// Everything that is needed to set up volumes.
pub struct VolumeContext<'a> {
    pub ctx: &'a Ctx,
    pub sources: &'a (dyn Sources + Sync),
    pub settings: &'a Settings,
    pub csi: &'a csi::Drivers,
    pub addresses: Addresses<'a>,
    /// The runtime sees mounts of the kubelet, so that secrets can be kept in a tmpfs.
    pub tmpfs_visible: bool,
    /// No container of the pod has run, so that it has not changed its volumes yet.
    pub before_first_container: bool,
}

/// Sets up all volumes that the pod uses, or returns the first error.
pub async fn set_up(pod: &Pod, volume_context: &VolumeContext<'_>) -> Result<VolumePaths, VolumeError> {
    let mut volume_paths = VolumePaths::new();
    for volume in used_volumes(pod) {
        // Image volumes are mounted by the runtime.
        if volume.image.is_some() {
            continue;
        }
        let failed = |message: String| VolumeError::new(&volume.name, message);
        let volume_path = if let Some(claim) = claims::claim_name(pod, volume) {
            let found = claims::set_up(volume_context, pod, volume, &claim).await?;
            apply_fs_group(pod, &found, volume_context)
                .map_err(|message| VolumeError::new(&found.name, message))?;
            VolumeHostPath { path: found.path, read_only: found.read_only, is_block: found.is_block }
        } else if let Some(request) = csi::volume::CsiVolumeSpec::inline(pod, volume) {
            let ready = csi::volume::set_up(volume_context, pod, &request).await;
            let ready = ready.map_err(|trouble| VolumeError::from_csi(&volume.name, trouble))?;
            if ready.apply_fs_group && !request.read_only && volume_context.before_first_container {
                set_volume_group(&ready.path, pod, GROUP_WRITE_MODE).map_err(failed)?;
            }
            VolumeHostPath { path: ready.path, read_only: request.read_only, is_block: false }
        } else if let Some(request) = iscsi::DiskRequest::inline(pod, volume) {
            let found = claims::set_up_disk(volume_context, pod, &volume.name, &request).await?;
            apply_fs_group(pod, &found, volume_context).map_err(failed)?;
            VolumeHostPath { path: found.path, read_only: found.read_only, is_block: false }
        } else {
            let path = set_up_volume(pod, volume, volume_context).await.map_err(failed)?;
            VolumeHostPath { path, read_only: content::is_config_volume(volume), is_block: false }
        };
        volume_paths.insert(volume.name.clone(), volume_path);
    }
    Ok(volume_paths)
}

/// The volumes that any of the pod's containers mounts or has as a device. Others are not set up,
/// and the objects that they reference may be missing.
fn used_volumes(pod: &Pod) -> impl Iterator<Item = &Volume> {
    let containers = crate::pod::containers(pod);
    let names = containers.into_iter().flat_map(|one| {
        let mounts = one.volume_mounts.into_iter().flatten().map(|mount| mount.name);
        mounts.chain(one.volume_devices.into_iter().flatten().map(|device| device.name))
    });
    let names: BTreeSet<String> = names.collect();
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    volumes.filter(move |volume| names.contains(&volume.name))
}

/// Sets the pod's group on a claimed volume, unless `OnRootMismatch` allows to skip it.
fn apply_fs_group(
    pod: &Pod,
    found: &claims::BoundVolume,
    volume_context: &VolumeContext<'_>,
) -> Result<(), String> {
    let context = pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
    let is_required = found.needs_fs_group && volume_context.before_first_container;
    let Some(context) = context.filter(|context| context.fs_group.is_some() && is_required) else {
        return Ok(());
    };
    let group = context.fs_group.and_then(|group| u32::try_from(group).ok());
    let is_applied = fs::metadata(&found.path).is_ok_and(|known| {
        use std::os::unix::fs::MetadataExt as _;
        Some(known.gid()) == group && known.mode() & 0o2770 == 0o2770
    });
    if is_applied && context.fs_group_change_policy.as_deref() == Some("OnRootMismatch") {
        return Ok(());
    }
    set_volume_group(&found.path, pod, GROUP_WRITE_MODE)
}

/// The data of a Secret that is needed to set up a volume. It is fetched by name, because a node
/// may only read those that its own pods lead to.
pub async fn secret_data(
    volume_context: &VolumeContext<'_>,
    namespace: &str,
    name: &str,
) -> Result<BTreeMap<String, String>, String> {
    let secret = volume_context.ctx.client.get::<Secret>(&Key::new(namespace, name)).await;
    let data = secret.map_err(|error| error.to_string())?.data.unwrap_or_default().into_iter();
    Ok(data.map(|(key, value)| (key, String::from_utf8_lossy(&value.0).into_owned())).collect())
}

async fn set_up_volume(
    pod: &Pod,
    volume: &Volume,
    volume_context: &VolumeContext<'_>,
) -> Result<PathBuf, String> {
    let dir = |kind: &str| volume_context.settings.pod_dir(pod).join("volumes").join(kind).join(&volume.name);
    if let Some(host) = &volume.host_path {
        return host_path(&host.path, host.type_.as_deref().unwrap_or_default(), volume_context.settings);
    }
    if let Some(empty) = &volume.empty_dir {
        let dir = dir("kubernetes.io~empty-dir");
        let medium = empty.medium.as_deref().unwrap_or_default();
        let pages = huge_pages::is_medium(medium).then(|| huge_pages::page_size(medium, pod)).transpose()?;
        let is_mounted = pages.is_some() || medium == "Memory";
        // The mount may be missing although the directory exists: a mount may have failed, and
        // mounts do not survive a reboot.
        let fresh = if is_mounted { !is_mount(&dir) } else { !dir.exists() };
        fs::create_dir_all(&dir).map_err(|error| error.to_string())?;
        if let (Some(size), true) = (pages, fresh) {
            mount(&dir, "hugetlbfs", &format!("pagesize={size}"))?;
        }
        if medium == "Memory" && fresh {
            let of_node = volume_context.sources.allocatable("memory");
            let of_node = of_node.map_or(volume_context.settings.memory, |memory| memory.value());
            let size = memory_size_limit(pod, empty, of_node);
            mount(&dir, "tmpfs", &if size > 0 { format!("size={size}") } else { String::new() })?;
        }
        // An ephemeral container may be the first to use the volume.
        if volume_context.before_first_container || fresh {
            fs::set_permissions(&dir, fs::Permissions::from_mode(0o777))
                .map_err(|error| error.to_string())?;
            set_volume_group(&dir, pod, GROUP_WRITE_MODE)?;
        }
        return Ok(dir);
    }
    if let Some(source) = &volume.nfs {
        let dir = dir("kubernetes.io~nfs");
        nfs::mount(source, &[], &dir).await?;
        return Ok(dir);
    }
    let Some((dir, mut payload)) = content::volume_payload(pod, volume, dir, volume_context).await? else {
        return Err(unsupported::unsupported_message(volume));
    };
    if fs_group(pod).is_some() {
        // Before the files are written, because the comparison with the existing files includes
        // their mode.
        payload.values_mut().for_each(|file| file.mode |= GROUP_READ_MODE);
    }
    let is_in_memory = volume_context.tmpfs_visible && content::is_in_memory(volume);
    if let Some(around) = dir.parent().filter(|_| is_in_memory) {
        tmpfs::mount_tmpfs(around, user_namespaces::has_user_namespace(pod))
            .map_err(|error| error.to_string())?;
    }
    atomic_writer::write(&dir, &payload, |fresh| set_volume_group(fresh, pod, GROUP_READ_MODE))?;
    if let Some(group) = fs_group(pod) {
        let more = fs::Permissions::from_mode(0o755 | GROUP_READ_MODE | GROUP_DIR_MODE);
        let given = lchown(&dir, None, Some(group)).and_then(|()| fs::set_permissions(&dir, more));
        given.map_err(|error| error.to_string())?;
    }
    Ok(dir)
}

/// The size limit of a memory-backed volume: the lowest of the node's allocatable memory, the pod's
/// limit and its own `sizeLimit`. 0 leaves it to the kernel.
fn memory_size_limit(pod: &Pod, empty: &EmptyDirVolumeSource, of_node: i64) -> i64 {
    let of_pod = crate::cgroups::pod_limits(pod, 0).memory;
    let size_limit = empty.size_limit.as_ref();
    let size_limit = size_limit.and_then(|size| schema::quantity::Quantity::parse(&size.0).ok());
    let limits = [of_node, of_pod, size_limit.map_or(0, |size| size.value())];
    limits.into_iter().filter(|limit| *limit > 0).min().unwrap_or(0)
}

/// The group of all volumes of a pod (`fsGroup`).
fn fs_group(pod: &Pod) -> Option<u32> {
    let context = pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
    context.and_then(|context| context.fs_group).and_then(|group| u32::try_from(group).ok())
}

/// Sets the pod's group on a volume, if it has one, with the permissions in `mode`.
fn set_volume_group(dir: &Path, pod: &Pod, mode: u32) -> Result<(), String> {
    match fs_group(pod) {
        Some(group) => set_group_of_tree(dir, group, mode).map_err(|error| error.to_string()),
        None => Ok(()),
    }
}

/// Sets the group of a directory tree. The top directory comes last, because its group shows that
/// the tree is done.
///
/// Files whose group cannot be changed stay as they are: that may be intended, or they are gone by
/// now.
fn set_group_of_tree(top: &Path, group: u32, mode: u32) -> std::io::Result<()> {
    use tokio::runtime::{Handle, RuntimeFlavor};
    let all = || -> std::io::Result<()> {
        let (mut first_error, mut count) = (None, 0);
        let mut set_group = |path: &Path, known: &fs::Metadata| {
            if let Err(error) = set_group_of_file(path, known, group, mode) {
                count += 1;
                first_error.get_or_insert_with(|| (path.to_owned(), error));
            }
        };
        let known = fs::symlink_metadata(top)?;
        let mut dirs = if known.is_dir() { vec![top.to_owned()] } else { Vec::new() };
        while let Some(dir) = dirs.pop() {
            for entry in ignore_not_found(fs::read_dir(&dir))?.into_iter().flatten() {
                let path = entry?.path();
                let Some(known) = ignore_not_found(fs::symlink_metadata(&path))? else { continue };
                set_group(&path, &known);
                if known.is_dir() {
                    dirs.push(path);
                }
            }
        }
        set_group(top, &known);
        if let Some((path, error)) = first_error {
            let first = path.display();
            tracing::warn!(%first, %error, count, "cannot set the group of all files in a volume");
        }
        Ok(())
    };
    // This may take long, and must not block other tasks of this runtime thread. `block_in_place`
    // needs a multi-threaded runtime.
    match Handle::try_current().map(|handle| handle.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(all),
        _ => all(),
    }
}

fn set_group_of_file(path: &Path, known: &fs::Metadata, group: u32, mode: u32) -> std::io::Result<()> {
    let given = lchown(path, None, Some(group));
    if known.is_symlink() {
        return given;
    }
    let more = if known.is_dir() { mode | GROUP_DIR_MODE } else { mode };
    fs::set_permissions(path, fs::Permissions::from_mode(known.permissions().mode() | more)).and(given)
}

fn ignore_not_found<T>(found: std::io::Result<T>) -> std::io::Result<Option<T>> {
    match found {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        found => found.map(Some),
    }
}

fn host_path(path: &str, kind: &str, settings: &Settings) -> Result<PathBuf, String> {
    let volume_path = settings.host_path(Path::new(path));
    let found = fs::metadata(&volume_path).ok();
    let is = |check: fn(&fs::FileType) -> bool| found.as_ref().is_some_and(|found| check(&found.file_type()));
    match kind {
        "DirectoryOrCreate" if found.is_none() => {
            fs::create_dir_all(&volume_path).map_err(|error| error.to_string())?
        }
        "FileOrCreate" if found.is_none() => {
            fs::write(&volume_path, "").map_err(|error| error.to_string())?
        }
        "Directory" | "DirectoryOrCreate" if !is(fs::FileType::is_dir) => {
            return Err(format!("hostPath type check failed: {path} is not a directory"));
        }
        "File" | "FileOrCreate" if !is(fs::FileType::is_file) => {
            return Err(format!("hostPath type check failed: {path} is not a file"));
        }
        "Socket" if !is(|kind| kind.is_socket()) => {
            return Err(format!("hostPath type check failed: {path} is not a socket file"));
        }
        "CharDevice" if !is(|kind| kind.is_char_device()) => {
            return Err(format!("hostPath type check failed: {path} is not a character device"));
        }
        "BlockDevice" if !is(|kind| kind.is_block_device()) => {
            return Err(format!("hostPath type check failed: {path} is not a block device"));
        }
        // As Docker did: a missing path is created as a directory.
        "" if found.is_none() => fs::create_dir_all(&volume_path).map_err(|error| error.to_string())?,
        _ => {}
    }
    Ok(volume_path)
}

/// Whether a directory is a mount point: it is on another device than its parent.
fn is_mount(dir: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    let device = |path: &Path| fs::metadata(path).map(|known| known.dev()).ok();
    device(dir).is_some_and(|own| dir.parent().and_then(device) != Some(own))
}

fn mount(dir: &Path, kind: &str, options: &str) -> Result<(), String> {
    let flags = rustix::mount::MountFlags::empty();
    let options = std::ffi::CString::new(options).unwrap_or_default();
    rustix::mount::mount(kind, dir, kind, flags, options.as_c_str())
        .map_err(|error| format!("cannot mount {kind} at {}: {error}", dir.display()))
}

/// What the mounts of a container's run are made from.
pub struct MountContext<'a> {
    pub attempt: u32,
    pub volume_paths: &'a VolumePaths,
    pub images: &'a VolumeImages,
    pub env: &'a [(String, String)],
}

/// The mounts of all containers of a pod.
pub fn all_mounts(pod: &Pod) -> impl Iterator<Item = &VolumeMount> {
    let spec = pod.spec.as_ref();
    let init_containers = spec.and_then(|spec| spec.init_containers.as_ref()).into_iter().flatten();
    let ephemeral_containers = spec.and_then(|spec| spec.ephemeral_containers.as_ref()).into_iter().flatten();
    let own = init_containers.chain(spec.into_iter().flat_map(|spec| &spec.containers));
    let mounts = own.map(|one| &one.volume_mounts).chain(ephemeral_containers.map(|one| &one.volume_mounts));
    mounts.flatten().flatten()
}

/// Whether a mount has to be recursively read-only; `is_supported` is whether the runtime can do
/// that.
pub fn is_recursive_read_only(mount: &VolumeMount, is_supported: bool) -> Result<bool, String> {
    match mount.recursive_read_only.as_deref() {
        Some("Enabled") if !is_supported => Err(format!(
            "volume {:?} requested recursive read-only mount, but it is not supported by the runtime",
            mount.name
        )),
        Some("Enabled") => Ok(true),
        Some("IfPossible") => Ok(is_supported && mount.read_only == Some(true)),
        _ => Ok(false),
    }
}

/// The mounts of a container: its volumes, the hosts file and the termination message file.
pub fn mounts(
    pod: &Pod,
    container: &Container,
    mounted: &MountContext<'_>,
    recursive: bool,
    settings: &Settings,
) -> Result<Vec<cri::Mount>, VolumeError> {
    let MountContext { attempt, volume_paths: places, images, env } = *mounted;
    let mut mounts = Vec::new();
    let has_labels = Path::new("/sys/fs/selinux/enforce").exists();
    for (at, mount) in container.volume_mounts.iter().flatten().enumerate() {
        let failed = |message: String| VolumeError::new(&mount.name, message);
        let part = sub_path_of(mount, env).map_err(failed)?;
        if let Some(image) = images.get(&mount.name) {
            mounts.push(cri::Mount {
                container_path: mount.mount_path.clone(),
                image: Some(image.clone()),
                image_sub_path: part.unwrap_or_default(),
                readonly: mount.read_only == Some(true),
                ..cri::Mount::default()
            });
            continue;
        }
        let volume_path =
            places.get(&mount.name).ok_or_else(|| failed("the pod has no volume of this name".into()))?;
        if volume_path.is_block {
            let message =
                format!("volume {} has volumeMode Block, but is specified in volumeMounts", mount.name);
            return Err(failed(message));
        }
        let path = match part {
            Some(part) => {
                let bound = settings.pod_dir(pod).join("volume-subpaths").join(&mount.name);
                let bound = bound.join(&container.name).join(at.to_string());
                sub_path::bind(&volume_path.path, &part, &bound).map_err(failed)?
            }
            None => volume_path.path.clone(),
        };
        let propagation = match mount.mount_propagation.as_deref() {
            Some("HostToContainer") => cri::MountPropagation::HostToContainer,
            Some("Bidirectional") => cri::MountPropagation::Bidirectional,
            _ => cri::MountPropagation::Private,
        };
        mounts.push(cri::Mount {
            container_path: mount.mount_path.clone(),
            host_path: path.display().to_string(),
            readonly: volume_path.read_only || mount.read_only == Some(true),
            recursive_read_only: is_recursive_read_only(mount, recursive).map_err(failed)?,
            propagation: propagation.into(),
            selinux_relabel: has_labels && is_owned_by_pod(pod, &mount.name),
            ..cri::Mount::default()
        });
    }
    add_host_paths(&mut mounts, settings);
    let mounted = |mounts: &[cri::Mount], path: &str| mounts.iter().any(|mount| mount.container_path == path);
    let file = |name: PathBuf, target: &str| cri::Mount {
        container_path: target.to_owned(),
        host_path: name.display().to_string(),
        selinux_relabel: has_labels,
        ..cri::Mount::default()
    };
    if !mounted(&mounts, hosts::HOSTS_PATH) {
        mounts.push(file(settings.pod_dir(pod).join(hosts::HOSTS_FILE), hosts::HOSTS_PATH));
    }
    let message_path = container.termination_message_path.as_deref().unwrap_or("/dev/termination-log");
    if !mounted(&mounts, message_path) {
        mounts.push(file(termination_message_path(pod, &container.name, attempt, settings), message_path));
    }
    Ok(mounts)
}

/// Mounts the kubelet directory at its real path, too, in containers that mount it at the default
/// path. CSI drivers are given volume paths on the host, which must be valid in their containers.
fn add_host_paths(mounts: &mut Vec<cri::Mount>, settings: &Settings) {
    let real: Vec<cri::Mount> = mounts
        .iter()
        .filter(|mount| {
            let host_path = settings.host_path(Path::new(&mount.container_path));
            host_path == Path::new(&mount.host_path) && host_path != Path::new(&mount.container_path)
        })
        .map(|mount| cri::Mount { container_path: mount.host_path.clone(), ..mount.clone() })
        .collect();
    let is_new = |mount: &cri::Mount| {
        let path = Path::new(&mount.container_path);
        !mounts.iter().any(|known| Path::new(&known.container_path) == path)
    };
    let real: Vec<cri::Mount> = real.into_iter().filter(is_new).collect();
    mounts.extend(real);
}

/// Whether a volume belongs to this pod alone, so that its content may be relabeled for the pod.
fn is_owned_by_pod(pod: &Pod, name: &str) -> bool {
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    volumes.filter(|volume| volume.name == name).any(|volume| {
        volume.empty_dir.is_some()
            || volume.config_map.is_some()
            || volume.secret.is_some()
            || volume.projected.is_some()
            || volume.downward_api.is_some()
    })
}

/// The block volumes of a container as devices.
pub fn devices(container: &Container, volume_paths: &VolumePaths) -> Result<Vec<cri::Device>, VolumeError> {
    let devices = container.volume_devices.iter().flatten().map(|device| {
        let failed = |message: String| VolumeError::new(&device.name, message);
        let volume_path = volume_paths
            .get(&device.name)
            .ok_or_else(|| failed("the pod has no volume of this name".into()))?;
        if !volume_path.is_block {
            let why = format!(
                "volume {} has volumeMode Filesystem, but is specified in volumeDevices",
                device.name
            );
            return Err(failed(why));
        }
        Ok(cri::Device {
            container_path: device.device_path.clone(),
            host_path: volume_path.path.display().to_string(),
            permissions: if volume_path.read_only { "r" } else { "mrw" }.to_owned(),
        })
    });
    devices.collect()
}

/// The termination message file of a container's run.
pub fn termination_message_path(pod: &Pod, container: &str, attempt: u32, settings: &Settings) -> PathBuf {
    settings.pod_dir(pod).join("containers").join(container).join(attempt.to_string())
}

/// When the first of the pod's tokens has to be refreshed.
pub fn token_refresh_time(pod: &Pod, settings: &Settings) -> Option<jiff::Timestamp> {
    let dir = settings.pod_dir(pod).join("volumes/kubernetes.io~projected");
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let sources = volumes.flat_map(|volume| {
        let sources = volume.projected.iter().flat_map(|projected| projected.sources.iter().flatten());
        sources.map(move |source| (&volume.name, source))
    });
    let times = sources.filter_map(|(volume, source)| {
        let token_source = source.service_account_token.as_ref()?;
        let created = fs::metadata(dir.join(volume).join(&token_source.path)).ok()?.modified().ok()?;
        let created = jiff::Timestamp::try_from(created).ok()?;
        let seconds = content::refresh_after_seconds(token_source.expiration_seconds.unwrap_or(3607)) + 1;
        created.checked_add(jiff::SignedDuration::from_secs(seconds)).ok()
    });
    times.min()
}

/// The sub-path of a mount, if it has one.
fn sub_path_of(mount: &VolumeMount, env: &[(String, String)]) -> Result<Option<String>, String> {
    let known =
        |name: &str| env.iter().rev().find(|(known, _)| known == name).map(|(_, value)| value.clone());
    let part = match (&mount.sub_path, &mount.sub_path_expr) {
        (_, Some(text)) if !text.is_empty() => expand(text, &known),
        (Some(part), _) if !part.is_empty() => part.clone(),
        _ => return Ok(None),
    };
    if part.starts_with('/') {
        return Err(format!("error SubPath `{part}` must not be an absolute path"));
    }
    if part.split('/').any(|step| step == "..") {
        return Err(format!("unable to provision SubPath `{part}`: must not contain '..'"));
    }
    Ok(Some(part))
}

/// Writes the files that each container has in addition to its volumes: the hosts file and the
/// termination message file.
pub fn write_container_files(
    pod: &Pod,
    container: &Container,
    attempt: u32,
    settings: &Settings,
    ips: &[String],
) -> std::io::Result<()> {
    let dir = settings.pod_dir(pod);
    let message_path = termination_message_path(pod, &container.name, attempt, settings);
    fs::create_dir_all(message_path.parent().unwrap_or(&dir))?;
    fs::write(&message_path, "")?;
    fs::set_permissions(&message_path, fs::Permissions::from_mode(0o666))?;
    hosts::write(pod, settings, ips)
}

/// Unmounts and removes everything in a pod's directory.
pub fn remove_volumes(uid: &str, settings: &Settings) -> std::io::Result<()> {
    let dir = settings.pods.join(uid);
    sys::mounts::unmount_below(&dir)?;
    match sys::trees::remove(&dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
