//! PodTopologySpread: spreads similar pods over zones, nodes or other topology domains.
//!
//! The state keeps the number of matching pods on each node (see [`crate::state::topology`]); per pod the
//! plugin only sums up the counts by domain.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use k8s_openapi::api::core::v1 as core;
use serde::Deserialize;
use serde_json::Value;

use super::parse_args;
use crate::framework::{
    ClusterEvent, Cycle, Filter, MAX_SCORE, Plugin, PreFilter, PreFilterResult, PreScore, PreScoreResult,
    Requeue, Score, Status,
};
use crate::state::pod::{SpreadConstraint, spread_constraint};
use crate::state::selection::tolerates_taints;
use crate::state::topology::{NO_DOMAIN, PerNodeCounts, PodMatcher, Scope, Topology};
use crate::state::{Labels, NodeId, NodeInfo, PodInfo, State, StringPool};

pub const NAME: &str = "PodTopologySpread";

const HOSTNAME: &str = "kubernetes.io/hostname";
const REASON: &str = "node(s) didn't match pod topology spread constraints";
const REASON_LABEL: &str = "node(s) didn't match pod topology spread constraints (missing required label)";

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Args {
    default_constraints: Vec<core::TopologySpreadConstraint>,
    defaulting_type: DefaultingType,
}

#[derive(Default, Deserialize, PartialEq, Eq)]
enum DefaultingType {
    #[default]
    System,
    List,
}

struct PodTopologySpread {
    /// Constraints for pods without their own; the selector is that of the pod's Services and workloads.
    defaults: Vec<SpreadConstraint>,
    /// Whether the system defaults apply. Their nodes need not have every topology label.
    system: bool,
}

/// Creates the plugin.
pub fn make(args: &Value) -> Result<Plugin, String> {
    let args: Args = parse_args(args)?;
    let system = args.defaulting_type == DefaultingType::System;
    if system && !args.default_constraints.is_empty() {
        return Err("defaultingType: when .defaultingType is System, it must be empty".to_owned());
    }
    let mut typed = args.default_constraints;
    if system {
        typed = [(HOSTNAME, 3), ("topology.kubernetes.io/zone", 5)]
            .map(|(key, max_skew)| core::TopologySpreadConstraint {
                topology_key: key.to_owned(),
                max_skew,
                when_unsatisfiable: "ScheduleAnyway".to_owned(),
                ..core::TopologySpreadConstraint::default()
            })
            .to_vec();
    }
    let mut strings = StringPool::default();
    let read = |typed| spread_constraint(typed, &Labels::default(), &mut strings);
    let defaults = typed.iter().map(read).collect::<Result<_, _>>()?;
    let plugin = Arc::new(PodTopologySpread { defaults, system });
    Ok(Plugin::new(NAME).pre_filter(plugin.clone()).pre_score(plugin.clone()).requeue(plugin))
}

impl PodTopologySpread {
    /// Returns the constraints of a pod: `DoNotSchedule` if `hard`, otherwise `ScheduleAnyway`.
    fn constraints(&self, pod: &PodInfo, state: &State, hard: bool) -> Vec<SpreadConstraint> {
        if !pod.spread.is_empty() {
            return pod.spread.iter().filter(|constraint| constraint.hard == hard).cloned().collect();
        }
        let mut defaults: Vec<_> =
            self.defaults.iter().filter(|constraint| constraint.hard == hard).cloned().collect();
        if defaults.is_empty() {
            return defaults;
        }
        let selector = state.objects.default_selector(pod);
        if selector.is_everything() {
            return Vec::new();
        }
        for constraint in &mut defaults {
            constraint.selector = selector.clone();
        }
        defaults
    }
}

/// Counts the matching pods on each node.
fn count_matching_pods(cycle: &Cycle<'_>, constraint: &SpreadConstraint) -> PerNodeCounts {
    if constraint.selector.is_everything() {
        return PerNodeCounts::default();
    }
    let scope = Scope::Namespaces(vec![cycle.pod.namespace.clone()]);
    cycle
        .state
        .count(&PodMatcher { all_of: vec![(scope, constraint.selector.clone())], exclude_terminating: true })
}

