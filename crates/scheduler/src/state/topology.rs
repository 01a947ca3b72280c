//! Topology domains and pod counts per node, updated incrementally.
//!
//! Topology spread and pod affinity need the number of matching pods on each node. Upstream evaluates every
//! pod in each scheduling cycle. Here the counts for a matcher are cached and updated with every pod that is
//! added or removed, until they are evicted. The affinity terms of pods on nodes are counted by distinct
//! term, since pods of one template share their terms.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use api::selector::LabelSelector;

use super::labels::Labels;
use super::node::{NodeId, NodeInfo};
use super::pod::{AffinityTerm, PodInfo};

/// How many matchers have cached counts.
const MAX_CACHED_POD_COUNTS: usize = 512;

/// The domain of nodes without the topology label.
pub const NO_DOMAIN: u32 = u32::MAX;

/// Selects the pods to count: those that match all scopes and selectors.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PodMatcher {
    pub all_of: Vec<(Scope, LabelSelector)>,
    /// Do not count terminating pods.
    pub exclude_terminating: bool,
}

/// The namespaces of the pods to count.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    AllNamespaces,
    /// Sorted.
    Namespaces(Vec<Arc<str>>),
}

impl PodMatcher {
    /// Whether the pod is counted.
    pub fn matches(&self, pod: &PodInfo) -> bool {
        let is_match = |(scope, selector): &(Scope, LabelSelector)| {
            let inside = match scope {
                Scope::AllNamespaces => true,
                Scope::Namespaces(names) => names.contains(&pod.namespace),
            };
            inside && pod.labels.matched_by(selector)
        };
        !(self.exclude_terminating && pod.terminating) && self.all_of.iter().all(is_match)
    }
}

/// Number of pods on each node, by [`NodeId`].
pub type PerNodeCounts = Arc<Vec<u32>>;

/// The domains of a topology key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    /// By [`NodeId`]; [`NO_DOMAIN`] without the label.
    domain_of: Vec<u32>,
    values: Vec<Arc<str>>,
    /// Number of nodes in each domain.
    nodes: Vec<u32>,
}

impl Topology {
    /// Returns the domain of a node, or [`NO_DOMAIN`].
    pub fn domain(&self, node: NodeId) -> u32 {
        self.domain_of.get(node as usize).copied().unwrap_or(NO_DOMAIN)
    }

    /// Number of domains, including those without nodes now.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// Number of nodes in a domain.
    pub fn nodes_in(&self, domain: u32) -> u32 {
        self.nodes[domain as usize]
    }

    fn add_node(&mut self, node: NodeId, value: &Arc<str>) {
        let at = node as usize;
        if self.domain_of.len() <= at {
            self.domain_of.resize(at + 1, NO_DOMAIN);
        }
        let domain = self.values.iter().position(|known| known == value).unwrap_or_else(|| {
            self.values.push(value.clone());
            self.nodes.push(0);
            self.values.len() - 1
        });
        self.domain_of[at] = domain as u32;
        self.nodes[domain] += 1;
    }

    fn remove_node(&mut self, node: NodeId) {
        let domain = self.domain(node);
        if domain != NO_DOMAIN {
            self.domain_of[node as usize] = NO_DOMAIN;
            self.nodes[domain as usize] -= 1;
        }
    }

    fn build(key: &str, nodes: &[Option<NodeInfo>]) -> Topology {
        let mut topology = Topology { domain_of: vec![NO_DOMAIN; nodes.len()], ..Topology::default() };
        let mut known: HashMap<Arc<str>, u32> = HashMap::new();
        for node in nodes.iter().flatten().filter(|node| node.object.is_some()) {
            let Some(value) = node.labels.shared(key) else { continue };
            let domain = *known.entry(value.clone()).or_insert_with(|| {
                topology.values.push(value.clone());
                topology.nodes.push(0);
                topology.values.len() as u32 - 1
            });
            topology.domain_of[node.id as usize] = domain;
            topology.nodes[domain as usize] += 1;
        }
        topology
    }
}

struct CachedCounts {
    per_node: PerNodeCounts,
    last_used: u64,
}

/// Cached topologies and pod counts.
#[derive(Default)]
pub struct TopologyCache {
    topologies: HashMap<Arc<str>, Arc<Topology>>,
    cached_counts: HashMap<PodMatcher, CachedCounts>,
    query_count: u64,
}

