//! The messages of CSI v1 that the node service needs. Names and field numbers are the protocol's.

use std::collections::BTreeMap;

#[derive(Clone, PartialEq, prost::Message)]
pub struct Empty {}

#[derive(Clone, PartialEq, prost::Message)]
pub struct NodeGetInfoResponse {
    #[prost(string, tag = 1)]
    pub node_id: String,
    #[prost(int64, tag = 2)]
    pub max_volumes_per_node: i64,
    #[prost(message, optional, tag = 3)]
    pub accessible_topology: Option<Topology>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Topology {
    #[prost(btree_map = "string, string", tag = 1)]
    pub segments: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct NodeGetCapabilitiesResponse {
    #[prost(message, repeated, tag = 1)]
    pub capabilities: Vec<NodeServiceCapability>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct NodeServiceCapability {
    #[prost(message, optional, tag = 1)]
    pub rpc: Option<Rpc>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Rpc {
    #[prost(int32, tag = 1)]
    pub kind: i32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct VolumeCapability {
    #[prost(message, optional, tag = 1)]
    pub block: Option<Empty>,
    #[prost(message, optional, tag = 2)]
    pub mount: Option<MountVolume>,
    #[prost(message, optional, tag = 3)]
    pub access_mode: Option<AccessMode>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct MountVolume {
    #[prost(string, tag = 1)]
    pub fs_type: String,
    #[prost(string, repeated, tag = 2)]
    pub mount_flags: Vec<String>,
    #[prost(string, tag = 3)]
    pub volume_mount_group: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct AccessMode {
    #[prost(int32, tag = 1)]
    pub mode: i32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct NodeStageVolumeRequest {
    #[prost(string, tag = 1)]
    pub volume_id: String,
    #[prost(btree_map = "string, string", tag = 2)]
    pub publish_context: BTreeMap<String, String>,
    #[prost(string, tag = 3)]
    pub staging_target_path: String,
    #[prost(message, optional, tag = 4)]
    pub volume_capability: Option<VolumeCapability>,
    #[prost(btree_map = "string, string", tag = 5)]
    pub secrets: BTreeMap<String, String>,
    #[prost(btree_map = "string, string", tag = 6)]
    pub volume_context: BTreeMap<String, String>,
}

/// The request of NodeUnstageVolume and NodeUnpublishVolume, which have the same fields.
#[derive(Clone, PartialEq, prost::Message)]
pub struct VolumeTargetRequest {
    #[prost(string, tag = 1)]
    pub volume_id: String,
    #[prost(string, tag = 2)]
    pub path: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct NodePublishVolumeRequest {
    #[prost(string, tag = 1)]
    pub volume_id: String,
    #[prost(btree_map = "string, string", tag = 2)]
    pub publish_context: BTreeMap<String, String>,
    #[prost(string, tag = 3)]
    pub staging_target_path: String,
    #[prost(string, tag = 4)]
    pub target_path: String,
    #[prost(message, optional, tag = 5)]
    pub volume_capability: Option<VolumeCapability>,
    #[prost(bool, tag = 6)]
    pub readonly: bool,
    #[prost(btree_map = "string, string", tag = 7)]
    pub secrets: BTreeMap<String, String>,
    #[prost(btree_map = "string, string", tag = 8)]
    pub volume_context: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct NodeGetVolumeStatsRequest {
    #[prost(string, tag = 1)]
    pub volume_id: String,
    #[prost(string, tag = 2)]
    pub volume_path: String,
    #[prost(string, tag = 3)]
    pub staging_target_path: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct NodeGetVolumeStatsResponse {
    #[prost(message, repeated, tag = 1)]
    pub usage: Vec<VolumeUsage>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct VolumeUsage {
    #[prost(int64, tag = 1)]
    pub available: i64,
    #[prost(int64, tag = 2)]
    pub total: i64,
    #[prost(int64, tag = 3)]
    pub used: i64,
    /// [`BYTES`] or [`INODES`].
    #[prost(int32, tag = 4)]
    pub unit: i32,
}

pub const BYTES: i32 = 1;
pub const INODES: i32 = 2;

#[derive(Clone, PartialEq, prost::Message)]
pub struct NodeExpandVolumeRequest {
    #[prost(string, tag = 1)]
    pub volume_id: String,
    #[prost(string, tag = 2)]
    pub volume_path: String,
    #[prost(message, optional, tag = 3)]
    pub capacity_range: Option<CapacityRange>,
    #[prost(string, tag = 4)]
    pub staging_target_path: String,
    #[prost(message, optional, tag = 5)]
    pub volume_capability: Option<VolumeCapability>,
    #[prost(btree_map = "string, string", tag = 6)]
    pub secrets: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct CapacityRange {
    #[prost(int64, tag = 1)]
    pub required_bytes: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct NodeExpandVolumeResponse {
    #[prost(int64, tag = 1)]
    pub capacity_bytes: i64,
}