/// Whether a node counts for a constraint, by its node affinity and taint policies.
fn matches_node_policies(constraint: &SpreadConstraint, pod: &PodInfo, node: &NodeInfo) -> bool {
    (!constraint.honor_affinity || pod.nodes.allows(node))
        && (!constraint.honor_taints || tolerates_taints(&node.taints, &pod.tolerations))
}

/// Whether every node counts, so that the policies need not be evaluated per node.
fn has_no_node_policies(constraint: &SpreadConstraint, pod: &PodInfo) -> bool {
    (!constraint.honor_affinity || pod.nodes.matches_all_nodes()) && !constraint.honor_taints
}

/// A constraint with its counts by domain.
#[derive(Clone)]
struct DomainPodCounts<'c> {
    constraint: Arc<SpreadConstraint>,
    pod: &'c PodInfo,
    topology: Arc<Topology>,
    /// Number of pods by domain; `None` for domains without counted nodes.
    by_domain: Vec<Option<u32>>,
    /// 1 if the pod matches its own selector, otherwise 0.
    self_match: i64,
}

impl DomainPodCounts<'_> {
    fn min_match(&self) -> i64 {
        let (mut least, mut domains) = (u32::MAX, 0);
        for count in self.by_domain.iter().flatten() {
            least = least.min(*count);
            domains += 1;
        }
        if domains < i64::from(self.constraint.min_domains) { 0 } else { i64::from(least) }
    }
}

impl PreFilter for PodTopologySpread {
    fn pre_filter<'c>(&'c self, cycle: &Cycle<'c>) -> PreFilterResult<'c> {
        let constraints = self.constraints(cycle.pod, cycle.state, true);
        if constraints.is_empty() {
            return PreFilterResult::Skip;
        }
        let topologies: Vec<_> =
            constraints.iter().map(|constraint| cycle.state.topology(&constraint.topology_key)).collect();
        let in_all = |node: NodeId| topologies.iter().all(|topology| topology.domain(node) != NO_DOMAIN);
        let mut all = Vec::new();
        for (constraint, topology) in constraints.into_iter().zip(&topologies) {
            let per_node = count_matching_pods(cycle, &constraint);
            let mut by_domain = vec![None; topology.len()];
            let all_nodes = has_no_node_policies(&constraint, cycle.pod);
            for &id in cycle.state.order() {
                if in_all(id)
                    && (all_nodes || matches_node_policies(&constraint, cycle.pod, cycle.state.node(id)))
                {
                    let count = per_node.get(id as usize).copied().unwrap_or_default();
                    *by_domain[topology.domain(id) as usize].get_or_insert(0) += count;
                }
            }
            let self_match = i64::from(cycle.pod.labels.matched_by(&constraint.selector));
            let (constraint, topology) = (Arc::new(constraint), topology.clone());
            all.push(DomainPodCounts { constraint, pod: cycle.pod, topology, by_domain, self_match });
        }
        let least = all.iter().map(DomainPodCounts::min_match).collect();
        PreFilterResult::Filter(Box::new(SpreadFilter { counts: all, min_matches: least }))
    }
}

#[derive(Clone)]
struct SpreadFilter<'c> {
    counts: Vec<DomainPodCounts<'c>>,
    /// The minimum over all domains, by constraint.
    min_matches: Vec<i64>,
}

impl SpreadFilter<'_> {
    fn update_counts(&mut self, pod: &PodInfo, node: &NodeInfo, by: i32) {
        let has_no_domain = |counts: &DomainPodCounts<'_>| counts.topology.domain(node.id) == NO_DOMAIN;
        if self.counts.iter().any(has_no_domain) {
            return;
        }
        for (counts, least) in self.counts.iter_mut().zip(&mut self.min_matches) {
            let counted = pod.namespace == counts.pod.namespace
                && !pod.terminating
                && !counts.constraint.selector.is_everything()
                && pod.labels.matched_by(&counts.constraint.selector)
                && matches_node_policies(&counts.constraint, counts.pod, node);
            if counted {
                let count = counts.by_domain[counts.topology.domain(node.id) as usize].get_or_insert(0);
                *count = count.saturating_add_signed(by);
                *least = counts.min_match();
            }
        }
    }
}

