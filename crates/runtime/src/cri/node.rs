//! Runtime messages: version, status and features, image filesystem info, container stats.

use std::collections::BTreeMap;

use super::*;

#[derive(Clone, PartialEq, prost::Message)]
pub struct VersionResponse {
    #[prost(string, tag = 1)]
    pub version: String,
    #[prost(string, tag = 2)]
    pub runtime_name: String,
    #[prost(string, tag = 3)]
    pub runtime_version: String,
    #[prost(string, tag = 4)]
    pub runtime_api_version: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Int64Value {
    #[prost(int64, tag = 1)]
    pub value: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct KeyValue {
    #[prost(string, tag = 1)]
    pub key: String,
    #[prost(string, tag = 2)]
    pub value: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct NetworkConfig {
    #[prost(string, tag = 1)]
    pub pod_cidr: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct RuntimeConfig {
    #[prost(message, optional, tag = 1)]
    pub network_config: Option<NetworkConfig>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct UpdateRuntimeConfigRequest {
    #[prost(message, optional, tag = 1)]
    pub runtime_config: Option<RuntimeConfig>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct RuntimeCondition {
    #[prost(string, tag = 1)]
    pub type_: String,
    #[prost(bool, tag = 2)]
    pub status: bool,
    #[prost(string, tag = 3)]
    pub reason: String,
    #[prost(string, tag = 4)]
    pub message: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct RuntimeStatus {
    #[prost(message, repeated, tag = 1)]
    pub conditions: Vec<RuntimeCondition>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct RuntimeHandlerFeatures {
    #[prost(bool, tag = 1)]
    pub recursive_read_only_mounts: bool,
    #[prost(bool, tag = 2)]
    pub user_namespaces: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct RuntimeHandler {
    #[prost(string, tag = 1)]
    pub name: String,
    #[prost(message, optional, tag = 2)]
    pub features: Option<RuntimeHandlerFeatures>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct StatusRequest {
    #[prost(bool, tag = 1)]
    pub verbose: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct StatusResponse {
    #[prost(message, optional, tag = 1)]
    pub status: Option<RuntimeStatus>,
    #[prost(btree_map = "string, string", tag = 2)]
    pub info: BTreeMap<String, String>,
    #[prost(message, repeated, tag = 3)]
    pub runtime_handlers: Vec<RuntimeHandler>,
    #[prost(message, optional, tag = 4)]
    pub features: Option<RuntimeFeatures>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct RuntimeFeatures {
    #[prost(bool, tag = 1)]
    pub supplemental_groups_policy: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Uint64Value {
    #[prost(uint64, tag = 1)]
    pub value: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct FilesystemIdentifier {
    #[prost(string, tag = 1)]
    pub mountpoint: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct FilesystemUsage {
    #[prost(int64, tag = 1)]
    pub timestamp: i64,
    #[prost(message, optional, tag = 2)]
    pub fs_id: Option<FilesystemIdentifier>,
    #[prost(message, optional, tag = 3)]
    pub used_bytes: Option<Uint64Value>,
    #[prost(message, optional, tag = 4)]
    pub inodes_used: Option<Uint64Value>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ImageFsInfoResponse {
    #[prost(message, repeated, tag = 1)]
    pub image_filesystems: Vec<FilesystemUsage>,
    #[prost(message, repeated, tag = 2)]
    pub container_filesystems: Vec<FilesystemUsage>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerStatsFilter {
    #[prost(string, tag = 1)]
    pub id: String,
    #[prost(string, tag = 2)]
    pub pod_sandbox_id: String,
    #[prost(btree_map = "string, string", tag = 3)]
    pub label_selector: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ListContainerStatsRequest {
    #[prost(message, optional, tag = 1)]
    pub filter: Option<ContainerStatsFilter>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ListContainerStatsResponse {
    #[prost(message, repeated, tag = 1)]
    pub stats: Vec<ContainerStats>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerAttributes {
    #[prost(string, tag = 1)]
    pub id: String,
    #[prost(message, optional, tag = 2)]
    pub metadata: Option<ContainerMetadata>,
    #[prost(btree_map = "string, string", tag = 3)]
    pub labels: BTreeMap<String, String>,
    #[prost(btree_map = "string, string", tag = 4)]
    pub annotations: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerStats {
    #[prost(message, optional, tag = 1)]
    pub attributes: Option<ContainerAttributes>,
    #[prost(message, optional, tag = 2)]
    pub cpu: Option<CpuUsage>,
    #[prost(message, optional, tag = 3)]
    pub memory: Option<MemoryUsage>,
    #[prost(message, optional, tag = 4)]
    pub writable_layer: Option<FilesystemUsage>,
    #[prost(message, optional, tag = 5)]
    pub swap: Option<SwapUsage>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct SwapUsage {
    #[prost(int64, tag = 1)]
    pub timestamp: i64,
    #[prost(message, optional, tag = 2)]
    pub swap_available_bytes: Option<Uint64Value>,
    #[prost(message, optional, tag = 3)]
    pub swap_usage_bytes: Option<Uint64Value>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct CpuUsage {
    #[prost(int64, tag = 1)]
    pub timestamp: i64,
    #[prost(message, optional, tag = 2)]
    pub usage_core_nano_seconds: Option<Uint64Value>,
    #[prost(message, optional, tag = 3)]
    pub usage_nano_cores: Option<Uint64Value>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct MemoryUsage {
    #[prost(int64, tag = 1)]
    pub timestamp: i64,
    #[prost(message, optional, tag = 2)]
    pub working_set_bytes: Option<Uint64Value>,
    #[prost(message, optional, tag = 3)]
    pub available_bytes: Option<Uint64Value>,
    #[prost(message, optional, tag = 4)]
    pub usage_bytes: Option<Uint64Value>,
    #[prost(message, optional, tag = 5)]
    pub rss_bytes: Option<Uint64Value>,
    #[prost(message, optional, tag = 6)]
    pub page_faults: Option<Uint64Value>,
    #[prost(message, optional, tag = 7)]
    pub major_page_faults: Option<Uint64Value>,
}
