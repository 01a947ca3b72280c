//! What the supervisor of a pod is told: everything is decided before, it only carries out.
//!
//! That of a pod comes on its standard input. Those of containers are JSON files in their directories, since whoever asks
//! for one may be a later skiff.

use std::path::PathBuf;

use podnet::Attachment;
use serde::{Deserialize, Serialize};
use sys::cgroup::Limits;

/// What the containers of a pod share.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sandbox {
    /// Empty leaves the host's.
    pub hostname: String,
    /// No network namespace of its own.
    pub host_network: bool,
    pub host_ipc: bool,
    /// The containers see each other's processes.
    pub shared_pids: bool,
    /// None for one in the host's network.
    pub network: Option<Attachment>,
    /// Name and value, as in `net.core.somaxconn`; set later where CNI's programs make the network.
    pub sysctls: Vec<(String, String)>,
    /// Bytes of `/dev/shm`.
    pub shm: u64,
    /// Whom its users are outside; none where they are the same.
    #[serde(default)]
    pub users: Option<UserMap>,
}

/// Which users and groups of the host those inside a pod are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserMap {
    pub uids: Vec<IdRange>,
    pub gids: Vec<IdRange>,
}

/// So many numbers from `inside` on are those from `outside` on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdRange {
    pub inside: u32,
    pub outside: u32,
    pub length: u32,
}

impl UserMap {
    /// The number that a user has outside.
    pub fn uid(&self, inside: u32) -> Option<u32> {
        map_id(&self.uids, inside)
    }

    /// The number that a group has outside.
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

/// One run of a container.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Container {
    /// The directory of all layers, and the names of this image's in it, lowest first.
    pub layers_dir: PathBuf,
    pub layers: Vec<String>,
    pub args: Vec<String>,
    /// `NAME=value`.
    pub env: Vec<String>,
    pub cwd: String,
    pub user: User,
    pub read_only: bool,
    pub privileged: bool,
    pub pids: Pids,
    pub mounts: Vec<Mount>,
    /// Where there are directories of the container's own, which begin with what the image has there.
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
    /// The profile of AppArmor it is confined by.
    pub apparmor: Option<String>,
    /// The label of SELinux its processes have.
    #[serde(default)]
    pub selinux: Option<String>,
    pub cgroup: String,
    pub limits: Limits,
    pub oom_score_adj: i64,
    pub stdin: bool,
    pub stdin_once: bool,
    pub tty: bool,
    /// Where its output goes; none keeps it nowhere.
    pub log: Option<PathBuf>,
    #[serde(default)]
    pub hooks: Vec<Hook>,
}

/// A program that has a part in a container's life.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hook {
    pub stage: Stage,
    pub path: PathBuf,
    /// With its name.
    pub args: Vec<String>,
    /// `NAME=value`.
    pub env: Vec<String>,
    /// Seconds.
    pub timeout: Option<u32>,
}

/// When a hook is run, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// Outside, when the container's files are mounted: the older word for the next.
    Prestart,
    CreateRuntime,
    /// A program of the host's that sees the container's mounts.
    CreateContainer,
    /// A program of the container's, right before its own.
    StartContainer,
    /// Outside, when its program runs.
    Poststart,
    /// Outside, when it is removed.
    Poststop,
}

/// Who it runs as, to be looked up in the image's own files.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct User {
    /// `user`, `user:group`, names or numbers; empty is root.
    pub name: String,
    /// Wins over the group in the name.
    pub group: Option<u32>,
    pub more_groups: Vec<u32>,
    /// Only the groups named here, none that the image's files add.
    pub strict_groups: bool,
}

/// Which processes it sees.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub enum Pids {
    #[default]
    Own,
    /// Those of all containers of the pod.
    Pod,
    Host,
    /// Those of another container of the pod.
    Of(String),
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Mount {
    pub source: PathBuf,
    pub target: String,
    pub read_only: bool,
    pub recursive_read_only: bool,
    pub propagation: Propagation,
    /// Its owners are meant as they are inside, in a pod with users of its own.
    #[serde(default)]
    pub maps_owners: bool,
    /// Its files get the container's label of SELinux.
    #[serde(default)]
    pub is_labelled: bool,
    /// An image instead of a source.
    #[serde(default)]
    pub image: Option<ImageVolume>,
}

/// An image as a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageVolume {
    /// What it is called.
    pub image: String,
    /// Its layers, lowest first.
    pub layers: Vec<String>,
    /// The part that is wanted; empty for all.
    pub sub_path: String,
}

impl ImageVolume {
    /// The words for a part that is not in there.
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
    /// Some of `rwm`.
    pub access: String,
    /// How it is made, where that is not as the host has it.
    #[serde(default)]
    pub made: Option<DeviceNode>,
}

/// What is said of a device beside where it is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceNode {
    /// Whether it is a block device, its major and its minor number; those of the source where nothing is said.
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