impl<'c> Filter<'c> for SpreadFilter<'c> {
    fn filter(&self, node: &NodeInfo) -> Status {
        for (counts, least) in self.counts.iter().zip(&self.min_matches) {
            let domain = counts.topology.domain(node.id);
            if domain == NO_DOMAIN {
                return Status::unresolvable(REASON_LABEL);
            }
            let count = i64::from(counts.by_domain[domain as usize].unwrap_or_default());
            if count + counts.self_match - least > i64::from(counts.constraint.max_skew) {
                return Status::unschedulable(REASON);
            }
        }
        Status::success()
    }

    fn add_pod(&mut self, pod: &PodInfo, node: &NodeInfo) {
        self.update_counts(pod, node, 1);
    }

    fn remove_pod(&mut self, pod: &PodInfo, node: &NodeInfo) {
        self.update_counts(pod, node, -1);
    }

    fn fork(&self) -> Option<Box<dyn Filter<'c> + 'c>> {
        Some(Box::new(self.clone()))
    }
}

impl PreScore for PodTopologySpread {
    fn pre_score<'c>(&'c self, cycle: &Cycle<'c>, nodes: &[NodeId]) -> PreScoreResult<'c> {
        let constraints = self.constraints(cycle.pod, cycle.state, false);
        if constraints.is_empty() {
            return PreScoreResult::Skip;
        }
        let need_all = !cycle.pod.spread.is_empty() || !self.system;
        let topologies: Vec<_> =
            constraints.iter().map(|constraint| cycle.state.topology(&constraint.topology_key)).collect();
        let counts_at =
            |node: NodeId| !need_all || topologies.iter().all(|topology| topology.domain(node) != NO_DOMAIN);
        let ignored: Vec<NodeId> = nodes.iter().copied().filter(|node| !counts_at(*node)).collect();
        let mut parts = Vec::new();
        for (constraint, topology) in constraints.iter().zip(&topologies) {
            let per_node = count_matching_pods(cycle, constraint);
            let on_host = &*constraint.topology_key == HOSTNAME;
            let size = if on_host {
                nodes.len() - ignored.len()
            } else {
                domains_of(nodes.iter().filter(|node| counts_at(**node)), topology)
            };
            let counts = if on_host {
                ConstraintCounts::Node(per_node)
            } else {
                let mut domain_counts = vec![0; topology.len()];
                let all_nodes = has_no_node_policies(constraint, cycle.pod);
                for &id in cycle.state.order() {
                    let domain = topology.domain(id);
                    if domain != NO_DOMAIN
                        && counts_at(id)
                        && (all_nodes || matches_node_policies(constraint, cycle.pod, cycle.state.node(id)))
                    {
                        domain_counts[domain as usize] +=
                            per_node.get(id as usize).copied().unwrap_or_default();
                    }
                }
                ConstraintCounts::Domain(domain_counts)
            };
            let weight = ((size + 2) as f64).ln();
            parts.push(ConstraintScore {
                topology: topology.clone(),
                counts,
                weight,
                skew_offset: f64::from(constraint.max_skew - 1),
            });
        }
        PreScoreResult::Score(Box::new(SpreadScore { constraints: parts, ignored }))
    }
}

/// Number of distinct label values on the nodes. Nodes without the label count as one more value.
fn domains_of<'a>(nodes: impl Iterator<Item = &'a NodeId>, topology: &Topology) -> usize {
    let mut seen = vec![false; topology.len() + 1];
    for node in nodes {
        let domain = topology.domain(*node);
        seen[if domain == NO_DOMAIN { topology.len() } else { domain as usize }] = true;
    }
    seen.into_iter().filter(|seen| *seen).count()
}

struct SpreadScore {
    constraints: Vec<ConstraintScore>,
    /// Nodes without all topology labels; they score 0.
    ignored: Vec<NodeId>,
}

