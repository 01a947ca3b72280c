//! A node and the resources that its pods use. Counterpart of upstream's `NodeInfo`.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1 as core;

use super::labels::{Labels, StringPool};
use super::pod::{HostPort, PodInfo};
use super::resources::Resources;
use super::selection::Taint;

/// Index of a node in the scheduler's tables. Reused after the node is removed.
pub type NodeId = u32;

/// A node with sums over its pods.
#[derive(Clone, Debug)]
pub struct NodeInfo {
    pub id: NodeId,
    pub name: Arc<str>,
    /// `None` if pods refer to a node that does not exist (any more).
    pub object: Option<Arc<core::Node>>,
    pub labels: Labels,
    pub taints: Box<[Taint]>,
    pub unschedulable: bool,
    pub allocatable: Resources,
    /// Images on the node with their sizes, sorted by name.
    pub images: Box<[(Arc<str>, i64)]>,
    pub features: Box<[String]>,
    /// Sum of the pods' requests.
    pub requested: Resources,
    /// Sum of CPU and memory requests with defaults for containers without requests.
    pub nonzero: [i64; 2],
    pub ports: HostPortInfo,
    /// Number of pods that use each claim, by `namespace/name`.
    pub claims: BTreeMap<Arc<str>, u32>,
    pub pods: Vec<Arc<PodInfo>>,
}

impl NodeInfo {
    /// A node of which only the name is known.
    pub fn named(id: NodeId, name: Arc<str>) -> NodeInfo {
        NodeInfo {
            id,
            name,
            object: None,
            labels: Labels::default(),
            taints: Box::default(),
            unschedulable: false,
            allocatable: Resources::default(),
            images: Box::default(),
            features: Box::default(),
            requested: Resources::default(),
            nonzero: [0; 2],
            ports: HostPortInfo::default(),
            claims: BTreeMap::new(),
            pods: Vec::new(),
        }
    }

    /// Sets the fields that come from the object.
    pub fn set(&mut self, node: Arc<core::Node>, strings: &mut StringPool) {
        let (spec, status) = (node.spec.as_ref(), node.status.as_ref());
        self.labels = strings.labels(node.metadata.labels.as_ref());
        let taints = spec.and_then(|spec| spec.taints.as_deref()).unwrap_or_default();
        self.taints = taints.iter().filter_map(Taint::read).collect();
        self.unschedulable = spec.and_then(|spec| spec.unschedulable).unwrap_or_default();
        self.allocatable = Resources::read(status.and_then(|status| status.allocatable.as_ref()), strings);
        let images = status.and_then(|status| status.images.as_deref()).unwrap_or_default();
        let mut sizes = Vec::new();
        for image in images {
            for name in image.names.iter().flatten() {
                sizes.push((strings.get_or_insert(name), image.size_bytes.unwrap_or_default()));
            }
        }
        sizes.sort();
        self.images = sizes.into();
        self.features = status.and_then(|status| status.declared_features.clone()).unwrap_or_default().into();
        self.object = Some(node);
    }

    /// Clears the fields that come from the object; pods stay.
    pub fn unset(&mut self) {
        let empty = NodeInfo::named(self.id, self.name.clone());
        let pods = std::mem::take(&mut self.pods);
        *self = empty;
        for pod in pods {
            self.add(pod);
        }
    }

    /// Adds a pod.
    pub fn add(&mut self, pod: Arc<PodInfo>) {
        self.adjust(&pod, 1);
        self.pods.push(pod);
    }

    /// Removes a pod.
    pub fn remove(&mut self, uid: &str) -> Option<Arc<PodInfo>> {
        let at = self.pods.iter().position(|pod| &*pod.uid == uid)?;
        let pod = self.pods.swap_remove(at);
        self.adjust(&pod, -1);
        Some(pod)
    }

    fn adjust(&mut self, pod: &PodInfo, sign: i64) {
        self.requested.adjust(&pod.requests.exact, sign);
        for (sum, amount) in self.nonzero.iter_mut().zip(pod.requests.nonzero) {
            *sum = sum.saturating_add(sign.saturating_mul(amount));
        }
        for port in &pod.ports {
            if sign > 0 { self.ports.add(port) } else { self.ports.remove(port) }
        }
        for claim in pod.named_claims() {
            let key: Arc<str> = format!("{}/{claim}", pod.namespace).into();
            if sign > 0 {
                *self.claims.entry(key).or_default() += 1;
            } else if let Some(count) = self.claims.get_mut(&key) {
                *count -= 1;
                if *count == 0 {
                    self.claims.remove(&key);
                }
            }
        }
    }

    /// Returns the size of an image on the node.
    pub fn image(&self, name: &str) -> Option<i64> {
        let at = self.images.binary_search_by(|(known, _)| (**known).cmp(name)).ok()?;
        Some(self.images[at].1)
    }
}

/// Host ports in use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostPortInfo(Vec<HostPort>);

impl HostPortInfo {
    fn add(&mut self, port: &HostPort) {
        self.0.push(port.clone());
    }

    fn remove(&mut self, port: &HostPort) {
        if let Some(at) = self.0.iter().position(|known| known == port) {
            self.0.swap_remove(at);
        }
    }

    /// Whether the port is in use on the same address or on all addresses.
    pub fn conflicts(&self, host_port: &HostPort) -> bool {
        self.0.iter().any(|used| used.conflicts_with(host_port))
    }

    /// All ports, sorted.
    pub fn sorted(&self) -> Vec<(Arc<str>, Arc<str>, i32)> {
        let mut all: Vec<_> = self.0.iter().map(|p| (p.ip.clone(), p.protocol.clone(), p.port)).collect();
        all.sort();
        all
    }
}
