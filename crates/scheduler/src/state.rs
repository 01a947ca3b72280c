//! The scheduler's cache of the cluster: nodes, the pods on them, and objects that plugins read.
//!
//! There is one copy. Events and decisions change it between scheduling cycles, never during one, so it also
//! serves as upstream's snapshot. A pod with a selected node is *assumed* on it until the binding's update
//! event arrives, or until the binding fails and the pod is forgotten.

pub mod node;
pub mod objects;
mod order;
pub mod pod;
pub mod resources;
pub mod selection;
pub mod topology;

use std::collections::HashMap;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use parking_lot::Mutex;

pub use node::{NodeId, NodeInfo};
pub use objects::Objects;
pub use pod::PodInfo;
pub use reconcile::labels;
pub use reconcile::labels::{Labels, StringPool};

use order::NodeOrder;
use topology::{AffinityTermCounts, PerNodeCounts, PodMatcher, Topology, TopologyCache};

/// The cache and the snapshot in one.
#[derive(Default)]
pub struct State {
    pub strings: StringPool,
    pub objects: Objects,
    /// By [`NodeId`].
    nodes: Vec<Option<NodeInfo>>,
    free: Vec<NodeId>,
    by_name: HashMap<Arc<str>, NodeId>,
    order: NodeOrder,
    /// Assigned and assumed pods, by UID.
    pod_states: HashMap<Arc<str>, PodState>,
    /// How many of them are assumed.
    assumed: usize,
    /// Number of nodes with each image.
    images: HashMap<Arc<str>, u32>,
    /// Number of pods that use each claim, by `namespace/name`.
    claims: HashMap<Arc<str>, u32>,
    terms: AffinityTermCounts,
    topology_cache: Mutex<TopologyCache>,
}

struct PodState {
    pod: Arc<PodInfo>,
    node: NodeId,
    assumed: Option<Assumed>,
}

#[derive(Clone, Copy)]
enum Assumed {
    /// The binding has not finished.
    Binding,
    /// The binding succeeded; the assumed pod expires unless its update event arrives before this time.
    Bound(Timestamp),
}

impl State {
    /// The nodes in the order in which they are filtered. Call [`State::refresh`] after changes.
    pub fn order(&self) -> &[NodeId] {
        self.order.list()
    }

    /// Updates the node order. Call it between scheduling cycles.
    pub fn refresh(&mut self) {
        self.order.refresh();
    }

    /// Returns a node by its ID, which must be in use.
    pub fn node(&self, id: NodeId) -> &NodeInfo {
        self.nodes[id as usize].as_ref().expect("a node ID is valid until the node is removed")
    }

    /// Returns a node by its name, if its object exists.
    pub fn node_by_name(&self, name: &str) -> Option<&NodeInfo> {
        let id = self.by_name.get(name)?;
        self.nodes[*id as usize].as_ref().filter(|node| node.object.is_some())
    }

    /// Number of assigned and assumed pods.
    pub fn pod_count(&self) -> usize {
        self.pod_states.len()
    }

    /// Number of assumed pods.
    pub fn assumed_count(&self) -> usize {
        self.assumed
    }

    /// All nodes whose object exists.
    pub fn nodes(&self) -> impl Iterator<Item = &NodeInfo> {
        self.nodes.iter().flatten().filter(|node| node.object.is_some())
    }

    /// Number of nodes with an image.
    pub fn nodes_with_image(&self, image: &str) -> u32 {
        self.images.get(image).copied().unwrap_or_default()
    }

    /// Number of assigned and assumed pods that use a claim.
    pub fn users_of_claim(&self, namespace: &str, name: &str) -> u32 {
        self.claims.get(&*objects::key(namespace, name)).copied().unwrap_or_default()
    }

    /// The affinity terms of pods on nodes.
    pub fn terms(&self) -> &AffinityTermCounts {
        &self.terms
    }

    /// Counts the pods on each node that match.
    pub fn count(&self, matcher: &PodMatcher) -> PerNodeCounts {
        self.topology_cache.lock().count(matcher, &self.nodes)
    }

