//! The spec that a pod's supervisor applies. All decisions are made when it is created.
//!
//! The sandbox's spec is passed on standard input. Those of containers are JSON files in the
//! containers' directories, since a later skiff process may request the start.

use std::path::PathBuf;

use podnet::Attachment;
use serde::{Deserialize, Serialize};
use sys::cgroup::Limits;

/// The pod sandbox: what its containers share.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sandbox {
    /// Empty keeps the host's.
    pub hostname: String,
    /// The pod is in the host's network namespace.
    pub host_network: bool,
    pub host_ipc: bool,
    /// The containers share a PID namespace.
    pub shared_pids: bool,
    /// `None` in the host's network and with CNI.
    pub network: Option<Attachment>,
    /// Name, such as `net.core.somaxconn`, and value. With CNI they are applied after the plugins have
    /// run.
    pub sysctls: Vec<(String, String)>,
    /// Size of `/dev/shm` in bytes.
    pub shm: u64,
    /// The ID mappings of the pod's user namespace; `None` without one.
    #[serde(default)]
    pub users: Option<UserMap>,
}

/// The ID mappings of a user namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserMap {
    pub uids: Vec<IdRange>,
    pub gids: Vec<IdRange>,
}

/// Maps `length` IDs from `inside` on to those from `outside` on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdRange {
    pub inside: u32,
    pub outside: u32,
    pub length: u32,
}

impl UserMap {
    /// The UID on the host of a UID in the namespace.
    pub fn uid(&self, inside: u32) -> Option<u32> {
        map_id(&self.uids, inside)
    }

    /// The GID on the host of a GID in the namespace.
    pub fn gid(&self, inside: u32) -> Option<u32> {
        map_id(&self.gids, inside)
    }
}

fn map_id(ranges: &[IdRange], inside: u32) -> Option<u32> {
    ranges.iter().find_map(|range| {
        let offset = inside.checked_sub(range.inside).filter(|offset| *offset < range.length)?;
        range.outside.checked_add(offset)
    })
}

/// A container.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Container {
    /// The directory of all layers, and the names of the image's layers in it, lowest first.
    pub layers_dir: PathBuf,
    pub layers: Vec<String>,
    pub args: Vec<String>,
    /// As `NAME=value`.
    pub env: Vec<String>,
    pub cwd: String,
    pub user: User,
    pub read_only: bool,
    pub privileged: bool,
    pub pids: Pids,
    pub mounts: Vec<Mount>,
    /// Mount points of the volumes that the image declares. A volume starts with the image's content at
    /// that path.
    #[serde(default)]
    pub volumes: Vec<String>,
    pub devices: Vec<Device>,
    pub masked: Vec<String>,
    pub read_only_paths: Vec<String>,
    /// Capabilities by number.
    pub capabilities: Vec<u8>,
    pub ambient: Vec<u8>,
    pub no_new_privileges: bool,
    pub seccomp: Seccomp,
    /// The AppArmor profile of its processes.
    pub apparmor: Option<String>,
    /// The SELinux label of its processes.
    #[serde(default)]
    pub selinux: Option<String>,
    pub cgroup: String,
    pub limits: Limits,
    pub oom_score_adj: i64,
    pub stdin: bool,
    pub stdin_once: bool,
    pub tty: bool,
    /// The log file; `None` discards the output.
    pub log: Option<PathBuf>,
    #[serde(default)]
    pub hooks: Vec<Hook>,
}

/// An OCI lifecycle hook.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hook {
    pub stage: Stage,
    pub path: PathBuf,
    /// Including `argv[0]`.
    pub args: Vec<String>,
    /// As `NAME=value`.
    pub env: Vec<String>,
    /// In seconds.
    pub timeout: Option<u32>,
}

/// When and where a hook runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// On the host, after the container's files are mounted; the deprecated form of `CreateRuntime`.
    Prestart,
    CreateRuntime,
    /// An executable of the host, which sees the container's mounts.
    CreateContainer,
    /// An executable of the container, right before the container's own.
    StartContainer,
    /// On the host, after the container's program has started.
    Poststart,
    /// On the host, after the container was removed.
    Poststop,
}

/// The user of a container, resolved with the image's own `/etc/passwd` and `/etc/group`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct User {
    /// `user` or `user:group`, as names or numbers; empty is root.
    pub name: String,
    /// Takes precedence over the group in `name`.
    pub group: Option<u32>,
    pub more_groups: Vec<u32>,
    /// Use only the groups listed here, none from the image's `/etc/group`.
    pub strict_groups: bool,
}

/// The PID namespace of a container.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub enum Pids {
    #[default]
    Own,
    /// The one shared by the containers of the pod.
    Pod,
    Host,
    /// The one of another container of the pod.
    Of(String),
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Mount {
    pub source: PathBuf,
    pub target: String,
    pub read_only: bool,
    pub recursive_read_only: bool,
    pub propagation: Propagation,
    /// Maps the file owners to the pod's user namespace (idmapped mount).
    #[serde(default)]
    pub maps_owners: bool,
    /// Relabel the files with the container's SELinux label.
    #[serde(default)]
    pub is_labelled: bool,
    /// An image to mount instead of `source`.
    #[serde(default)]
    pub image: Option<ImageVolume>,
}

/// An image volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageVolume {
    /// The name of the image.
    pub image: String,
    /// Its layers, lowest first.
    pub layers: Vec<String>,
    /// The path in the image to mount; empty for the whole image.
    pub sub_path: String,
}

impl ImageVolume {
    /// The error for a sub path that cannot be mounted.
    pub fn missing_error(&self, reason: &str) -> String {
        format!(
            "ImageVolumeMountFailed: cannot mount {:?} of the image {:?}: {reason}",
            self.sub_path, self.image
        )
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Propagation {
    #[default]
    Private,
    HostToContainer,
    Bidirectional,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Device {
    pub source: PathBuf,
    pub target: String,
    /// A subset of `rwm`.
    pub access: String,
    /// The properties of the device node; `None` copies the host's.
    #[serde(default)]
    pub made: Option<DeviceNode>,
}

/// The properties of a device node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceNode {
    /// Whether it is a block device, the major and the minor number; `None` takes those of `source`.
    pub numbers: Option<(bool, u32, u32)>,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub enum Seccomp {
    #[default]
    Unconfined,
    Default,
    /// A profile in a file of the node.
    File(PathBuf),
}
