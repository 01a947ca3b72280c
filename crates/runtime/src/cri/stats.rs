//! Pod sandbox stats and the runtime's configuration (`RuntimeConfig`).

use std::collections::BTreeMap;

use super::*;

#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerStatsResponse {
    #[prost(message, optional, tag = 1)]
    pub stats: Option<ContainerStats>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct PodSandboxStatsFilter {
    #[prost(string, tag = 1)]
    pub id: String,
    #[prost(btree_map = "string, string", tag = 2)]
    pub label_selector: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ListPodSandboxStatsRequest {
    #[prost(message, optional, tag = 1)]
    pub filter: Option<PodSandboxStatsFilter>,
}

/// Response of `ListPodSandboxStats`, and of `PodSandboxStats`, whose single message has the same field
/// number.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ListPodSandboxStatsResponse {
    #[prost(message, repeated, tag = 1)]
    pub stats: Vec<PodSandboxStats>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct PodSandboxAttributes {
    #[prost(string, tag = 1)]
    pub id: String,
    #[prost(message, optional, tag = 2)]
    pub metadata: Option<PodSandboxMetadata>,
    #[prost(btree_map = "string, string", tag = 3)]
    pub labels: BTreeMap<String, String>,
    #[prost(btree_map = "string, string", tag = 4)]
    pub annotations: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct PodSandboxStats {
    #[prost(message, optional, tag = 1)]
    pub attributes: Option<PodSandboxAttributes>,
    #[prost(message, optional, tag = 2)]
    pub linux: Option<LinuxPodSandboxStats>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct LinuxPodSandboxStats {
    #[prost(message, optional, tag = 1)]
    pub cpu: Option<CpuUsage>,
    #[prost(message, optional, tag = 2)]
    pub memory: Option<MemoryUsage>,
    #[prost(message, optional, tag = 3)]
    pub network: Option<NetworkUsage>,
    #[prost(message, optional, tag = 4)]
    pub process: Option<ProcessUsage>,
    #[prost(message, repeated, tag = 5)]
    pub containers: Vec<ContainerStats>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct NetworkUsage {
    #[prost(int64, tag = 1)]
    pub timestamp: i64,
    #[prost(message, optional, tag = 2)]
    pub default_interface: Option<NetworkInterfaceUsage>,
    #[prost(message, repeated, tag = 3)]
    pub interfaces: Vec<NetworkInterfaceUsage>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct NetworkInterfaceUsage {
    #[prost(string, tag = 1)]
    pub name: String,
    #[prost(message, optional, tag = 2)]
    pub rx_bytes: Option<Uint64Value>,
    #[prost(message, optional, tag = 3)]
    pub rx_errors: Option<Uint64Value>,
    #[prost(message, optional, tag = 4)]
    pub tx_bytes: Option<Uint64Value>,
    #[prost(message, optional, tag = 5)]
    pub tx_errors: Option<Uint64Value>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ProcessUsage {
    #[prost(int64, tag = 1)]
    pub timestamp: i64,
    #[prost(message, optional, tag = 2)]
    pub process_count: Option<Uint64Value>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct RuntimeConfigResponse {
    #[prost(message, optional, tag = 1)]
    pub linux: Option<LinuxRuntimeConfiguration>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct LinuxRuntimeConfiguration {
    /// 0 is systemd, 1 is cgroupfs.
    #[prost(int32, tag = 1)]
    pub cgroup_driver: i32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct UpdatePodSandboxResourcesRequest {
    #[prost(string, tag = 1)]
    pub pod_sandbox_id: String,
    #[prost(message, optional, tag = 2)]
    pub overhead: Option<LinuxContainerResources>,
    #[prost(message, optional, tag = 3)]
    pub resources: Option<LinuxContainerResources>,
}
