//! A pod's volumes on this node: made before its containers, kept up to date, removed after them.

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

/// What a pod's group may do to volumes and what is in them, and to directories besides: whatever is made there is theirs too.
const GROUP_READ_MODE: u32 = 0o440;
const GROUP_WRITE_MODE: u32 = 0o660;
const GROUP_DIR_MODE: u32 = 0o2110;

/// Why a volume is not there, in upstream's words.
#[derive(Debug, thiserror::Error)]
#[error("{operation} failed for volume {volume:?} : {message}")]
pub struct VolumeError {
    pub operation: &'static str,
    pub volume: String,
    pub message: String,
    /// Nothing is wrong: others have to do something first.
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
                VolumeError { waits: true, ..VolumeError::new(volume, "it is not attached yet") }
            }
            SetUpError::Failed { operation, message } => {
                VolumeError { operation, ..VolumeError::new(volume, message) }
            }
        }
    }
}

/// Where each volume of a pod is on this host.
pub type VolumePaths = BTreeMap<String, VolumeHostPath>;

/// The volumes of a pod that are images.
pub type VolumeImages = BTreeMap<String, cri::ImageSpec>;

/// A volume on this host.
pub struct VolumeHostPath {
    pub path: PathBuf,
    /// Whoever mounts it may only read.
    pub read_only: bool,
    /// It is a device without a file system.
    pub is_block: bool,
}

/// What volumes are made from.
pub struct VolumeContext<'a> {
    pub ctx: &'a Ctx,
    pub sources: &'a (dyn Sources + Sync),
    pub settings: &'a Settings,
    pub csi: &'a csi::Drivers,
    pub addresses: Addresses<'a>,
    /// What is secret may be mounted, since the runtime sees it.
    pub tmpfs_visible: bool,
    /// Nothing of the pod has run yet: what is in its volumes is not its own doing.
    pub before_first_container: bool,
}

/// Makes every volume that the pod uses, or says which cannot be made and why.
pub async fn set_up(pod: &Pod, volume_context: &VolumeContext<'_>) -> Result<VolumePaths, VolumeError> {
    let mut volume_paths = VolumePaths::new();
    for volume in used_volumes(pod) {
        // Images are the runtime's.
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

/// The volumes that any of the pod's containers mounts or has as a device. Nobody needs the others, so what they are made
/// from may be missing.
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

/// Gives a claimed volume to the pod's group, unless it is known to be theirs already.
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

/// What a secret holds that a volume needs to be reached. It is asked for by name, since a node may see no others than those
/// that its own pods lead to.
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
        // What should have been mounted may not have been: a mount fails, and a machine forgets its mounts.
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
        // One for having a look may be the first to use it.
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
        // Right from the start, or it would never be as it should.
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

/// How much memory a volume may take: no more than all pods of the node may, than the whole pod may, or than it says
/// itself. 0 leaves that to the kernel.
fn memory_size_limit(pod: &Pod, empty: &EmptyDirVolumeSource, of_node: i64) -> i64 {
    let of_pod = crate::cgroups::pod_limits(pod, 0).memory;
    let size_limit = empty.size_limit.as_ref();
    let size_limit = size_limit.and_then(|size| schema::quantity::Quantity::parse(&size.0).ok());
    let limits = [of_node, of_pod, size_limit.map_or(0, |size| size.value())];
    limits.into_iter().filter(|limit| *limit > 0).min().unwrap_or(0)
}

/// The group that all of a pod's volumes are to belong to.
fn fs_group(pod: &Pod) -> Option<u32> {
    let context = pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
    context.and_then(|context| context.fs_group).and_then(|group| u32::try_from(group).ok())
}

/// Gives a volume to the pod's group, where it has one, which may do to it what `mode` says.
fn set_volume_group(dir: &Path, pod: &Pod, mode: u32) -> Result<(), String> {
    match fs_group(pod) {
        Some(group) => set_group_of_tree(dir, group, mode).map_err(|error| error.to_string()),
        None => Ok(()),
    }
}

/// Gives all there is in a directory to a group, the directory itself last: by that one sees that it is done.
///
/// What cannot be given stays as it is, for its being so may be meant, or it is gone by now.
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
            tracing::warn!(%first, %error, count, "not all of a volume can be given to the pod's group");
        }
        Ok(())
    };
    // There may be any number of files, and others have work to do.
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
        // As docker did: what is not there is made a directory.
        "" if found.is_none() => fs::create_dir_all(&volume_path).map_err(|error| error.to_string())?,
        _ => {}
    }
    Ok(volume_path)
}

/// Whether something is mounted at a directory: it is on another device than what is above it.
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

/// What a run of a container mounts.
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

