//! The graph of the node authorizer: which objects are related to which node, through the pods on
//! it and the volumes that they use.
//!
//! Updated incrementally, so that an authorization costs a few lookups however many pods there are.
//! Upstream: `graph.go` in the node authorizer.

use std::collections::HashMap;
use std::sync::Arc;

use api::json::JsonExt as _;
use serde_json::Value;

use super::references::{self, REFERENCE_KINDS, ReferenceKind};
use crate::cache::View;
use crate::object::Object;

/// The source resources, in the order of the indices that `apply` receives.
pub const SOURCE_RESOURCES: [(&str, &str); 4] = [
    ("", "pods"),
    ("", "persistentvolumes"),
    ("storage.k8s.io", "volumeattachments"),
    ("resource.k8s.io", "resourceslices"),
];

#[derive(Default)]
pub struct Graph {
    /// Pods with a node, by `namespace/name`.
    pods: HashMap<Arc<str>, PodVertex>,
    /// For each reference kind: what pods reference, by `namespace/name`.
    referenced: [HashMap<Arc<str>, NodePodCounts>; REFERENCE_KINDS],
    volumes: HashMap<Arc<str>, VolumeVertex>,
    /// The volumes that reference a secret, by the secret's `namespace/name`.
    secrets: HashMap<Arc<str>, Vec<Arc<str>>>,
    attachments: HashMap<String, String>,
    slices: HashMap<String, String>,
}

/// The nodes that something is related to, each with the number of pods that relate it.
type NodePodCounts = HashMap<Arc<str>, u32>;

struct PodVertex {
    node: Arc<str>,
    refs: Box<[(ReferenceKind, Arc<str>)]>,
}

struct VolumeVertex {
    claim: Arc<str>,
    secrets: Box<[Arc<str>]>,
}

/// The vertex types of the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VertexType {
    Pod,
    Referenced(ReferenceKind),
    Volume,
    Attachment,
    Slice,
}

impl Graph {
    /// Whether an object is related to a node.
    pub fn is_related(&self, vertex: VertexType, namespace: &str, name: &str, node: &str) -> bool {
        let key = || format!("{namespace}/{name}");
        match vertex {
            VertexType::Pod => self.pods.get(key().as_str()).is_some_and(|pod| *pod.node == *node),
            VertexType::Attachment => self.attachments.get(name).is_some_and(|at| at == node),
            VertexType::Slice => self.slices.get(name).is_some_and(|of| of == node),
            VertexType::Volume => self.is_volume_related(name, node),
            VertexType::Referenced(kind) => {
                let key = key();
                let by_volume = || {
                    let volumes = self.secrets.get(key.as_str()).filter(|_| kind == ReferenceKind::Secret);
                    volumes.into_iter().flatten().any(|volume| self.is_volume_related(volume, node))
                };
                self.is_referenced(kind, &key, node) || by_volume()
            }
        }
    }

    fn is_referenced(&self, kind: ReferenceKind, key: &str, node: &str) -> bool {
        self.referenced[kind as usize].get(key).is_some_and(|nodes| nodes.contains_key(node))
    }

    fn is_volume_related(&self, name: &str, node: &str) -> bool {
        let volume = self.volumes.get(name);
        volume.is_some_and(|volume| {
            self.is_referenced(ReferenceKind::PersistentVolumeClaim, &volume.claim, node)
        })
    }

    fn put_pod(&mut self, key: &str, pod: &Value) {
        self.remove_pod(key);
        let node = pod.at("spec").text("nodeName");
        if node.is_empty() {
            return;
        }
        let namespace = pod.at("metadata").text("namespace");
        let mut refs: Vec<(ReferenceKind, String)> = Vec::new();
        let mut add = |kind, name: &str| {
            let key = format!("{namespace}/{name}");
            if !refs.iter().any(|(other, known)| *other == kind && *known == key) {
                refs.push((kind, key));
            }
        };
        // Mirror pods are created by kubelets: their references must not grant access to the node.
        if !references::is_mirror(pod) {
            references::visit_pod_references(pod, &mut add);
            references::ephemeral_claims(pod)
                .for_each(|name| add(ReferenceKind::PersistentVolumeClaim, &name));
        }
        let node: Arc<str> = node.into();
        let mut stored = Vec::with_capacity(refs.len());
        for (kind, key) in refs {
            let index = &mut self.referenced[kind as usize];
            // Share one allocation of each key.
            let key = index.get_key_value(key.as_str()).map_or_else(|| key.into(), |(key, _)| key.clone());
            *index.entry(key.clone()).or_default().entry(node.clone()).or_default() += 1;
            stored.push((kind, key));
        }
        self.pods.insert(key.into(), PodVertex { node, refs: stored.into() });
    }

