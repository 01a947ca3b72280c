//! A pod's volumes on this node: made before its containers, kept up to date, removed after them.

pub mod claims;
mod content;
mod disk;
mod hosts;
pub mod iscsi;
pub mod memory;
mod nfs;
mod refused;
pub mod sub_path;
mod tools;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _, lchown};
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{Container, EmptyDirVolumeSource, Pod, Secret, Volume, VolumeMount};
use reconcile::{Ctx, Key};
use runtime::cri;

use crate::config::Settings;
use crate::csi::{self, volume::Trouble};
use crate::env::{Addresses, Sources, expand};
use crate::huge_pages;
use crate::payload;
use crate::users;
pub use content::token;

/// What a pod's group may do to volumes and what is in them, and to directories besides: whatever is made there is theirs too.
const READABLE: u32 = 0o440;
const WRITABLE: u32 = 0o660;
const ENTERABLE: u32 = 0o2110;

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

    fn of(volume: &str, trouble: Trouble) -> VolumeError {
        match trouble {
            Trouble::Waits => {
                VolumeError { waits: true, ..VolumeError::new(volume, "it is not attached yet") }
            }
            Trouble::Failed { operation, message } => {
                VolumeError { operation, ..VolumeError::new(volume, message) }
            }
        }
    }
}

/// Where each volume of a pod is on this host.
pub type Places = BTreeMap<String, Place>;

/// The volumes of a pod that are images.
pub type Images = BTreeMap<String, cri::ImageSpec>;

/// A volume on this host.
pub struct Place {
    pub path: PathBuf,
    /// Whoever mounts it may only read.
    pub read_only: bool,
    /// It is a device without a file system.
    pub is_block: bool,
}

/// What volumes are made from.
pub struct Materials<'a> {
    pub ctx: &'a Ctx,
    pub sources: &'a (dyn Sources + Sync),
    pub settings: &'a Settings,
    pub csi: &'a csi::Drivers,
    pub addresses: Addresses<'a>,
    /// What is secret may be mounted, since the runtime sees it.
    pub in_memory: bool,
    /// Nothing of the pod has run yet: what is in its volumes is not its own doing.
    pub is_first: bool,
}

/// Makes every volume that the pod uses, or says which cannot be made and why.
pub async fn set_up(pod: &Pod, materials: &Materials<'_>) -> Result<Places, VolumeError> {
    let mut places = Places::new();
    for volume in used(pod) {
        // Images are the runtime's.
        if volume.image.is_some() {
            continue;
        }
        let failed = |message: String| VolumeError::new(&volume.name, message);
        let place = if let Some(claim) = claims::name(pod, volume) {
            let found = claims::set_up(materials, pod, volume, &claim).await?;
            share(pod, &found, materials).map_err(|message| VolumeError::new(&found.name, message))?;
            Place { path: found.place, read_only: found.read_only, is_block: found.is_block }
        } else if let Some(wanted) = csi::volume::Wanted::inline(pod, volume) {
            let ready = csi::volume::set_up(materials, pod, &wanted).await;
            let ready = ready.map_err(|trouble| VolumeError::of(&volume.name, trouble))?;
            if ready.share && !wanted.read_only && materials.is_first {
                own(&ready.path, pod, WRITABLE).map_err(failed)?;
            }
            Place { path: ready.path, read_only: wanted.read_only, is_block: false }
        } else if let Some(wanted) = iscsi::Wanted::inline(pod, volume) {
            let found = claims::disk(materials, pod, &volume.name, &wanted).await?;
            share(pod, &found, materials).map_err(failed)?;
            Place { path: found.place, read_only: found.read_only, is_block: false }
        } else {
            let path = one(pod, volume, materials).await.map_err(failed)?;
            Place { path, read_only: content::is_in(volume), is_block: false }
        };
        places.insert(volume.name.clone(), place);
    }
    Ok(places)
}

