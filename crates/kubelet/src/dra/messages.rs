//! The messages of the DRA plugin API (`dra`, v1 and v1beta1 alike) and the device health API
//! (`dra-health`, v1alpha1). Names and field numbers are the protocols'.

use std::collections::BTreeMap;

#[derive(Clone, PartialEq, prost::Message)]
pub struct Empty {}

/// The claims to prepare or unprepare.
#[derive(Clone, PartialEq, prost::Message)]
pub struct NodeResourcesRequest {
    #[prost(message, repeated, tag = 1)]
    pub claims: Vec<Claim>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Claim {
    #[prost(string, tag = 1)]
    pub namespace: String,
    #[prost(string, tag = 2)]
    pub uid: String,
    #[prost(string, tag = 3)]
    pub name: String,
}

/// By claim UID.
#[derive(Clone, PartialEq, prost::Message)]
pub struct NodePrepareResourcesResponse {
    #[prost(btree_map = "string, message", tag = 1)]
    pub claims: BTreeMap<String, NodePrepareResourceResponse>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct NodePrepareResourceResponse {
    #[prost(message, repeated, tag = 1)]
    pub devices: Vec<Device>,
    #[prost(string, tag = 2)]
    pub error: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Device {
    #[prost(string, repeated, tag = 1)]
    pub request_names: Vec<String>,
    #[prost(string, tag = 2)]
    pub pool_name: String,
    #[prost(string, tag = 3)]
    pub device_name: String,
    #[prost(string, repeated, tag = 4)]
    pub cdi_device_ids: Vec<String>,
    #[prost(string, optional, tag = 5)]
    pub share_id: Option<String>,
}

/// By claim UID.
#[derive(Clone, PartialEq, prost::Message)]
pub struct NodeUnprepareResourcesResponse {
    #[prost(btree_map = "string, message", tag = 1)]
    pub claims: BTreeMap<String, NodeUnprepareResourceResponse>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct NodeUnprepareResourceResponse {
    #[prost(string, tag = 1)]
    pub error: String,
}

/// The health of all devices of a driver. Sent whenever one of them changes.
#[derive(Clone, PartialEq, prost::Message)]
pub struct NodeWatchResourcesResponse {
    #[prost(message, repeated, tag = 1)]
    pub devices: Vec<DeviceHealth>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct DeviceHealth {
    #[prost(message, optional, tag = 1)]
    pub device: Option<DeviceName>,
    /// 1 is healthy, 2 is unhealthy, all other values are unknown.
    #[prost(int32, tag = 2)]
    pub health: i32,
    #[prost(int64, tag = 4)]
    pub timeout_seconds: i64,
    #[prost(string, tag = 5)]
    pub message: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct DeviceName {
    #[prost(string, tag = 1)]
    pub pool: String,
    #[prost(string, tag = 2)]
    pub name: String,
}
