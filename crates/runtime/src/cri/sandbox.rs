//! Pod sandbox messages: configuration, status, port forwarding.

use std::collections::BTreeMap;

use super::*;

#[derive(Clone, PartialEq, prost::Message)]
pub struct DnsConfig {
    #[prost(string, repeated, tag = 1)]
    pub servers: Vec<String>,
    #[prost(string, repeated, tag = 2)]
    pub searches: Vec<String>,
    #[prost(string, repeated, tag = 3)]
    pub options: Vec<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct PortMapping {
    #[prost(enumeration = "Protocol", tag = 1)]
    pub protocol: i32,
    #[prost(int32, tag = 2)]
    pub container_port: i32,
    #[prost(int32, tag = 3)]
    pub host_port: i32,
    #[prost(string, tag = 4)]
    pub host_ip: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct IdMapping {
    #[prost(uint32, tag = 1)]
    pub host_id: u32,
    #[prost(uint32, tag = 2)]
    pub container_id: u32,
    #[prost(uint32, tag = 3)]
    pub length: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct UserNamespace {
    #[prost(enumeration = "NamespaceMode", tag = 1)]
    pub mode: i32,
    #[prost(message, repeated, tag = 2)]
    pub uids: Vec<IdMapping>,
    #[prost(message, repeated, tag = 3)]
    pub gids: Vec<IdMapping>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct NamespaceOption {
    #[prost(enumeration = "NamespaceMode", tag = 1)]
    pub network: i32,
    #[prost(enumeration = "NamespaceMode", tag = 2)]
    pub pid: i32,
    #[prost(enumeration = "NamespaceMode", tag = 3)]
    pub ipc: i32,
    #[prost(string, tag = 4)]
    pub target_id: String,
    #[prost(message, optional, tag = 5)]
    pub userns_options: Option<UserNamespace>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct LinuxSandboxSecurityContext {
    #[prost(message, optional, tag = 1)]
    pub namespace_options: Option<NamespaceOption>,
    #[prost(message, optional, tag = 2)]
    pub selinux_options: Option<SelinuxOption>,
    #[prost(message, optional, tag = 3)]
    pub run_as_user: Option<Int64Value>,
    #[prost(message, optional, tag = 8)]
    pub run_as_group: Option<Int64Value>,
    #[prost(bool, tag = 4)]
    pub readonly_rootfs: bool,
    #[prost(int64, repeated, tag = 5)]
    pub supplemental_groups: Vec<i64>,
    #[prost(enumeration = "SupplementalGroupsPolicy", tag = 11)]
    pub supplemental_groups_policy: i32,
    #[prost(bool, tag = 6)]
    pub privileged: bool,
    #[prost(message, optional, tag = 9)]
    pub seccomp: Option<SecurityProfile>,
    #[prost(message, optional, tag = 10)]
    pub apparmor: Option<SecurityProfile>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct SecurityProfile {
    #[prost(enumeration = "ProfileType", tag = 1)]
    pub profile_type: i32,
    #[prost(string, tag = 2)]
    pub localhost_ref: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct LinuxPodSandboxConfig {
    #[prost(string, tag = 1)]
    pub cgroup_parent: String,
    #[prost(message, optional, tag = 2)]
    pub security_context: Option<LinuxSandboxSecurityContext>,
    #[prost(btree_map = "string, string", tag = 3)]
    pub sysctls: BTreeMap<String, String>,
    #[prost(message, optional, tag = 4)]
    pub overhead: Option<LinuxContainerResources>,
    #[prost(message, optional, tag = 5)]
    pub resources: Option<LinuxContainerResources>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct PodSandboxMetadata {
    #[prost(string, tag = 1)]
    pub name: String,
    #[prost(string, tag = 2)]
    pub uid: String,
    #[prost(string, tag = 3)]
    pub namespace: String,
    #[prost(uint32, tag = 4)]
    pub attempt: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct PodSandboxConfig {
    #[prost(message, optional, tag = 1)]
    pub metadata: Option<PodSandboxMetadata>,
    #[prost(string, tag = 2)]
    pub hostname: String,
    #[prost(string, tag = 3)]
    pub log_directory: String,
    #[prost(message, optional, tag = 4)]
    pub dns_config: Option<DnsConfig>,
    #[prost(message, repeated, tag = 5)]
    pub port_mappings: Vec<PortMapping>,
    #[prost(btree_map = "string, string", tag = 6)]
    pub labels: BTreeMap<String, String>,
    #[prost(btree_map = "string, string", tag = 7)]
    pub annotations: BTreeMap<String, String>,
    #[prost(message, optional, tag = 8)]
    pub linux: Option<LinuxPodSandboxConfig>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct RunPodSandboxRequest {
    #[prost(message, optional, tag = 1)]
    pub config: Option<PodSandboxConfig>,
    #[prost(string, tag = 2)]
    pub runtime_handler: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct RunPodSandboxResponse {
    #[prost(string, tag = 1)]
    pub pod_sandbox_id: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct PodSandboxStatusRequest {
    #[prost(string, tag = 1)]
    pub pod_sandbox_id: String,
    #[prost(bool, tag = 2)]
    pub verbose: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct PodIp {
    #[prost(string, tag = 1)]
    pub ip: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct PodSandboxNetworkStatus {
    #[prost(string, tag = 1)]
    pub ip: String,
    #[prost(message, repeated, tag = 2)]
    pub additional_ips: Vec<PodIp>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct PodSandboxStatus {
    #[prost(string, tag = 1)]
    pub id: String,
    #[prost(message, optional, tag = 2)]
    pub metadata: Option<PodSandboxMetadata>,
    #[prost(enumeration = "PodSandboxState", tag = 3)]
    pub state: i32,
    #[prost(int64, tag = 4)]
    pub created_at: i64,
    #[prost(message, optional, tag = 5)]
    pub network: Option<PodSandboxNetworkStatus>,
    #[prost(message, optional, tag = 6)]
    pub linux: Option<LinuxPodSandboxStatus>,
    #[prost(btree_map = "string, string", tag = 7)]
    pub labels: BTreeMap<String, String>,
    #[prost(btree_map = "string, string", tag = 8)]
    pub annotations: BTreeMap<String, String>,
    #[prost(string, tag = 9)]
    pub runtime_handler: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct LinuxPodSandboxStatus {
    #[prost(message, optional, tag = 1)]
    pub namespaces: Option<Namespace>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Namespace {
    #[prost(message, optional, tag = 2)]
    pub options: Option<NamespaceOption>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct PodSandboxStatusResponse {
    #[prost(message, optional, tag = 1)]
    pub status: Option<PodSandboxStatus>,
    #[prost(btree_map = "string, string", tag = 2)]
    pub info: BTreeMap<String, String>,
    #[prost(message, repeated, tag = 3)]
    pub containers_statuses: Vec<ContainerStatus>,
    #[prost(int64, tag = 4)]
    pub timestamp: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct PodSandboxFilter {
    #[prost(string, tag = 1)]
    pub id: String,
    #[prost(message, optional, tag = 2)]
    pub state: Option<StateValue>,
    #[prost(btree_map = "string, string", tag = 3)]
    pub label_selector: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ListPodSandboxRequest {
    #[prost(message, optional, tag = 1)]
    pub filter: Option<PodSandboxFilter>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct PodSandbox {
    #[prost(string, tag = 1)]
    pub id: String,
    #[prost(message, optional, tag = 2)]
    pub metadata: Option<PodSandboxMetadata>,
    #[prost(enumeration = "PodSandboxState", tag = 3)]
    pub state: i32,
    #[prost(int64, tag = 4)]
    pub created_at: i64,
    #[prost(btree_map = "string, string", tag = 5)]
    pub labels: BTreeMap<String, String>,
    #[prost(btree_map = "string, string", tag = 6)]
    pub annotations: BTreeMap<String, String>,
    #[prost(string, tag = 7)]
    pub runtime_handler: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ListPodSandboxResponse {
    #[prost(message, repeated, tag = 1)]
    pub items: Vec<PodSandbox>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct SelinuxOption {
    #[prost(string, tag = 1)]
    pub user: String,
    #[prost(string, tag = 2)]
    pub role: String,
    #[prost(string, tag = 3)]
    pub type_: String,
    #[prost(string, tag = 4)]
    pub level: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct PortForwardRequest {
    #[prost(string, tag = 1)]
    pub pod_sandbox_id: String,
    #[prost(int32, repeated, tag = 2)]
    pub port: Vec<i32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum NamespaceMode {
    Pod = 0,
    Container = 1,
    Node = 2,
    Target = 3,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum PodSandboxState {
    Ready = 0,
    NotReady = 1,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum ProfileType {
    RuntimeDefault = 0,
    Unconfined = 1,
    Localhost = 2,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum Protocol {
    Tcp = 0,
    Udp = 1,
    Sctp = 2,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum SupplementalGroupsPolicy {
    Merge = 0,
    Strict = 1,
}