/// The volumes that any of the pod's containers mounts or has as a device. Nobody needs the others, so what they are made
/// from may be missing.
fn used(pod: &Pod) -> impl Iterator<Item = &Volume> {
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
fn share(pod: &Pod, found: &claims::Claimed, materials: &Materials<'_>) -> Result<(), String> {
    let context = pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
    let is_due = found.is_shared && materials.is_first;
    let Some(context) = context.filter(|context| context.fs_group.is_some() && is_due) else {
        return Ok(());
    };
    let group = context.fs_group.and_then(|group| u32::try_from(group).ok());
    let is_theirs = fs::metadata(&found.place).is_ok_and(|known| {
        use std::os::unix::fs::MetadataExt as _;
        Some(known.gid()) == group && known.mode() & 0o2770 == 0o2770
    });
    if is_theirs && context.fs_group_change_policy.as_deref() == Some("OnRootMismatch") {
        return Ok(());
    }
    own(&found.place, pod, WRITABLE)
}

/// What a secret holds that a volume needs to be reached. It is asked for by name, since a node may see no others than those
/// that its own pods lead to.
pub async fn secret_data(
    materials: &Materials<'_>,
    namespace: &str,
    name: &str,
) -> Result<BTreeMap<String, String>, String> {
    let secret = materials.ctx.client.get::<Secret>(&Key::new(namespace, name)).await;
    let data = secret.map_err(|error| error.to_string())?.data.unwrap_or_default().into_iter();
    Ok(data.map(|(key, value)| (key, String::from_utf8_lossy(&value.0).into_owned())).collect())
}

async fn one(pod: &Pod, volume: &Volume, materials: &Materials<'_>) -> Result<PathBuf, String> {
    let dir = |kind: &str| materials.settings.pod_dir(pod).join("volumes").join(kind).join(&volume.name);
    if let Some(host) = &volume.host_path {
        return host_path(&host.path, host.type_.as_deref().unwrap_or_default(), materials.settings);
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
            let of_node = materials.sources.allocatable("memory");
            let of_node = of_node.map_or(materials.settings.memory, |memory| memory.value());
            let size = memory_for(pod, empty, of_node);
            mount(&dir, "tmpfs", &if size > 0 { format!("size={size}") } else { String::new() })?;
        }
        // One for having a look may be the first to use it.
        if materials.is_first || fresh {
            fs::set_permissions(&dir, fs::Permissions::from_mode(0o777))
                .map_err(|error| error.to_string())?;
            own(&dir, pod, WRITABLE)?;
        }
        return Ok(dir);
    }
    if let Some(source) = &volume.nfs {
        let dir = dir("kubernetes.io~nfs");
        nfs::mount(source, &[], &dir).await?;
        return Ok(dir);
    }
    let Some((dir, mut payload)) = content::of(pod, volume, dir, materials).await? else {
        return Err(refused::why(volume));
    };
    if group_of(pod).is_some() {
        // Right from the start, or it would never be as it should.
        payload.values_mut().for_each(|file| file.mode |= READABLE);
    }
    let is_kept_in_memory = materials.in_memory && content::is_kept_in_memory(volume);
    if let Some(around) = dir.parent().filter(|_| is_kept_in_memory) {
        memory::hold(around, users::are_own(pod)).map_err(|error| error.to_string())?;
    }
    payload::write(&dir, &payload, |fresh| own(fresh, pod, READABLE))?;
    if let Some(group) = group_of(pod) {
        let more = fs::Permissions::from_mode(0o755 | READABLE | ENTERABLE);
        let given = lchown(&dir, None, Some(group)).and_then(|()| fs::set_permissions(&dir, more));
        given.map_err(|error| error.to_string())?;
    }
    Ok(dir)
}