    /// The domains of a topology key.
    pub fn topology(&self, key: &str) -> Arc<Topology> {
        self.topology_cache.lock().topology(key, &self.nodes)
    }

    /// Adds or updates a node. Returns its previous state without pods.
    pub fn set_node(&mut self, object: Arc<core::Node>) -> Option<NodeInfo> {
        let name = self.strings.get_or_insert(object.metadata.name.as_deref().unwrap_or_default());
        let id = self.node_id(&name);
        let node = self.nodes[id as usize].as_mut()?;
        let before = node.object.is_some().then(|| copy_without_pods(node));
        node.set(object, &mut self.strings);
        let node = &self.nodes[id as usize].as_ref().expect("node_id returns an existing entry");
        let topology_cache = self.topology_cache.get_mut();
        match &before {
            None => {
                self.order.add(id, &node.labels);
                topology_cache.add_node(id, &node.labels);
                for pod in &node.pods {
                    topology_cache.update_pod(id, pod, 1);
                    self.terms.update_pod(id, pod, 1);
                }
            }
            Some(before) if before.labels != node.labels => {
                self.order.update_labels(id, &before.labels, &node.labels);
                topology_cache.remove_node(id);
                topology_cache.add_node(id, &node.labels);
            }
            Some(_) => {}
        }
        let old = before.as_ref().map_or(&[][..], |before| &before.images);
        if old != &*node.images {
            count_images(&mut self.images, old, -1);
            count_images(&mut self.images, &node.images, 1);
        }
        before
    }

    /// Removes a node. Its pods stay until their own deletion.
    pub fn remove_node(&mut self, name: &str) -> Option<NodeInfo> {
        let id = *self.by_name.get(name)?;
        let node = self.nodes[id as usize].as_mut().filter(|node| node.object.is_some())?;
        let before = copy_without_pods(node);
        let topology_cache = self.topology_cache.get_mut();
        for pod in &node.pods {
            topology_cache.update_pod(id, pod, -1);
            self.terms.update_pod(id, pod, -1);
        }
        topology_cache.remove_node(id);
        self.order.remove(id, &before.labels);
        count_images(&mut self.images, &before.images, -1);
        node.unset();
        self.remove_node_if_empty(id);
        Some(before)
    }

    /// Adds or updates a pod with a node name. Returns its previous state.
    pub fn set_pod(&mut self, pod: Arc<PodInfo>) -> Option<Arc<PodInfo>> {
        let before = self.take_pod(&pod.uid);
        if let Some(name) = pod.node_name.clone() {
            self.add_pod(pod, &name, None);
        }
        before
    }

    /// Removes a pod. Returns its last state if it was on a node.
    pub fn remove_pod(&mut self, uid: &str) -> Option<Arc<PodInfo>> {
        self.take_pod(uid)
    }

    /// Returns a pod on a node.
    pub fn pod(&self, uid: &str) -> Option<&Arc<PodInfo>> {
        self.pod_states.get(uid).map(|pod_state| &pod_state.pod)
    }

    /// Whether a pod is assumed, that is, its binding is not confirmed by an update event.
    pub fn is_assumed(&self, uid: &str) -> bool {
        self.pod_states.get(uid).is_some_and(|pod_state| pod_state.assumed.is_some())
    }

    /// Assumes a pod on the selected node.
    pub fn assume_pod(&mut self, pod: Arc<PodInfo>, node: &Arc<str>) {
        self.take_pod(&pod.uid);
        self.add_pod(pod, node, Some(Assumed::Binding));
    }

    /// Records that the binding of an assumed pod succeeded. The pod expires unless its update event arrives
    /// in time.
    pub fn finish_binding(&mut self, uid: &str, deadline: Timestamp) {
        if let Some(assumed) = self.pod_states.get_mut(uid).and_then(|pod_state| pod_state.assumed.as_mut()) {
            *assumed = Assumed::Bound(deadline);
        }
    }

    /// Removes an assumed pod whose binding failed. Returns whether it was still assumed.
    pub fn forget_pod(&mut self, uid: &str) -> bool {
        self.is_assumed(uid) && self.take_pod(uid).is_some()
    }