struct ConstraintScore {
    topology: Arc<Topology>,
    counts: ConstraintCounts,
    weight: f64,
    skew_offset: f64,
}

enum ConstraintCounts {
    Node(PerNodeCounts),
    Domain(Vec<u32>),
}

impl Score for SpreadScore {
    fn score(&self, node: &NodeInfo) -> i64 {
        if !self.ignored.is_empty() && self.ignored.contains(&node.id) {
            return 0;
        }
        let mut sum = 0.0;
        for constraint in &self.constraints {
            let domain = constraint.topology.domain(node.id);
            if domain == NO_DOMAIN {
                continue;
            }
            let count = match &constraint.counts {
                ConstraintCounts::Node(counts) => counts.get(node.id as usize).copied().unwrap_or_default(),
                ConstraintCounts::Domain(counts) => counts[domain as usize],
            };
            sum += f64::from(count) * constraint.weight + constraint.skew_offset;
        }
        sum.round() as i64
    }

    fn normalize(&self, nodes: &[NodeId], scores: &mut [i64]) {
        let ignored = |node: &NodeId| !self.ignored.is_empty() && self.ignored.contains(node);
        let (mut least, mut most) = (i64::MAX, 0);
        for (node, score) in nodes.iter().zip(scores.iter()) {
            if !ignored(node) {
                least = least.min(*score);
                most = most.max(*score);
            }
        }
        for (node, score) in nodes.iter().zip(scores.iter_mut()) {
            *score = match (ignored(node), most) {
                (true, _) => 0,
                (false, 0) => MAX_SCORE,
                _ => MAX_SCORE * (most + least - *score) / most,
            };
        }
    }
}

impl Requeue for PodTopologySpread {
    fn is_schedulable_after_change(&self, pod: &PodInfo, change: &ClusterEvent<'_>, state: &State) -> bool {
        match change {
            ClusterEvent::Pod(pair) => self.is_schedulable_after_pod_change(pod, pair.old, pair.new, state),
            ClusterEvent::Node(pair) => {
                let constraints = self.constraints(pod, state, true);
                let has_all_topology_keys = |node: &NodeInfo| {
                    constraints.iter().all(|constraint| node.labels.get(&constraint.topology_key).is_some())
                };
                match (pair.old, pair.new) {
                    (Some(old), Some(new)) => {
                        let moved = |constraint: &SpreadConstraint| {
                            old.labels.get(&constraint.topology_key)
                                != new.labels.get(&constraint.topology_key)
                        };
                        has_all_topology_keys(old) != has_all_topology_keys(new)
                            || has_all_topology_keys(new)
                                && (constraints.iter().any(moved) || old.taints != new.taints)
                    }
                    (old, new) => new.or(old).is_some_and(has_all_topology_keys),
                }
            }
            _ => false,
        }
    }
}

impl PodTopologySpread {
    fn is_schedulable_after_pod_change(
        &self,
        pod: &PodInfo,
        old: Option<&PodInfo>,
        new: Option<&PodInfo>,
        state: &State,
    ) -> bool {
        let involved = |other: &PodInfo| {
            other.uid == pod.uid
                || (other.node_name.is_some() || other.nominated.is_some())
                    && other.namespace == pod.namespace
        };
        if [old, new].into_iter().flatten().any(|other| !involved(other)) {
            return false;
        }
        let constraints = self.constraints(pod, state, true);
        let counts =
            |other: &PodInfo, constraint: &SpreadConstraint| other.labels.matched_by(&constraint.selector);
        match (old, new) {
            (Some(old), Some(new)) => {
                let tolerations_changed = pod.uid == new.uid
                    && old.tolerations != new.tolerations
                    && constraints.iter().any(|constraint| constraint.honor_taints);
                tolerations_changed
                    || constraints.iter().any(|constraint| counts(old, constraint) != counts(new, constraint))
            }
            (old, new) => {
                let other = new.or(old);
                other.is_some_and(|other| constraints.iter().any(|constraint| counts(other, constraint)))
            }
        }
    }
}