impl TopologyCache {
    /// Returns the domains of a topology key.
    pub fn topology(&mut self, key: &str, nodes: &[Option<NodeInfo>]) -> Arc<Topology> {
        if let Some(known) = self.topologies.get(key) {
            return known.clone();
        }
        let built = Arc::new(Topology::build(key, nodes));
        self.topologies.insert(key.into(), built.clone());
        built
    }

    /// Counts the matching pods on each node.
    pub fn count(&mut self, matcher: &PodMatcher, nodes: &[Option<NodeInfo>]) -> PerNodeCounts {
        self.query_count += 1;
        if let Some(known) = self.cached_counts.get_mut(matcher) {
            known.last_used = self.query_count;
            return known.per_node.clone();
        }
        if self.cached_counts.len() >= MAX_CACHED_POD_COUNTS {
            self.evict_oldest();
        }
        let mut per_node = vec![0; nodes.len()];
        for node in nodes.iter().flatten().filter(|node| node.object.is_some()) {
            per_node[node.id as usize] = node.pods.iter().filter(|pod| matcher.matches(pod)).count() as u32;
        }
        let per_node = Arc::new(per_node);
        let counted = CachedCounts { per_node: per_node.clone(), last_used: self.query_count };
        self.cached_counts.insert(matcher.clone(), counted);
        per_node
    }

    /// Evicts the older half at once, so that this happens rarely.
    fn evict_oldest(&mut self) {
        let mut last_used: Vec<u64> = self.cached_counts.values().map(|counted| counted.last_used).collect();
        last_used.sort_unstable();
        let middle = last_used[last_used.len() / 2];
        self.cached_counts.retain(|_, counted| counted.last_used > middle);
    }

    /// Updates the counts for a pod that was added to (1) or removed from (-1) a node.
    pub(super) fn update_pod(&mut self, node: NodeId, pod: &PodInfo, sign: i64) {
        for (matcher, counted) in &mut self.cached_counts {
            if matcher.matches(pod) {
                let per_node = Arc::make_mut(&mut counted.per_node);
                if per_node.len() <= node as usize {
                    per_node.resize(node as usize + 1, 0);
                }
                let count = &mut per_node[node as usize];
                *count = count.saturating_add_signed(sign as i32);
            }
        }
    }

    /// Adds a new node, or one whose labels changed.
    pub(super) fn add_node(&mut self, node: NodeId, labels: &Labels) {
        for (key, topology) in &mut self.topologies {
            if let Some(value) = labels.shared(key) {
                Arc::make_mut(topology).add_node(node, value);
            }
        }
    }

    /// Removes a node, also before its labels change.
    pub(super) fn remove_node(&mut self, node: NodeId) {
        for topology in self.topologies.values_mut().filter(|topology| topology.domain(node) != NO_DOMAIN) {
            Arc::make_mut(topology).remove_node(node);
        }
    }
}

/// Number of pods with a term on each node.
pub type NodeCounts = BTreeMap<NodeId, u32>;

/// The affinity terms of pods on nodes, by distinct term.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct AffinityTermCounts {
    /// Required anti-affinity.
    pub anti: HashMap<Arc<AffinityTerm>, NodeCounts>,
    /// For scoring: preferred affinity (positive weight), preferred anti-affinity (negative weight) and
    /// required affinity (no weight).
    pub scoring: HashMap<(Option<i32>, Arc<AffinityTerm>), NodeCounts>,
}

impl AffinityTermCounts {
    pub(super) fn update_pod(&mut self, node: NodeId, pod: &PodInfo, sign: i64) {
        let Some(affinity) = &pod.affinity else { return };
        for term in &affinity.required_anti {
            adjust_count(&mut self.anti, term.clone(), node, sign);
        }
        for term in &affinity.required {
            adjust_count(&mut self.scoring, (None, term.clone()), node, sign);
        }
        for (weight, term) in &affinity.preferred {
            adjust_count(&mut self.scoring, (Some(*weight), term.clone()), node, sign);
        }
        for (weight, term) in &affinity.preferred_anti {
            adjust_count(&mut self.scoring, (Some(-*weight), term.clone()), node, sign);
        }
    }
}

fn adjust_count<K: std::hash::Hash + Eq>(
    table: &mut HashMap<K, NodeCounts>,
    key: K,
    node: NodeId,
    sign: i64,
) {
    if sign > 0 {
        *table.entry(key).or_default().entry(node).or_default() += 1;
        return;
    }
    let Some(uses) = table.get_mut(&key) else { return };
    if let Some(count) = uses.get_mut(&node) {
        *count -= 1;
        if *count == 0 {
            uses.remove(&node);
        }
    }
    if uses.is_empty() {
        table.remove(&key);
    }
}