    /// Removes assumed pods whose update event did not arrive in time. Returns their UIDs.
    pub fn remove_expired_assumed_pods(&mut self, now: Timestamp) -> Vec<Arc<str>> {
        let is_expired =
            |pod_state: &PodState| matches!(pod_state.assumed, Some(Assumed::Bound(until)) if until < now);
        let expired: Vec<Arc<str>> = self
            .pod_states
            .iter()
            .filter(|(_, pod_state)| is_expired(pod_state))
            .map(|(uid, _)| uid.clone())
            .collect();
        for uid in &expired {
            self.take_pod(uid);
        }
        expired
    }

    fn add_pod(&mut self, pod: Arc<PodInfo>, name: &Arc<str>, assumed: Option<Assumed>) {
        let id = self.node_id(name);
        let node = self.nodes[id as usize].as_mut().expect("node_id returns an existing entry");
        if node.object.is_some() {
            self.topology_cache.get_mut().update_pod(id, &pod, 1);
            self.terms.update_pod(id, &pod, 1);
        }
        node.add(pod.clone());
        for claim in pod.named_claims() {
            *self.claims.entry(objects::key(&pod.namespace, claim).into()).or_default() += 1;
        }
        self.assumed += usize::from(assumed.is_some());
        self.pod_states.insert(pod.uid.clone(), PodState { pod, node: id, assumed });
    }

    fn take_pod(&mut self, uid: &str) -> Option<Arc<PodInfo>> {
        let pod_state = self.pod_states.remove(uid)?;
        self.assumed -= usize::from(pod_state.assumed.is_some());
        let node = self.nodes[pod_state.node as usize].as_mut().expect("a node with pods has an entry");
        node.remove(uid);
        if node.object.is_some() {
            self.topology_cache.get_mut().update_pod(pod_state.node, &pod_state.pod, -1);
            self.terms.update_pod(pod_state.node, &pod_state.pod, -1);
        }
        for claim in pod_state.pod.named_claims() {
            let key = objects::key(&pod_state.pod.namespace, claim);
            if let Some(count) = self.claims.get_mut(&*key) {
                *count -= 1;
                if *count == 0 {
                    self.claims.remove(&*key);
                }
            }
        }
        self.remove_node_if_empty(pod_state.node);
        Some(pod_state.pod)
    }

    /// Returns the ID of a node and allocates one if necessary.
    fn node_id(&mut self, name: &Arc<str>) -> NodeId {
        if let Some(id) = self.by_name.get(name) {
            return *id;
        }
        let id = self.free.pop().unwrap_or(self.nodes.len() as NodeId);
        let node = Some(NodeInfo::named(id, name.clone()));
        match self.nodes.get_mut(id as usize) {
            Some(slot) => *slot = node,
            None => self.nodes.push(node),
        }
        self.by_name.insert(name.clone(), id);
        id
    }

    fn remove_node_if_empty(&mut self, id: NodeId) {
        let is_empty = |node: &NodeInfo| node.object.is_none() && node.pods.is_empty();
        if let Some(node) = self.nodes[id as usize].take_if(|node| is_empty(node)) {
            self.by_name.remove(&node.name);
            self.free.push(id);
        }
    }
}

/// Copies the fields of a node that come from its object.
fn copy_without_pods(node: &NodeInfo) -> NodeInfo {
    NodeInfo {
        object: node.object.clone(),
        labels: node.labels.clone(),
        taints: node.taints.clone(),
        unschedulable: node.unschedulable,
        allocatable: node.allocatable.clone(),
        images: node.images.clone(),
        features: node.features.clone(),
        ..NodeInfo::named(node.id, node.name.clone())
    }
}

fn count_images(counts: &mut HashMap<Arc<str>, u32>, images: &[(Arc<str>, i64)], sign: i32) {
    let mut last: Option<&Arc<str>> = None;
    for (image, _) in images {
        // The same name may be listed twice on a node; it counts once. Names are sorted.
        if last.replace(image) == Some(image) {
            continue;
        }
        let count = counts.entry(image.clone()).or_default();
        *count = count.saturating_add_signed(sign);
        if *count == 0 {
            counts.remove(image);
        }
    }
}

#[cfg(test)]
mod tests;
