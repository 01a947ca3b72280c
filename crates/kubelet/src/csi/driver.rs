//! A registered CSI driver and its gRPC calls.

use std::collections::BTreeMap;
use std::time::Duration;

use runtime::{GrpcClient, RpcError};

use super::messages::*;

/// Upstream's `csiTimeout` for one call.
const CALL_TIMEOUT: Duration = Duration::from_secs(120);
/// For calls that only query the driver.
const QUERY_TIMEOUT: Duration = Duration::from_secs(15);

const STAGE_UNSTAGE_VOLUME: i32 = 1;
const GET_VOLUME_STATS: i32 = 2;
const EXPAND_VOLUME: i32 = 3;
const SINGLE_NODE_MULTI_WRITER: i32 = 5;
const VOLUME_MOUNT_GROUP: i32 = 6;

/// A CSI driver on this node.
#[derive(Clone, Debug)]
pub struct Driver {
    pub name: String,
    /// The ID of this node in the driver's terms.
    pub node_id: String,
    /// The maximum number of the driver's volumes on this node. 0 means no limit.
    pub max_volumes: i64,
    pub topology: BTreeMap<String, String>,
    capabilities: Vec<i32>,
    socket: GrpcClient,
}

impl Driver {
    /// Connects to a driver and queries its node information and capabilities.
    pub async fn connect(name: &str, endpoint: &str) -> Result<Driver, RpcError> {
        let socket = GrpcClient::new(endpoint);
        let info: NodeGetInfoResponse =
            socket.call("/csi.v1.Node/NodeGetInfo", &Empty {}, QUERY_TIMEOUT).await?;
        let known: NodeGetCapabilitiesResponse =
            socket.call("/csi.v1.Node/NodeGetCapabilities", &Empty {}, QUERY_TIMEOUT).await?;
        Ok(Driver {
            name: name.to_owned(),
            node_id: info.node_id,
            max_volumes: info.max_volumes_per_node,
            topology: info.accessible_topology.map(|topology| topology.segments).unwrap_or_default(),
            capabilities: known.capabilities.iter().filter_map(|one| Some(one.rpc.as_ref()?.kind)).collect(),
            socket,
        })
    }

    pub fn supports_stage(&self) -> bool {
        self.capabilities.contains(&STAGE_UNSTAGE_VOLUME)
    }

    pub fn supports_stats(&self) -> bool {
        self.capabilities.contains(&GET_VOLUME_STATS)
    }

    pub fn supports_expand(&self) -> bool {
        self.capabilities.contains(&EXPAND_VOLUME)
    }

    /// Whether the driver applies `fsGroup` itself.
    pub fn supports_mount_group(&self) -> bool {
        self.capabilities.contains(&VOLUME_MOUNT_GROUP)
    }

    /// The CSI access mode. The finer single-node modes need a capability of the driver.
    pub fn access_mode(&self, mode: &str) -> AccessMode {
        let has_multi_writer = self.capabilities.contains(&SINGLE_NODE_MULTI_WRITER);
        let mode = match mode {
            "ReadOnlyMany" => 3,
            "ReadWriteMany" => 5,
            "ReadWriteOncePod" if has_multi_writer => 6,
            "ReadWriteOnce" if has_multi_writer => 7,
            _ => 1,
        };
        AccessMode { mode }
    }

    pub async fn stage(&self, request: &NodeStageVolumeRequest) -> Result<(), RpcError> {
        self.call::<_, Empty>("/csi.v1.Node/NodeStageVolume", request).await.map(drop)
    }

    pub async fn unstage(&self, volume: &VolumeTargetRequest) -> Result<(), RpcError> {
        self.call::<_, Empty>("/csi.v1.Node/NodeUnstageVolume", volume).await.map(drop)
    }

    pub async fn publish(&self, request: &NodePublishVolumeRequest) -> Result<(), RpcError> {
        self.call::<_, Empty>("/csi.v1.Node/NodePublishVolume", request).await.map(drop)
    }

    pub async fn unpublish(&self, volume: &VolumeTargetRequest) -> Result<(), RpcError> {
        self.call::<_, Empty>("/csi.v1.Node/NodeUnpublishVolume", volume).await.map(drop)
    }

    /// Expands a volume on the node and returns its new size.
    pub async fn expand(&self, request: &NodeExpandVolumeRequest) -> Result<i64, RpcError> {
        let answer: NodeExpandVolumeResponse = self.call("/csi.v1.Node/NodeExpandVolume", request).await?;
        Ok(answer.capacity_bytes)
    }

    pub async fn stats(&self, request: &NodeGetVolumeStatsRequest) -> Result<Vec<VolumeUsage>, RpcError> {
        let answer: NodeGetVolumeStatsResponse =
            self.socket.call("/csi.v1.Node/NodeGetVolumeStats", request, QUERY_TIMEOUT).await?;
        Ok(answer.usage)
    }

    async fn call<Q, A>(&self, method: &'static str, request: &Q) -> Result<A, RpcError>
    where
        Q: prost::Message,
        A: prost::Message + Default,
    {
        self.socket.call(method, request, CALL_TIMEOUT).await
    }
}
