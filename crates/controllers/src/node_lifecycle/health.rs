//! Computes when a node counts as unresponsive. Does no I/O.

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, NodeCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use reconcile::NodeMonitorConfig;

use crate::node::condition;

/// Conditions that become `Unknown` for an unresponsive node.
const NODE_CONDITIONS: [&str; 4] = ["Ready", "MemoryPressure", "DiskPressure", "PIDPressure"];

/// When a node was last known to be alive, by the local clock, because clocks of nodes may be wrong.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeHealth {
    pub probe_timestamp: Timestamp,
    /// The last heartbeat and Lease renewal, to detect new ones.
    heartbeat: Option<Option<Time>>,
    renewed: Option<Timestamp>,
}

impl NodeHealth {
    /// The state after reading the node and its Lease.
    pub fn observe(
        before: Option<NodeHealth>,
        node: &Node,
        lease: Option<&Lease>,
        now: Timestamp,
    ) -> NodeHealth {
        let heartbeat = condition(node, "Ready").map(|ready| ready.last_heartbeat_time.clone());
        let created = node.metadata.creation_timestamp.as_ref().map_or(now, |time| time.0);
        let mut health = match before {
            None if heartbeat.is_none() => {
                NodeHealth { probe_timestamp: created, heartbeat: None, renewed: None }
            }
            None => NodeHealth { probe_timestamp: now, heartbeat: heartbeat.clone(), renewed: None },
            Some(before) if before.heartbeat == heartbeat => before,
            Some(before) => {
                NodeHealth { probe_timestamp: now, heartbeat: heartbeat.clone(), renewed: before.renewed }
            }
        };
        let renewed = lease.and_then(|lease| lease.spec.as_ref()?.renew_time.as_ref()).map(|time| time.0);
        if renewed > health.renewed {
            health.renewed = renewed;
            health.probe_timestamp = now;
        }
        health
    }

    /// When the grace period ends without a further heartbeat.
    pub fn grace_period_end(&self, silence: NodeMonitorConfig) -> Timestamp {
        let grace =
            if self.heartbeat.is_some() { silence.grace_period } else { silence.startup_grace_period };
        self.probe_timestamp.checked_add(grace).unwrap_or(Timestamp::MAX)
    }
}

/// The conditions of an unresponsive node, or `None` if they are up to date.
pub fn unknown_conditions(node: &Node, now: Timestamp) -> Option<Vec<NodeCondition>> {
    let status = node.status.as_ref();
    let before = status.and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    let mut after = before.to_vec();
    for type_ in NODE_CONDITIONS {
        match after.iter_mut().find(|condition| condition.type_ == type_) {
            Some(condition) if condition.status == "Unknown" => {}
            Some(condition) => {
                condition.status = "Unknown".into();
                condition.reason = Some("NodeStatusUnknown".into());
                condition.message = Some("Kubelet stopped posting node status.".into());
                condition.last_transition_time = Some(Time(now));
            }
            None => after.push(NodeCondition {
                type_: type_.into(),
                status: "Unknown".into(),
                reason: Some("NodeStatusNeverUpdated".into()),
                message: Some("Kubelet never posted node status.".into()),
                last_heartbeat_time: node.metadata.creation_timestamp.clone(),
                last_transition_time: Some(Time(now)),
            }),
        }
    }
    (after != before).then_some(after)
}
