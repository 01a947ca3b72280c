//! Container messages: configuration, status, exec and attach requests, events.

use std::collections::BTreeMap;

use super::*;

#[derive(Clone, PartialEq, prost::Message)]
pub struct Mount {
    #[prost(string, tag = 1)]
    pub container_path: String,
    #[prost(string, tag = 2)]
    pub host_path: String,
    #[prost(bool, tag = 3)]
    pub readonly: bool,
    #[prost(bool, tag = 4)]
    pub selinux_relabel: bool,
    #[prost(enumeration = "MountPropagation", tag = 5)]
    pub propagation: i32,
    #[prost(message, repeated, tag = 6)]
    pub uid_mappings: Vec<IdMapping>,
    #[prost(message, repeated, tag = 7)]
    pub gid_mappings: Vec<IdMapping>,
    #[prost(bool, tag = 8)]
    pub recursive_read_only: bool,
    #[prost(message, optional, tag = 9)]
    pub image: Option<ImageSpec>,
    #[prost(string, tag = 10)]
    pub image_sub_path: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct LinuxContainerResources {
    #[prost(int64, tag = 1)]
    pub cpu_period: i64,
    #[prost(int64, tag = 2)]
    pub cpu_quota: i64,
    #[prost(int64, tag = 3)]
    pub cpu_shares: i64,
    #[prost(int64, tag = 4)]
    pub memory_limit_in_bytes: i64,
    #[prost(int64, tag = 5)]
    pub oom_score_adj: i64,
    #[prost(string, tag = 6)]
    pub cpuset_cpus: String,
    #[prost(string, tag = 7)]
    pub cpuset_mems: String,
    #[prost(message, repeated, tag = 8)]
    pub hugepage_limits: Vec<HugepageLimit>,
    #[prost(btree_map = "string, string", tag = 9)]
    pub unified: BTreeMap<String, String>,
    #[prost(int64, tag = 10)]
    pub memory_swap_limit_in_bytes: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct HugepageLimit {
    #[prost(string, tag = 1)]
    pub page_size: String,
    #[prost(uint64, tag = 2)]
    pub limit: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Capability {
    #[prost(string, repeated, tag = 1)]
    pub add_capabilities: Vec<String>,
    #[prost(string, repeated, tag = 2)]
    pub drop_capabilities: Vec<String>,
    #[prost(string, repeated, tag = 3)]
    pub add_ambient_capabilities: Vec<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct LinuxContainerSecurityContext {
    #[prost(message, optional, tag = 1)]
    pub capabilities: Option<Capability>,
    #[prost(bool, tag = 2)]
    pub privileged: bool,
    #[prost(message, optional, tag = 3)]
    pub namespace_options: Option<NamespaceOption>,
    #[prost(message, optional, tag = 4)]
    pub selinux_options: Option<SelinuxOption>,
    #[prost(message, optional, tag = 5)]
    pub run_as_user: Option<Int64Value>,
    #[prost(message, optional, tag = 12)]
    pub run_as_group: Option<Int64Value>,
    #[prost(string, tag = 6)]
    pub run_as_username: String,
    #[prost(bool, tag = 7)]
    pub readonly_rootfs: bool,
    #[prost(int64, repeated, tag = 8)]
    pub supplemental_groups: Vec<i64>,
    #[prost(enumeration = "SupplementalGroupsPolicy", tag = 17)]
    pub supplemental_groups_policy: i32,
    #[prost(bool, tag = 11)]
    pub no_new_privs: bool,
    #[prost(string, repeated, tag = 13)]
    pub masked_paths: Vec<String>,
    #[prost(string, repeated, tag = 14)]
    pub readonly_paths: Vec<String>,
    #[prost(message, optional, tag = 15)]
    pub seccomp: Option<SecurityProfile>,
    #[prost(message, optional, tag = 16)]
    pub apparmor: Option<SecurityProfile>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct LinuxContainerConfig {
    #[prost(message, optional, tag = 1)]
    pub resources: Option<LinuxContainerResources>,
    #[prost(message, optional, tag = 2)]
    pub security_context: Option<LinuxContainerSecurityContext>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerMetadata {
    #[prost(string, tag = 1)]
    pub name: String,
    #[prost(uint32, tag = 2)]
    pub attempt: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Device {
    #[prost(string, tag = 1)]
    pub container_path: String,
    #[prost(string, tag = 2)]
    pub host_path: String,
    #[prost(string, tag = 3)]
    pub permissions: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerConfig {
    #[prost(message, optional, tag = 1)]
    pub metadata: Option<ContainerMetadata>,
    #[prost(message, optional, tag = 2)]
    pub image: Option<ImageSpec>,
    #[prost(string, repeated, tag = 3)]
    pub command: Vec<String>,
    #[prost(string, repeated, tag = 4)]
    pub args: Vec<String>,
    #[prost(string, tag = 5)]
    pub working_dir: String,
    #[prost(message, repeated, tag = 6)]
    pub envs: Vec<KeyValue>,
    #[prost(message, repeated, tag = 7)]
    pub mounts: Vec<Mount>,
    #[prost(message, repeated, tag = 8)]
    pub devices: Vec<Device>,
    #[prost(btree_map = "string, string", tag = 9)]
    pub labels: BTreeMap<String, String>,
    #[prost(btree_map = "string, string", tag = 10)]
    pub annotations: BTreeMap<String, String>,
    #[prost(string, tag = 11)]
    pub log_path: String,
    #[prost(bool, tag = 12)]
    pub stdin: bool,
    #[prost(bool, tag = 13)]
    pub stdin_once: bool,
    #[prost(bool, tag = 14)]
    pub tty: bool,
    #[prost(message, optional, tag = 15)]
    pub linux: Option<LinuxContainerConfig>,
    #[prost(message, repeated, tag = 17)]
    pub cdi_devices: Vec<CdiDevice>,
}

/// A CDI device by its fully qualified name, such as `example.com/gpu=0`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CdiDevice {
    #[prost(string, tag = 1)]
    pub name: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct CreateContainerRequest {
    #[prost(string, tag = 1)]
    pub pod_sandbox_id: String,
    #[prost(message, optional, tag = 2)]
    pub config: Option<ContainerConfig>,
    #[prost(message, optional, tag = 3)]
    pub sandbox_config: Option<PodSandboxConfig>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct CreateContainerResponse {
    #[prost(string, tag = 1)]
    pub container_id: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerFilter {
    #[prost(string, tag = 1)]
    pub id: String,
    #[prost(message, optional, tag = 2)]
    pub state: Option<StateValue>,
    #[prost(string, tag = 3)]
    pub pod_sandbox_id: String,
    #[prost(btree_map = "string, string", tag = 4)]
    pub label_selector: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ListContainersRequest {
    #[prost(message, optional, tag = 1)]
    pub filter: Option<ContainerFilter>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Container {
    #[prost(string, tag = 1)]
    pub id: String,
    #[prost(string, tag = 2)]
    pub pod_sandbox_id: String,
    #[prost(message, optional, tag = 3)]
    pub metadata: Option<ContainerMetadata>,
    #[prost(message, optional, tag = 4)]
    pub image: Option<ImageSpec>,
    #[prost(string, tag = 5)]
    pub image_ref: String,
    #[prost(enumeration = "ContainerState", tag = 6)]
    pub state: i32,
    #[prost(int64, tag = 7)]
    pub created_at: i64,
    #[prost(btree_map = "string, string", tag = 8)]
    pub labels: BTreeMap<String, String>,
    #[prost(btree_map = "string, string", tag = 9)]
    pub annotations: BTreeMap<String, String>,
    #[prost(string, tag = 10)]
    pub image_id: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ListContainersResponse {
    #[prost(message, repeated, tag = 1)]
    pub containers: Vec<Container>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerStatusRequest {
    #[prost(string, tag = 1)]
    pub container_id: String,
    #[prost(bool, tag = 2)]
    pub verbose: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerStatus {
    #[prost(string, tag = 1)]
    pub id: String,
    #[prost(message, optional, tag = 2)]
    pub metadata: Option<ContainerMetadata>,
    #[prost(enumeration = "ContainerState", tag = 3)]
    pub state: i32,
    #[prost(int64, tag = 4)]
    pub created_at: i64,
    #[prost(int64, tag = 5)]
    pub started_at: i64,
    #[prost(int64, tag = 6)]
    pub finished_at: i64,
    #[prost(int32, tag = 7)]
    pub exit_code: i32,
    #[prost(message, optional, tag = 8)]
    pub image: Option<ImageSpec>,
    #[prost(string, tag = 9)]
    pub image_ref: String,
    #[prost(string, tag = 10)]
    pub reason: String,
    #[prost(string, tag = 11)]
    pub message: String,
    #[prost(btree_map = "string, string", tag = 12)]
    pub labels: BTreeMap<String, String>,
    #[prost(btree_map = "string, string", tag = 13)]
    pub annotations: BTreeMap<String, String>,
    #[prost(message, repeated, tag = 14)]
    pub mounts: Vec<Mount>,
    #[prost(string, tag = 15)]
    pub log_path: String,
    #[prost(message, optional, tag = 16)]
    pub resources: Option<ContainerResources>,
    #[prost(string, tag = 17)]
    pub image_id: String,
    #[prost(message, optional, tag = 18)]
    pub user: Option<ContainerUser>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerResources {
    #[prost(message, optional, tag = 1)]
    pub linux: Option<LinuxContainerResources>,
}

/// The user and groups that the container's first process started with.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerUser {
    #[prost(message, optional, tag = 1)]
    pub linux: Option<LinuxContainerUser>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct LinuxContainerUser {
    #[prost(int64, tag = 1)]
    pub uid: i64,
    #[prost(int64, tag = 2)]
    pub gid: i64,
    #[prost(int64, repeated, tag = 3)]
    pub supplemental_groups: Vec<i64>,
}
#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerStatusResponse {
    #[prost(message, optional, tag = 1)]
    pub status: Option<ContainerStatus>,
    #[prost(btree_map = "string, string", tag = 2)]
    pub info: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct UpdateContainerResourcesRequest {
    #[prost(string, tag = 1)]
    pub container_id: String,
    #[prost(message, optional, tag = 2)]
    pub linux: Option<LinuxContainerResources>,
    #[prost(btree_map = "string, string", tag = 4)]
    pub annotations: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ExecSyncRequest {
    #[prost(string, tag = 1)]
    pub container_id: String,
    #[prost(string, repeated, tag = 2)]
    pub cmd: Vec<String>,
    #[prost(int64, tag = 3)]
    pub timeout: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ExecSyncResponse {
    #[prost(bytes = "vec", tag = 1)]
    pub stdout: Vec<u8>,
    #[prost(bytes = "vec", tag = 2)]
    pub stderr: Vec<u8>,
    #[prost(int32, tag = 3)]
    pub exit_code: i32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ExecRequest {
    #[prost(string, tag = 1)]
    pub container_id: String,
    #[prost(string, repeated, tag = 2)]
    pub cmd: Vec<String>,
    #[prost(bool, tag = 3)]
    pub tty: bool,
    #[prost(bool, tag = 4)]
    pub stdin: bool,
    #[prost(bool, tag = 5)]
    pub stdout: bool,
    #[prost(bool, tag = 6)]
    pub stderr: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct AttachRequest {
    #[prost(string, tag = 1)]
    pub container_id: String,
    #[prost(bool, tag = 2)]
    pub stdin: bool,
    #[prost(bool, tag = 3)]
    pub tty: bool,
    #[prost(bool, tag = 4)]
    pub stdout: bool,
    #[prost(bool, tag = 5)]
    pub stderr: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct StopContainerRequest {
    #[prost(string, tag = 1)]
    pub container_id: String,
    #[prost(int64, tag = 2)]
    pub timeout: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerEventResponse {
    #[prost(string, tag = 1)]
    pub container_id: String,
    #[prost(enumeration = "ContainerEventType", tag = 2)]
    pub container_event_type: i32,
    #[prost(int64, tag = 3)]
    pub created_at: i64,
    #[prost(message, optional, tag = 4)]
    pub pod_sandbox_status: Option<PodSandboxStatus>,
    #[prost(message, repeated, tag = 5)]
    pub containers_statuses: Vec<ContainerStatus>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum ContainerEventType {
    Created = 0,
    Started = 1,
    Stopped = 2,
    Deleted = 3,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum ContainerState {
    Created = 0,
    Running = 1,
    Exited = 2,
    Unknown = 3,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum MountPropagation {
    Private = 0,
    HostToContainer = 1,
    Bidirectional = 2,
}
