//! The messages of the device plugin API (`v1beta1`) that are needed here.

use std::collections::BTreeMap;

#[derive(Clone, PartialEq, prost::Message)]
pub struct Empty {}

#[derive(Clone, PartialEq, prost::Message)]
pub struct DevicePluginOptions {
    #[prost(bool, tag = 1)]
    pub pre_start_required: bool,
    #[prost(bool, tag = 2)]
    pub has_preferences: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct RegisterRequest {
    #[prost(string, tag = 1)]
    pub version: String,
    /// The name of the plugin's socket in the device plugin directory.
    #[prost(string, tag = 2)]
    pub endpoint: String,
    #[prost(string, tag = 3)]
    pub resource_name: String,
    #[prost(message, optional, tag = 4)]
    pub options: Option<DevicePluginOptions>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ListAndWatchResponse {
    #[prost(message, repeated, tag = 1)]
    pub devices: Vec<Device>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Device {
    #[prost(string, tag = 1)]
    pub id: String,
    #[prost(string, tag = 2)]
    pub health: String,
}

/// The device IDs of one container. Also the request of PreStartContainer, which has the same
/// fields.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DeviceIds {
    #[prost(string, repeated, tag = 1)]
    pub ids: Vec<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct AllocateRequest {
    #[prost(message, repeated, tag = 1)]
    pub containers: Vec<DeviceIds>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct AllocateResponse {
    #[prost(message, repeated, tag = 1)]
    pub containers: Vec<ContainerAllocateResponse>,
}

/// The settings that a container needs to use its devices.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerAllocateResponse {
    #[prost(btree_map = "string, string", tag = 1)]
    pub envs: BTreeMap<String, String>,
    #[prost(message, repeated, tag = 2)]
    pub mounts: Vec<Mount>,
    #[prost(message, repeated, tag = 3)]
    pub devices: Vec<runtime::cri::Device>,
    #[prost(btree_map = "string, string", tag = 4)]
    pub annotations: BTreeMap<String, String>,
    #[prost(message, repeated, tag = 5)]
    pub cdi_devices: Vec<runtime::cri::CdiDevice>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Mount {
    #[prost(string, tag = 1)]
    pub container_path: String,
    #[prost(string, tag = 2)]
    pub host_path: String,
    #[prost(bool, tag = 3)]
    pub read_only: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct PreferredAllocationRequest {
    #[prost(message, repeated, tag = 1)]
    pub containers: Vec<ContainerPreferredAllocationRequest>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerPreferredAllocationRequest {
    #[prost(string, repeated, tag = 1)]
    pub available: Vec<String>,
    #[prost(string, repeated, tag = 2)]
    pub must_include: Vec<String>,
    #[prost(int32, tag = 3)]
    pub size: i32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct PreferredAllocationResponse {
    #[prost(message, repeated, tag = 1)]
    pub containers: Vec<DeviceIds>,
}