/// Whether all that is mounted below is to be read only as well, on a node whose runtime can do that or not.
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

/// The mounts of a container: its volumes, the hosts file and the file for its last words.
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
        let volume_path = places.get(&mount.name).ok_or_else(|| failed("there is no such volume".into()))?;
        if volume_path.is_block {
            let why = format!("volume {} has volumeMode Block, but is specified in volumeMounts", mount.name);
            return Err(failed(why));
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

/// Shows the node's kubelet directory under its own path as well to those who mount it at the usual one: the paths of
/// volumes that drivers are given are the host's.
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

/// Whether a volume was made for this pod alone, so that all there is in it may be labelled as the pod's.
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

/// The devices of a container that are volumes.
pub fn devices(container: &Container, volume_paths: &VolumePaths) -> Result<Vec<cri::Device>, VolumeError> {
    let devices = container.volume_devices.iter().flatten().map(|device| {
        let failed = |message: String| VolumeError::new(&device.name, message);
        let volume_path =
            volume_paths.get(&device.name).ok_or_else(|| failed("there is no such volume".into()))?;
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

/// Where a run of a container leaves its last words.
pub fn termination_message_path(pod: &Pod, container: &str, attempt: u32, settings: &Settings) -> PathBuf {
    settings.pod_dir(pod).join("containers").join(container).join(attempt.to_string())
}

/// When the first of the pod's tokens is to be renewed.
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

/// The part of a volume that is mounted, if not all.
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

/// What every container has beside its volumes: the hosts file, and room for its last words.
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

/// Removes the volumes of a pod, and all else that is in its directory.
pub fn remove_volumes(uid: &str, settings: &Settings) -> std::io::Result<()> {
    let dir = settings.pods.join(uid);
    sys::mounts::unmount_below(&dir)?;
    match sys::trees::remove(&dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn plain_directory_is_not_a_mount_point() {
        let dir = tempfile::tempdir().expect("a directory");
        assert!(is_mount(Path::new("/proc")) && !is_mount(Path::new("/proc/1")));
        assert!(!is_mount(&dir.path().join("none")));
        std::fs::create_dir(dir.path().join("some")).expect("made");
        assert!(!is_mount(&dir.path().join("some")), "what was to be mounted there was not");
    }

    #[test]
    fn recursive_read_only_requires_runtime_support() {
        let check = |how: Option<&str>, is_supported, expected: Result<bool, &str>| {
            let mount = VolumeMount {
                name: "v".to_owned(),
                read_only: Some(true),
                recursive_read_only: how.map(str::to_owned),
                ..VolumeMount::default()
            };
            assert_eq!(
                is_recursive_read_only(&mount, is_supported),
                expected.map_err(str::to_owned),
                "{how:?} {is_supported}"
            );
        };
        check(None, true, Ok(false));
        check(Some("Disabled"), true, Ok(false));
        check(Some("IfPossible"), true, Ok(true));
        check(Some("IfPossible"), false, Ok(false));
        check(Some("Enabled"), true, Ok(true));
        let not = "volume \"v\" requested recursive read-only mount, but it is not supported by the runtime";
        check(Some("Enabled"), false, Err(not));
    }

    fn pod(spec: serde_json::Value) -> Pod {
        serde_json::from_value(json!({"metadata": {"uid": "1"}, "spec": spec})).expect("a pod")
    }

    #[test]
    fn only_used_volumes_are_set_up() {
        let mounts = |name: &str| json!([{"name": name, "mountPath": "/x"}]);
        let volumes = ["none", "main", "init", "look", "disk"].map(|name| json!({"name": name}));
        let pod = pod(json!({
            "initContainers": [{"name": "a", "volumeMounts": mounts("init")}],
            "containers": [
                {"name": "b", "volumeMounts": mounts("main")},
                {"name": "c", "volumeDevices": [{"name": "disk", "devicePath": "/dev/x"}]},
            ],
            "ephemeralContainers": [{"name": "d", "volumeMounts": mounts("look")}],
            "volumes": volumes,
        }));
        let names: Vec<&str> = used_volumes(&pod).map(|volume| volume.name.as_str()).collect();
        assert_eq!(names, ["main", "init", "look", "disk"]);
    }

    #[test]
    fn memory_volume_has_the_smallest_limit() {
        let check = |limits: [Option<&str>; 2], size_limit: Option<&str>, expected: i64| {
            let one = |limit: &Option<&str>| match limit {
                Some(limit) => json!({"name": "c", "resources": {"limits": {"memory": limit}}}),
                None => json!({"name": "c"}),
            };
            let pod = pod(json!({"containers": limits.iter().map(one).collect::<Vec<_>>()}));
            let empty = serde_json::from_value(json!({"medium": "Memory", "sizeLimit": size_limit}));
            assert_eq!(
                memory_size_limit(&pod, &empty.expect("a volume"), 1 << 30),
                expected,
                "{limits:?} {size_limit:?}"
            );
        };
        check([None, None], None, 1 << 30);
        check([Some("64Mi"), Some("32Mi")], None, 96 << 20);
        // One without a limit may use all there is.
        check([Some("64Mi"), None], None, 1 << 30);
        check([Some("2Gi"), Some("2Gi")], None, 1 << 30);
        check([Some("64Mi"), Some("32Mi")], Some("1Mi"), 1 << 20);
        check([Some("64Mi"), Some("32Mi")], Some("0"), 96 << 20);
        check([Some("64Mi"), Some("32Mi")], Some("1Gi"), 96 << 20);
        check([None, None], Some("2Gi"), 1 << 30);
    }

    #[test]
    fn every_container_has_a_hosts_file() {
        let check = |host_network: bool, own: Option<&str>, expected: &str| {
            let mounts: Vec<_> = own.iter().map(|path| json!({"name": "v", "mountPath": path})).collect();
            let container = json!({"name": "c", "volumeMounts": mounts});
            let pod = pod(json!({"hostNetwork": host_network, "containers": [container]}));
            let volume_path = VolumeHostPath { path: "/v".into(), read_only: false, is_block: false };
            let volume_paths = VolumePaths::from([("v".to_owned(), volume_path)]);
            let mounted = MountContext {
                attempt: 0,
                volume_paths: &volume_paths,
                images: &VolumeImages::new(),
                env: &[],
            };
            let settings = Settings::for_tests(Path::new("/node"));
            let found = mounts_of(&pod, &mounted, &settings);
            let at: Vec<&cri::Mount> =
                found.iter().filter(|mount| mount.container_path == "/etc/hosts").collect();
            assert_eq!(at.len(), 1, "{host_network} {own:?}");
            assert_eq!(at[0].host_path, expected, "{host_network} {own:?}");
        };
        for host_network in [false, true] {
            check(host_network, None, "/node/own/1/etc-hosts");
            check(host_network, Some("/etc/hosts"), "/v");
        }
    }

    #[test]
    fn default_kubelet_directory_is_the_nodes_own() {
        let check = |root: &str, path: &str, expected: &str| {
            let settings = Settings { root: root.into(), ..Settings::for_tests(Path::new("/node")) };
            assert_eq!(settings.host_path(Path::new(path)), Path::new(expected));
        };
        check("/node", "/var/lib/kubelet", "/node");
        check("/node/", "/var/lib/kubelet/", "/node");
        check("/node", "/var/lib/kubelet/pods", "/node/pods");
        check("/node", "/var/lib/kubelet//plugins/disk/csi.sock", "/node/plugins/disk/csi.sock");
        check("/node", "/var/lib/kubelet/../x", "/var/lib/kubelet/../x");
        check("/node", "/var/lib/kubelet-other", "/var/lib/kubelet-other");
        check("/node", "/var/lib", "/var/lib");
        check("/var/lib/kubelet", "/var/lib/kubelet/pods", "/var/lib/kubelet/pods");
        let dir = tempfile::tempdir().expect("a directory");
        let settings = Settings::for_tests(dir.path());
        let pods = dir.path().join("pods");
        let missing = "hostPath type check failed: /var/lib/kubelet/pods is not a directory".to_owned();
        assert_eq!(host_path("/var/lib/kubelet/pods", "Directory", &settings), Err(missing));
        assert_eq!(host_path("/var/lib/kubelet/pods", "DirectoryOrCreate", &settings).as_ref(), Ok(&pods));
        assert_eq!(host_path("/var/lib/kubelet/pods", "Directory", &settings).as_ref(), Ok(&pods));
    }

    #[test]
    fn kubelet_directory_has_both_its_paths_in_a_container() {
        let check = |root: &str, host_path: &str, mounts: &[&str], expected: &[&str]| {
            let settings = Settings { root: root.into(), ..Settings::for_tests(Path::new("/node")) };
            let path = settings.host_path(Path::new(host_path));
            let volume_path = VolumeHostPath { path, read_only: false, is_block: false };
            let volume_paths = VolumePaths::from([("v".to_owned(), volume_path)]);
            let mounts = mounts
                .iter()
                .map(|path| json!({"name": "v", "mountPath": path, "mountPropagation": "Bidirectional"}));
            let container = json!({"name": "c", "volumeMounts": mounts.collect::<Vec<_>>()});
            let pod = pod(json!({"containers": [container]}));
            let mounted = MountContext {
                attempt: 0,
                volume_paths: &volume_paths,
                images: &VolumeImages::new(),
                env: &[],
            };
            let found = mounts_of(&pod, &mounted, &settings);
            let found: Vec<String> = found
                .iter()
                .filter(|mount| mount.propagation() == cri::MountPropagation::Bidirectional)
                .map(|mount| format!("{} {}", mount.host_path, mount.container_path))
                .collect();
            assert_eq!(found, expected, "{root} {host_path}");
        };
        let default = "/var/lib/kubelet/pods";
        check("/node", default, &[default], &["/node/pods /var/lib/kubelet/pods", "/node/pods /node/pods"]);
        // Paths that drivers are given mean nothing where it is mounted elsewhere.
        check("/node", default, &["/pods"], &["/node/pods /pods"]);
        check(
            "/node",
            default,
            &[default, "/node/pods"],
            &["/node/pods /var/lib/kubelet/pods", "/node/pods /node/pods"],
        );
        check("/node", "/data", &[default], &["/data /var/lib/kubelet/pods"]);
        check("/var/lib/kubelet", default, &[default], &["/var/lib/kubelet/pods /var/lib/kubelet/pods"]);
    }

    fn mounts_of(pod: &Pod, mounted: &MountContext<'_>, settings: &Settings) -> Vec<cri::Mount> {
        let container = &crate::pod::containers(pod)[0];
        mounts(pod, container, mounted, false, settings).expect("mounts")
    }

    #[test]
    fn group_is_set_on_all_files() {
        let dir = tempfile::tempdir().expect("a directory");
        let at = |name: &str| dir.path().join(name);
        let mode_of = |name: &str| fs::metadata(at(name)).expect("there").permissions().mode() & 0o7777;
        fs::create_dir(at("inner")).expect("made");
        for (name, mode) in [("inner/key", 0o600), ("program", 0o755), ("", 0o700), ("inner", 0o700)] {
            if !at(name).exists() {
                fs::write(at(name), "").expect("written");
            }
            fs::set_permissions(at(name), fs::Permissions::from_mode(mode)).expect("set");
        }
        std::os::unix::fs::symlink("/nowhere", at("link")).expect("made");
        let group = rustix::process::getegid().as_raw();
        let check = |mode: u32, expected: [u32; 4]| {
            set_group_of_tree(dir.path(), group, mode).expect("given");
            assert_eq!(["", "inner", "inner/key", "program"].map(mode_of), expected);
        };
        check(GROUP_READ_MODE, [0o2750, 0o2750, 0o640, 0o755]);
        check(GROUP_WRITE_MODE, [0o2770, 0o2770, 0o660, 0o775]);
    }

    #[test]
    fn files_with_fixed_group_are_ignored() {
        use std::os::unix::fs::MetadataExt as _;
        // What the kernel shows of a process belongs to it and to nobody else, and comes and goes.
        let proc_dir = Path::new("/proc/self/fdinfo");
        let before = fs::metadata(proc_dir).expect("there").gid();
        set_group_of_tree(proc_dir, before.wrapping_add(1), GROUP_READ_MODE).expect("what can be given is");
        assert_eq!(fs::metadata(proc_dir).expect("there").gid(), before);
        let missing = tempfile::tempdir().expect("a directory").path().join("gone");
        set_group_of_tree(&missing, 0, GROUP_READ_MODE).expect_err("there is nothing to give");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn group_of_deep_volume_is_set_on_a_worker_thread() {
        let dir = tempfile::tempdir().expect("a directory");
        let group = rustix::process::getegid().as_raw();
        let deep = (0..500).fold(dir.path().to_owned(), |path, _| path.join("d"));
        fs::create_dir_all(&deep).expect("made");
        set_group_of_tree(dir.path(), group, GROUP_WRITE_MODE).expect("given");
        assert_eq!(fs::metadata(&deep).expect("there").permissions().mode() & 0o2770, 0o2770);
    }

    #[test]
    fn rejects_sub_path_expressions_outside_the_volume() {
        let mount = VolumeMount { sub_path_expr: Some("$(WHERE)".to_owned()), ..VolumeMount::default() };
        let check = |value: &str, expected: Result<&str, &str>| {
            let found = sub_path_of(&mount, &[("WHERE".to_owned(), value.to_owned())]);
            let found = found.map(|part| part.expect("a part"));
            assert_eq!(found.as_deref().map_err(String::as_str), expected, "{value}");
        };
        check("pod-1", Ok("pod-1"));
        check("/tmp", Err("error SubPath `/tmp` must not be an absolute path"));
        check("a/../..", Err("unable to provision SubPath `a/../..`: must not contain '..'"));
    }
}