/// How much memory a volume may take: no more than all pods of the node may, than the whole pod may, or than it says
/// itself. 0 leaves that to the kernel.
fn memory_for(pod: &Pod, empty: &EmptyDirVolumeSource, of_node: i64) -> i64 {
    let of_pod = crate::cgroups::limits(pod, 0).memory;
    let stated = empty.size_limit.as_ref();
    let stated = stated.and_then(|size| schema::quantity::Quantity::parse(&size.0).ok());
    let limits = [of_node, of_pod, stated.map_or(0, |size| size.value())];
    limits.into_iter().filter(|limit| *limit > 0).min().unwrap_or(0)
}

/// The group that all of a pod's volumes are to belong to.
fn group_of(pod: &Pod) -> Option<u32> {
    let context = pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
    context.and_then(|context| context.fs_group).and_then(|group| u32::try_from(group).ok())
}

/// Gives a volume to the pod's group, where it has one, which may do to it what `mode` says.
fn own(dir: &Path, pod: &Pod, mode: u32) -> Result<(), String> {
    match group_of(pod) {
        Some(group) => own_all(dir, group, mode).map_err(|error| error.to_string()),
        None => Ok(()),
    }
}

/// Gives all there is in a directory to a group, the directory itself last: by that one sees that it is done.
///
/// What cannot be given stays as it is, for its being so may be meant, or it is gone by now.
fn own_all(top: &Path, group: u32, mode: u32) -> std::io::Result<()> {
    use tokio::runtime::{Handle, RuntimeFlavor};
    let all = || -> std::io::Result<()> {
        let (mut refused, mut count) = (None, 0);
        let mut give = |path: &Path, known: &fs::Metadata| {
            if let Err(error) = own_one(path, known, group, mode) {
                count += 1;
                refused.get_or_insert_with(|| (path.to_owned(), error));
            }
        };
        let known = fs::symlink_metadata(top)?;
        let mut dirs = if known.is_dir() { vec![top.to_owned()] } else { Vec::new() };
        while let Some(dir) = dirs.pop() {
            for entry in unless_gone(fs::read_dir(&dir))?.into_iter().flatten() {
                let path = entry?.path();
                let Some(known) = unless_gone(fs::symlink_metadata(&path))? else { continue };
                give(&path, &known);
                if known.is_dir() {
                    dirs.push(path);
                }
            }
        }
        give(top, &known);
        if let Some((path, error)) = refused {
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

fn own_one(path: &Path, known: &fs::Metadata, group: u32, mode: u32) -> std::io::Result<()> {
    let given = lchown(path, None, Some(group));
    if known.is_symlink() {
        return given;
    }
    let more = if known.is_dir() { mode | ENTERABLE } else { mode };
    fs::set_permissions(path, fs::Permissions::from_mode(known.permissions().mode() | more)).and(given)
}

fn unless_gone<T>(found: std::io::Result<T>) -> std::io::Result<Option<T>> {
    match found {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        found => found.map(Some),
    }
}

fn host_path(path: &str, kind: &str, settings: &Settings) -> Result<PathBuf, String> {
    let place = settings.host_path(Path::new(path));
    let found = fs::metadata(&place).ok();
    let is = |check: fn(&fs::FileType) -> bool| found.as_ref().is_some_and(|found| check(&found.file_type()));
    match kind {
        "DirectoryOrCreate" if found.is_none() => {
            fs::create_dir_all(&place).map_err(|error| error.to_string())?
        }
        "FileOrCreate" if found.is_none() => fs::write(&place, "").map_err(|error| error.to_string())?,
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
        "" if found.is_none() => fs::create_dir_all(&place).map_err(|error| error.to_string())?,
        _ => {}
    }
    Ok(place)
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
pub struct Mounted<'a> {
    pub attempt: u32,
    pub places: &'a Places,
    pub images: &'a Images,
    pub env: &'a [(String, String)],
}

/// The mounts of all containers of a pod.
pub fn all_mounts(pod: &Pod) -> impl Iterator<Item = &VolumeMount> {
    let spec = pod.spec.as_ref();
    let inits = spec.and_then(|spec| spec.init_containers.as_ref()).into_iter().flatten();
    let looks = spec.and_then(|spec| spec.ephemeral_containers.as_ref()).into_iter().flatten();
    let own = inits.chain(spec.into_iter().flat_map(|spec| &spec.containers));
    let mounts = own.map(|one| &one.volume_mounts).chain(looks.map(|one| &one.volume_mounts));
    mounts.flatten().flatten()
}

/// Whether all that is mounted below is to be read only as well, on a node whose runtime can do that or not.
pub fn is_recursively_read_only(mount: &VolumeMount, can: bool) -> Result<bool, String> {
    match mount.recursive_read_only.as_deref() {
        Some("Enabled") if !can => Err(format!(
            "volume {:?} requested recursive read-only mount, but it is not supported by the runtime",
            mount.name
        )),
        Some("Enabled") => Ok(true),
        Some("IfPossible") => Ok(can && mount.read_only == Some(true)),
        _ => Ok(false),
    }
}

/// The mounts of a container: its volumes, the hosts file and the file for its last words.
pub fn mounts(
    pod: &Pod,
    container: &Container,
    mounted: &Mounted<'_>,
    recursive: bool,
    settings: &Settings,
) -> Result<Vec<cri::Mount>, VolumeError> {
    let Mounted { attempt, places, images, env } = *mounted;
    let mut mounts = Vec::new();
    let has_labels = Path::new("/sys/fs/selinux/enforce").exists();
    for (at, mount) in container.volume_mounts.iter().flatten().enumerate() {
        let failed = |message: String| VolumeError::new(&mount.name, message);
        let part = part_of(mount, env).map_err(failed)?;
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
        let place = places.get(&mount.name).ok_or_else(|| failed("there is no such volume".into()))?;
        if place.is_block {
            let why = format!("volume {} has volumeMode Block, but is specified in volumeMounts", mount.name);
            return Err(failed(why));
        }
        let path = match part {
            Some(part) => {
                let bound = settings.pod_dir(pod).join("volume-subpaths").join(&mount.name);
                let bound = bound.join(&container.name).join(at.to_string());
                sub_path::bind(&place.path, &part, &bound).map_err(failed)?
            }
            None => place.path.clone(),
        };
        let propagation = match mount.mount_propagation.as_deref() {
            Some("HostToContainer") => cri::MountPropagation::HostToContainer,
            Some("Bidirectional") => cri::MountPropagation::Bidirectional,
            _ => cri::MountPropagation::Private,
        };
        mounts.push(cri::Mount {
            container_path: mount.mount_path.clone(),
            host_path: path.display().to_string(),
            readonly: place.read_only || mount.read_only == Some(true),
            recursive_read_only: is_recursively_read_only(mount, recursive).map_err(failed)?,
            propagation: propagation.into(),
            selinux_relabel: has_labels && is_ours(pod, &mount.name),
            ..cri::Mount::default()
        });
    }
    add_real_paths(&mut mounts, settings);
    let mounted = |mounts: &[cri::Mount], path: &str| mounts.iter().any(|mount| mount.container_path == path);
    let file = |name: PathBuf, target: &str| cri::Mount {
        container_path: target.to_owned(),
        host_path: name.display().to_string(),
        selinux_relabel: has_labels,
        ..cri::Mount::default()
    };
    if !mounted(&mounts, hosts::HOSTS) {
        mounts.push(file(settings.pod_dir(pod).join(hosts::FILE), hosts::HOSTS));
    }
    let words = container.termination_message_path.as_deref().unwrap_or("/dev/termination-log");
    if !mounted(&mounts, words) {
        mounts.push(file(last_words(pod, &container.name, attempt, settings), words));
    }
    Ok(mounts)
}

/// Shows the node's kubelet directory under its own path as well to those who mount it at the usual one: the paths of
/// volumes that drivers are given are the host's.
fn add_real_paths(mounts: &mut Vec<cri::Mount>, settings: &Settings) {
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
fn is_ours(pod: &Pod, name: &str) -> bool {
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
pub fn devices(container: &Container, places: &Places) -> Result<Vec<cri::Device>, VolumeError> {
    let devices = container.volume_devices.iter().flatten().map(|device| {
        let failed = |message: String| VolumeError::new(&device.name, message);
        let place = places.get(&device.name).ok_or_else(|| failed("there is no such volume".into()))?;
        if !place.is_block {
            let why = format!(
                "volume {} has volumeMode Filesystem, but is specified in volumeDevices",
                device.name
            );
            return Err(failed(why));
        }
        Ok(cri::Device {
            container_path: device.device_path.clone(),
            host_path: place.path.display().to_string(),
            permissions: if place.read_only { "r" } else { "mrw" }.to_owned(),
        })
    });
    devices.collect()
}

/// Where a run of a container leaves its last words.
pub fn last_words(pod: &Pod, container: &str, attempt: u32, settings: &Settings) -> PathBuf {
    settings.pod_dir(pod).join("containers").join(container).join(attempt.to_string())
}

/// When the first of the pod's tokens is to be renewed.
pub fn stale_from(pod: &Pod, settings: &Settings) -> Option<jiff::Timestamp> {
    let dir = settings.pod_dir(pod).join("volumes/kubernetes.io~projected");
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let sources = volumes.flat_map(|volume| {
        let sources = volume.projected.iter().flat_map(|projected| projected.sources.iter().flatten());
        sources.map(move |source| (&volume.name, source))
    });
    let times = sources.filter_map(|(volume, source)| {
        let wanted = source.service_account_token.as_ref()?;
        let made = fs::metadata(dir.join(volume).join(&wanted.path)).ok()?.modified().ok()?;
        let made = jiff::Timestamp::try_from(made).ok()?;
        let seconds = content::keeps(wanted.expiration_seconds.unwrap_or(3607)) + 1;
        made.checked_add(jiff::SignedDuration::from_secs(seconds)).ok()
    });
    times.min()
}

/// The part of a volume that is mounted, if not all.
fn part_of(mount: &VolumeMount, env: &[(String, String)]) -> Result<Option<String>, String> {
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
pub fn write_files(
    pod: &Pod,
    container: &Container,
    attempt: u32,
    settings: &Settings,
    ips: &[String],
) -> std::io::Result<()> {
    let dir = settings.pod_dir(pod);
    let words = last_words(pod, &container.name, attempt, settings);
    fs::create_dir_all(words.parent().unwrap_or(&dir))?;
    fs::write(&words, "")?;
    fs::set_permissions(&words, fs::Permissions::from_mode(0o666))?;
    hosts::write(pod, settings, ips)
}

/// Removes the volumes of a pod, and all else that is in its directory.
pub fn clear(uid: &str, settings: &Settings) -> std::io::Result<()> {
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
    fn a_directory_alone_is_no_mount() {
        let dir = tempfile::tempdir().expect("a directory");
        assert!(is_mount(Path::new("/proc")) && !is_mount(Path::new("/proc/1")));
        assert!(!is_mount(&dir.path().join("none")));
        std::fs::create_dir(dir.path().join("some")).expect("made");
        assert!(!is_mount(&dir.path().join("some")), "what was to be mounted there was not");
    }

    #[test]
    fn read_only_all_the_way_down() {
        let check = |how: Option<&str>, can, expected: Result<bool, &str>| {
            let mount = VolumeMount {
                name: "v".to_owned(),
                read_only: Some(true),
                recursive_read_only: how.map(str::to_owned),
                ..VolumeMount::default()
            };
            assert_eq!(
                is_recursively_read_only(&mount, can),
                expected.map_err(str::to_owned),
                "{how:?} {can}"
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
    fn only_what_is_used_is_made() {
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
        let names: Vec<&str> = used(&pod).map(|volume| volume.name.as_str()).collect();
        assert_eq!(names, ["main", "init", "look", "disk"]);
    }

    #[test]
    fn memory_is_limited_by_whoever_has_least() {
        let check = |limits: [Option<&str>; 2], stated: Option<&str>, expected: i64| {
            let one = |limit: &Option<&str>| match limit {
                Some(limit) => json!({"name": "c", "resources": {"limits": {"memory": limit}}}),
                None => json!({"name": "c"}),
            };
            let pod = pod(json!({"containers": limits.iter().map(one).collect::<Vec<_>>()}));
            let empty = serde_json::from_value(json!({"medium": "Memory", "sizeLimit": stated}));
            assert_eq!(
                memory_for(&pod, &empty.expect("a volume"), 1 << 30),
                expected,
                "{limits:?} {stated:?}"
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
            let place = Place { path: "/v".into(), read_only: false, is_block: false };
            let places = Places::from([("v".to_owned(), place)]);
            let mounted = Mounted { attempt: 0, places: &places, images: &Images::new(), env: &[] };
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
            let place = Place { path, read_only: false, is_block: false };
            let places = Places::from([("v".to_owned(), place)]);
            let mounts = mounts
                .iter()
                .map(|path| json!({"name": "v", "mountPath": path, "mountPropagation": "Bidirectional"}));
            let container = json!({"name": "c", "volumeMounts": mounts.collect::<Vec<_>>()});
            let pod = pod(json!({"containers": [container]}));
            let mounted = Mounted { attempt: 0, places: &places, images: &Images::new(), env: &[] };
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

    fn mounts_of(pod: &Pod, mounted: &Mounted<'_>, settings: &Settings) -> Vec<cri::Mount> {
        let container = &crate::pod::containers(pod)[0];
        mounts(pod, container, mounted, false, settings).expect("mounts")
    }

    #[test]
    fn a_group_gets_all_there_is() {
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
            own_all(dir.path(), group, mode).expect("given");
            assert_eq!(["", "inner", "inner/key", "program"].map(mode_of), expected);
        };
        check(READABLE, [0o2750, 0o2750, 0o640, 0o755]);
        check(WRITABLE, [0o2770, 0o2770, 0o660, 0o775]);
    }

    #[test]
    fn what_cannot_be_given_is_no_reason_to_do_without_a_volume() {
        use std::os::unix::fs::MetadataExt as _;
        // What the kernel shows of a process belongs to it and to nobody else, and comes and goes.
        let of_the_kernel = Path::new("/proc/self/fdinfo");
        let before = fs::metadata(of_the_kernel).expect("there").gid();
        own_all(of_the_kernel, before.wrapping_add(1), READABLE).expect("what can be given is");
        assert_eq!(fs::metadata(of_the_kernel).expect("there").gid(), before);
        let gone = tempfile::tempdir().expect("a directory").path().join("gone");
        own_all(&gone, 0, READABLE).expect_err("there is nothing to give");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_deep_volume_is_given_on_a_worker() {
        let dir = tempfile::tempdir().expect("a directory");
        let group = rustix::process::getegid().as_raw();
        let deep = (0..500).fold(dir.path().to_owned(), |path, _| path.join("d"));
        fs::create_dir_all(&deep).expect("made");
        own_all(dir.path(), group, WRITABLE).expect("given");
        assert_eq!(fs::metadata(&deep).expect("there").permissions().mode() & 0o2770, 0o2770);
    }

    #[test]
    fn an_expression_may_not_name_another_place() {
        let mount = VolumeMount { sub_path_expr: Some("$(WHERE)".to_owned()), ..VolumeMount::default() };
        let check = |value: &str, expected: Result<&str, &str>| {
            let found = part_of(&mount, &[("WHERE".to_owned(), value.to_owned())]);
            let found = found.map(|part| part.expect("a part"));
            assert_eq!(found.as_deref().map_err(String::as_str), expected, "{value}");
        };
        check("pod-1", Ok("pod-1"));
        check("/tmp", Err("error SubPath `/tmp` must not be an absolute path"));
        check("a/../..", Err("unable to provision SubPath `a/../..`: must not contain '..'"));
    }
}
