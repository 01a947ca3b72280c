//! A driver that has introduced itself, and what can be asked of it.

use std::collections::BTreeMap;
use std::time::Duration;

use runtime::{Refusal, Socket};

use super::messages::*;

/// What upstream's kubelet allows a driver for one call.
const PATIENCE: Duration = Duration::from_secs(120);
/// For calls that only ask.
const QUICK: Duration = Duration::from_secs(15);

const STAGES: i32 = 1;
const TELLS_STATS: i32 = 2;
const EXPANDS: i32 = 3;
const SINGLE_NODE_MULTI_WRITER: i32 = 5;
const MOUNTS_FOR_GROUPS: i32 = 6;

/// A storage driver on this node.
#[derive(Clone, Debug)]
pub struct Driver {
    pub name: String,
    /// What the driver calls this node.
    pub node_id: String,
    /// How many of its volumes can be here; 0 for no limit.
    pub most: i64,
    pub topology: BTreeMap<String, String>,
    can: Vec<i32>,
    socket: Socket,
}

impl Driver {
    /// Asks a driver what it is like.
    pub async fn meet(name: &str, endpoint: &str) -> Result<Driver, Refusal> {
        let socket = Socket::new(endpoint);
        let info: NodeGetInfoResponse = socket.call("/csi.v1.Node/NodeGetInfo", &Empty {}, QUICK).await?;
        let known: NodeGetCapabilitiesResponse =
            socket.call("/csi.v1.Node/NodeGetCapabilities", &Empty {}, QUICK).await?;
        Ok(Driver {
            name: name.to_owned(),
            node_id: info.node_id,
            most: info.max_volumes_per_node,
            topology: info.accessible_topology.map(|topology| topology.segments).unwrap_or_default(),
            can: known.capabilities.iter().filter_map(|one| Some(one.rpc.as_ref()?.kind)).collect(),
            socket,
        })
    }

    pub fn stages(&self) -> bool {
        self.can.contains(&STAGES)
    }

    pub fn tells_stats(&self) -> bool {
        self.can.contains(&TELLS_STATS)
    }

    pub fn expands(&self) -> bool {
        self.can.contains(&EXPANDS)
    }

    /// Whether it gives volumes to the pod's group by itself.
    pub fn mounts_for_groups(&self) -> bool {
        self.can.contains(&MOUNTS_FOR_GROUPS)
    }

    /// CSI's word for an access mode.
    pub fn access_mode(&self, mode: &str) -> AccessMode {
        let finer = self.can.contains(&SINGLE_NODE_MULTI_WRITER);
        let mode = match mode {
            "ReadOnlyMany" => 3,
            "ReadWriteMany" => 5,
            "ReadWriteOncePod" if finer => 6,
            "ReadWriteOnce" if finer => 7,
            _ => 1,
        };
        AccessMode { mode }
    }

    pub async fn stage(&self, request: &NodeStageVolumeRequest) -> Result<(), Refusal> {
        self.ask::<_, Empty>("/csi.v1.Node/NodeStageVolume", request).await.map(drop)
    }

    pub async fn unstage(&self, volume: &VolumeAt) -> Result<(), Refusal> {
        self.ask::<_, Empty>("/csi.v1.Node/NodeUnstageVolume", volume).await.map(drop)
    }

    pub async fn publish(&self, request: &NodePublishVolumeRequest) -> Result<(), Refusal> {
        self.ask::<_, Empty>("/csi.v1.Node/NodePublishVolume", request).await.map(drop)
    }

    pub async fn unpublish(&self, volume: &VolumeAt) -> Result<(), Refusal> {
        self.ask::<_, Empty>("/csi.v1.Node/NodeUnpublishVolume", volume).await.map(drop)
    }

    /// Answers with the size there is now.
    pub async fn expand(&self, request: &NodeExpandVolumeRequest) -> Result<i64, Refusal> {
        let answer: NodeExpandVolumeResponse = self.ask("/csi.v1.Node/NodeExpandVolume", request).await?;
        Ok(answer.capacity_bytes)
    }

    pub async fn stats(&self, request: &NodeGetVolumeStatsRequest) -> Result<Vec<VolumeUsage>, Refusal> {
        let answer: NodeGetVolumeStatsResponse =
            self.socket.call("/csi.v1.Node/NodeGetVolumeStats", request, QUICK).await?;
        Ok(answer.usage)
    }

    async fn ask<Q, A>(&self, call: &'static str, question: &Q) -> Result<A, Refusal>
    where
        Q: prost::Message,
        A: prost::Message + Default,
    {
        self.socket.call(call, question, PATIENCE).await
    }
}