    fn remove_pod(&mut self, key: &str) {
        let Some(pod) = self.pods.remove(key) else { return };
        for (kind, key) in &pod.refs {
            let index = &mut self.referenced[*kind as usize];
            let Some(nodes) = index.get_mut(key) else { continue };
            if let Some(count) = nodes.get_mut(&pod.node) {
                *count -= 1;
                if *count == 0 {
                    nodes.remove(&pod.node);
                }
            }
            if nodes.is_empty() {
                index.remove(key);
            }
        }
    }

    fn put_volume(&mut self, name: &str, volume: &Value) {
        self.remove_volume(name);
        let claim = volume.at("spec").at("claimRef");
        if claim.is_null() {
            return;
        }
        let name: Arc<str> = name.into();
        let secrets = references::secrets_of_volume(volume).into_iter();
        let mut secrets: Vec<Arc<str>> =
            secrets.map(|(namespace, name)| format!("{namespace}/{name}").into()).collect();
        secrets.sort();
        secrets.dedup();
        for secret in &secrets {
            self.secrets.entry(secret.clone()).or_default().push(name.clone());
        }
        let claim = format!("{}/{}", claim.text("namespace"), claim.text("name")).into();
        self.volumes.insert(name, VolumeVertex { claim, secrets: secrets.into() });
    }

    fn remove_volume(&mut self, name: &str) {
        let Some(volume) = self.volumes.remove(name) else { return };
        for secret in &volume.secrets {
            if let Some(volumes) = self.secrets.get_mut(secret) {
                volumes.retain(|other| **other != *name);
                if volumes.is_empty() {
                    self.secrets.remove(secret);
                }
            }
        }
    }

    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.pods.is_empty()
            && self.referenced.iter().all(HashMap::is_empty)
            && self.volumes.is_empty()
            && self.secrets.is_empty()
            && self.attachments.is_empty()
            && self.slices.is_empty()
    }
}

impl View for Graph {
    fn apply(&mut self, kind: usize, object: &Object, deleted: bool) {
        let name = object.name();
        match kind {
            0 => {
                let key = format!("{}/{name}", object.namespace());
                if deleted {
                    self.remove_pod(&key);
                } else if !self.is_up_to_date(&key, object) {
                    self.put_pod(&key, &object.value());
                }
            }
            1 if deleted => self.remove_volume(name),
            1 => self.put_volume(name, &object.value()),
            _ => {
                let index = if kind == 2 { &mut self.attachments } else { &mut self.slices };
                index.remove(name);
                let node = if deleted {
                    String::new()
                } else {
                    object.value().at("spec").text("nodeName").to_owned()
                };
                if !node.is_empty() {
                    index.insert(name.to_owned(), node);
                }
            }
        }
    }
}

impl Graph {
    /// Whether a pod change needs no decoding, as most changes, which are of the status: a pod
    /// without a node has no relations, and a pod with a node gains references only with an
    /// ephemeral container or a resource claim. The text search may find false positives, never
    /// false negatives.
    fn is_up_to_date(&self, key: &str, pod: &Object) -> bool {
        const FIELDS_WITH_NEW_REFERENCES: [&str; 3] =
            ["\"ephemeralContainers\":[", "\"resourceClaimStatuses\":[", "\"extendedResourceClaimStatus\":{"];
        match self.pods.contains_key(key) {
            false => !pod.contains_text("\"nodeName\":\""),
            true => !FIELDS_WITH_NEW_REFERENCES.iter().any(|text| pod.contains_text(text)),
        }
    }
}
