//! Why no node fits, and the text of the resulting `FailedScheduling` event.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::fmt;

use crate::framework::{Code, Status};
use crate::state::NodeId;

/// The statuses of the nodes that were rejected (upstream's `framework.Diagnosis`).
#[derive(Clone, Debug)]
pub struct Diagnosis {
    pub nodes: Vec<(NodeId, Status)>,
    /// Status of the nodes not in `nodes`.
    pub absent_nodes_status: Status,
    pub rejected_by: BTreeSet<&'static str>,
    pub pending_on: BTreeSet<&'static str>,
    /// Message of the PreFilter plugin that rejected the pod for all nodes.
    pub pre_filter_message: String,
    /// Messages of the PostFilter plugins.
    pub post_filter_message: String,
    /// The plugin that was recorded last.
    last_plugin: &'static str,
}

impl Default for Diagnosis {
    fn default() -> Diagnosis {
        Diagnosis {
            nodes: Vec::new(),
            absent_nodes_status: Status {
                code: Code::UnschedulableAndUnresolvable,
                reasons: Vec::new(),
                plugin: "",
            },
            rejected_by: BTreeSet::new(),
            pending_on: BTreeSet::new(),
            pre_filter_message: String::new(),
            post_filter_message: String::new(),
            last_plugin: "",
        }
    }
}

impl Diagnosis {
    /// Creates a diagnosis from node statuses and the status of all other nodes.
    pub fn new(nodes: Vec<(NodeId, Status)>, absent_nodes_status: Status) -> Diagnosis {
        Diagnosis { nodes, absent_nodes_status, ..Diagnosis::default() }
    }

    /// Records that a node is rejected.
    pub fn add(&mut self, node: NodeId, status: Status) {
        self.add_plugin_status(&status);
        self.nodes.push((node, status));
    }

    /// Records that a PreFilter plugin rejects the pod for all nodes.
    pub fn reject_all(&mut self, status: Status) {
        self.add_plugin_status(&status);
        self.pre_filter_message = status.message();
        self.absent_nodes_status = status;
    }

    fn add_plugin_status(&mut self, status: &Status) {
        // Usually the same plugin rejects thousands of nodes: skip the set lookup if it was recorded last.
        if status.plugin.is_empty() || (self.last_plugin == status.plugin && status.code != Code::Pending) {
            return;
        }
        self.last_plugin = status.plugin;
        if status.is_rejected() {
            self.rejected_by.insert(status.plugin);
        }
        if status.code == Code::Pending {
            self.pending_on.insert(status.plugin);
        }
    }

    /// Returns the status of a node.
    pub fn status_of(&self, node: NodeId) -> &Status {
        self.nodes.iter().find(|(id, _)| *id == node).map_or(&self.absent_nodes_status, |(_, status)| status)
    }
}

/// No node fits. Formats the same message as upstream's `framework.FitError`.
#[derive(Clone, Debug)]
pub struct FitError {
    /// The number of nodes in the cluster.
    pub nodes: usize,
    pub diagnosis: Diagnosis,
}

impl fmt::Display for FitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let diagnosis = &self.diagnosis;
        write!(f, "0/{} nodes are available:", self.nodes)?;
        if diagnosis.pre_filter_message.is_empty() {
            let mut counts: HashMap<&Cow<'static, str>, usize> = HashMap::new();
            for reason in diagnosis.nodes.iter().flat_map(|(_, status)| &status.reasons) {
                *counts.entry(reason).or_default() += 1;
            }
            let others = self.nodes.saturating_sub(diagnosis.nodes.len());
            for reason in diagnosis.absent_nodes_status.reasons.iter().filter(|_| others > 0) {
                *counts.entry(reason).or_default() += others;
            }
            let mut lines: Vec<String> =
                counts.into_iter().map(|(reason, count)| format!("{count} {reason}")).collect();
            lines.sort();
            if !lines.is_empty() {
                write!(f, " {}.", lines.join(", "))?;
            }
        } else {
            write!(f, " {}.", diagnosis.pre_filter_message)?;
        }
        if !diagnosis.post_filter_message.is_empty() {
            write!(f, " {}", diagnosis.post_filter_message)?;
        }
        Ok(())
    }
}
