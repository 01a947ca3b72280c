//! Pods nominated to a node, which wait for victims to terminate.

use std::collections::HashMap;
use std::sync::Arc;

use crate::framework::Nominations;
use crate::state::PodInfo;

/// Nominations by node and by pod.
#[derive(Default)]
pub struct Nominator {
    by_node: HashMap<Arc<str>, Vec<Arc<PodInfo>>>,
    node_of: HashMap<Arc<str>, Arc<str>>,
}

impl Nominator {
    /// Nominates a pod to `node`, or to the `nominatedNodeName` in its status.
    pub fn add(&mut self, pod: &Arc<PodInfo>, node: Option<&Arc<str>>) {
        self.remove(&pod.uid);
        let Some(node) = node.or(pod.nominated.as_ref()) else { return };
        self.by_node.entry(node.clone()).or_default().push(pod.clone());
        self.node_of.insert(pod.uid.clone(), node.clone());
    }

    /// Removes a nomination.
    pub fn remove(&mut self, uid: &str) {
        let Some(node) = self.node_of.remove(uid) else { return };
        if let Some(pods) = self.by_node.get_mut(&node) {
            pods.retain(|pod| &*pod.uid != uid);
            if pods.is_empty() {
                self.by_node.remove(&node);
            }
        }
    }

    /// Updates a pod. A nomination that is not yet in the pod's status is kept.
    pub fn update(&mut self, old: &PodInfo, new: &Arc<PodInfo>) {
        let nominated_node = if old.nominated.is_none() && new.nominated.is_none() {
            self.node_of.get(&old.uid).cloned()
        } else {
            None
        };
        self.remove(&old.uid);
        self.add(new, nominated_node.as_ref());
    }

    /// Returns the node that a pod is nominated to.
    pub fn node_of(&self, uid: &str) -> Option<&Arc<str>> {
        self.node_of.get(uid)
    }
}

impl Nominations for Nominator {
    fn on_node(&self, node: &str) -> &[Arc<PodInfo>] {
        self.by_node.get(node).map_or(&[], Vec::as_slice)
    }
}
