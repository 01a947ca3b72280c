//! PodTopologySpread: pods that look alike are spread over zones, nodes or other domains.
//!
//! How many there are on each node is kept by the state (see [`crate::state::tally`]); what is left to do per
//! pod is to sum them up by domain.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use k8s_openapi::api::core::v1 as core;
use serde::Deserialize;
use serde_json::Value;

use super::arguments;
use crate::framework::{
    Change, Cycle, Filter, MAX_SCORE, Plugin, PreFilter, PreScore, Prepared, Requeue, Score, Scoring, Status,
};
use crate::state::pod::{SpreadConstraint, spread_constraint};
use crate::state::selection::tolerated;
use crate::state::tally::{Matcher, NOWHERE, PerNode, Scope, Topology};
use crate::state::{Labels, NodeId, NodeInfo, PodInfo, State, Strings};

pub const NAME: &str = "PodTopologySpread";

const HOSTNAME: &str = "kubernetes.io/hostname";
const REASON: &str = "node(s) didn't match pod topology spread constraints";
const REASON_LABEL: &str = "node(s) didn't match pod topology spread constraints (missing required label)";

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Args {
    default_constraints: Vec<core::TopologySpreadConstraint>,
    defaulting_type: Defaulting,
}

#[derive(Default, Deserialize, PartialEq, Eq)]
enum Defaulting {
    #[default]
    System,
    List,
}

struct PodTopologySpread {
    /// For pods without constraints; their selector is that of the pods they belong together with.
    defaults: Vec<SpreadConstraint>,
    /// The defaults are the system's, for which a node need not have every label.
    system: bool,
}

/// Makes the plugin.
pub fn make(args: &Value) -> Result<Plugin, String> {
    let args: Args = arguments(args)?;
    let system = args.defaulting_type == Defaulting::System;
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
    let mut strings = Strings::default();
    let read = |typed| spread_constraint(typed, &Labels::default(), &mut strings);
    let defaults = typed.iter().map(read).collect::<Result<_, _>>()?;
    let plugin = Arc::new(PodTopologySpread { defaults, system });
    Ok(Plugin::new(NAME).pre_filter(plugin.clone()).pre_score(plugin.clone()).requeue(plugin))
}

impl PodTopologySpread {
    /// The constraints of a pod that must, or should, hold.
    fn constraints(&self, pod: &PodInfo, state: &State, hard: bool) -> Vec<SpreadConstraint> {
        if !pod.spread.is_empty() {
            return pod.spread.iter().filter(|constraint| constraint.hard == hard).cloned().collect();
        }
        let mut defaults: Vec<_> =
            self.defaults.iter().filter(|constraint| constraint.hard == hard).cloned().collect();
        if defaults.is_empty() {
            return defaults;
        }
        let selector = state.objects.siblings(pod);
        if selector.is_everything() {
            return Vec::new();
        }
        for constraint in &mut defaults {
            constraint.selector = selector.clone();
        }
        defaults
    }
}

/// The pods a constraint counts, on each node.
fn counted(cycle: &Cycle<'_>, constraint: &SpreadConstraint) -> PerNode {
    if constraint.selector.is_everything() {
        return PerNode::default();
    }
    let scope = Scope::Namespaces(vec![cycle.pod.namespace.clone()]);
    cycle.state.count(&Matcher { all_of: vec![(scope, constraint.selector.clone())], living: true })
}

/// Whether a node counts at all for a constraint.
fn included(constraint: &SpreadConstraint, pod: &PodInfo, node: &NodeInfo) -> bool {
    (!constraint.honor_affinity || pod.nodes.allows(node))
        && (!constraint.honor_taints || tolerated(&node.taints, &pod.tolerations))
}

/// Whether every node counts, so that none needs to be asked.
fn includes_all(constraint: &SpreadConstraint, pod: &PodInfo) -> bool {
    (!constraint.honor_affinity || pod.nodes.is_anywhere()) && !constraint.honor_taints
}

/// One constraint with its counts by domain.
#[derive(Clone)]
struct Counts<'c> {
    constraint: Arc<SpreadConstraint>,
    pod: &'c PodInfo,
    topology: Arc<Topology>,
    /// Pods by domain; `None` for domains none of whose nodes count.
    by_domain: Vec<Option<u32>>,
    /// The pod itself counts.
    itself: i64,
}

impl Counts<'_> {
    fn least(&self) -> i64 {
        let (mut least, mut domains) = (u32::MAX, 0);
        for count in self.by_domain.iter().flatten() {
            least = least.min(*count);
            domains += 1;
        }
        if domains < i64::from(self.constraint.min_domains) { 0 } else { i64::from(least) }
    }
}

impl PreFilter for PodTopologySpread {
    fn pre_filter<'c>(&'c self, cycle: &Cycle<'c>) -> Prepared<'c> {
        let constraints = self.constraints(cycle.pod, cycle.state, true);
        if constraints.is_empty() {
            return Prepared::Skip;
        }
        let topologies: Vec<_> =
            constraints.iter().map(|constraint| cycle.state.topology(&constraint.topology_key)).collect();
        let in_all = |node: NodeId| topologies.iter().all(|topology| topology.domain(node) != NOWHERE);
        let mut all = Vec::new();
        for (constraint, topology) in constraints.into_iter().zip(&topologies) {
            let per_node = counted(cycle, &constraint);
            let mut by_domain = vec![None; topology.len()];
            let everyone = includes_all(&constraint, cycle.pod);
            for &id in cycle.state.order() {
                if in_all(id) && (everyone || included(&constraint, cycle.pod, cycle.state.node(id))) {
                    let count = per_node.get(id as usize).copied().unwrap_or_default();
                    *by_domain[topology.domain(id) as usize].get_or_insert(0) += count;
                }
            }
            let itself = i64::from(cycle.pod.labels.matched_by(&constraint.selector));
            let (constraint, topology) = (Arc::new(constraint), topology.clone());
            all.push(Counts { constraint, pod: cycle.pod, topology, by_domain, itself });
        }
        let least = all.iter().map(Counts::least).collect();
        Prepared::Filter(Box::new(Spread { counts: all, least }))
    }
}

#[derive(Clone)]
struct Spread<'c> {
    counts: Vec<Counts<'c>>,
    /// The least loaded domain of each.
    least: Vec<i64>,
}

impl Spread<'_> {
    fn step(&mut self, pod: &PodInfo, node: &NodeInfo, by: i32) {
        let misses = |counts: &Counts<'_>| counts.topology.domain(node.id) == NOWHERE;
        if self.counts.iter().any(misses) {
            return;
        }
        for (counts, least) in self.counts.iter_mut().zip(&mut self.least) {
            let counted = pod.namespace == counts.pod.namespace
                && !pod.terminating
                && !counts.constraint.selector.is_everything()
                && pod.labels.matched_by(&counts.constraint.selector)
                && included(&counts.constraint, counts.pod, node);
            if counted {
                let count = counts.by_domain[counts.topology.domain(node.id) as usize].get_or_insert(0);
                *count = count.saturating_add_signed(by);
                *least = counts.least();
            }
        }
    }
}

impl<'c> Filter<'c> for Spread<'c> {
    fn filter(&self, node: &NodeInfo) -> Status {
        for (counts, least) in self.counts.iter().zip(&self.least) {
            let domain = counts.topology.domain(node.id);
            if domain == NOWHERE {
                return Status::unresolvable(REASON_LABEL);
            }
            let count = i64::from(counts.by_domain[domain as usize].unwrap_or_default());
            if count + counts.itself - least > i64::from(counts.constraint.max_skew) {
                return Status::unschedulable(REASON);
            }
        }
        Status::success()
    }

    fn add_pod(&mut self, pod: &PodInfo, node: &NodeInfo) {
        self.step(pod, node, 1);
    }

    fn remove_pod(&mut self, pod: &PodInfo, node: &NodeInfo) {
        self.step(pod, node, -1);
    }

    fn fork(&self) -> Option<Box<dyn Filter<'c> + 'c>> {
        Some(Box::new(self.clone()))
    }
}

impl PreScore for PodTopologySpread {
    fn pre_score<'c>(&'c self, cycle: &Cycle<'c>, nodes: &[NodeId]) -> Scoring<'c> {
        let constraints = self.constraints(cycle.pod, cycle.state, false);
        if constraints.is_empty() {
            return Scoring::Skip;
        }
        let need_all = !cycle.pod.spread.is_empty() || !self.system;
        let topologies: Vec<_> =
            constraints.iter().map(|constraint| cycle.state.topology(&constraint.topology_key)).collect();
        let counts_at =
            |node: NodeId| !need_all || topologies.iter().all(|topology| topology.domain(node) != NOWHERE);
        let ignored: Vec<NodeId> = nodes.iter().copied().filter(|node| !counts_at(*node)).collect();
        let mut parts = Vec::new();
        for (constraint, topology) in constraints.iter().zip(&topologies) {
            let per_node = counted(cycle, constraint);
            let on_host = &*constraint.topology_key == HOSTNAME;
            let size = if on_host {
                nodes.len() - ignored.len()
            } else {
                domains_of(nodes.iter().filter(|node| counts_at(**node)), topology)
            };
            let counts = if on_host {
                PartCounts::Node(per_node)
            } else {
                let mut sums = vec![0; topology.len()];
                let everyone = includes_all(constraint, cycle.pod);
                for &id in cycle.state.order() {
                    let domain = topology.domain(id);
                    if domain != NOWHERE
                        && counts_at(id)
                        && (everyone || included(constraint, cycle.pod, cycle.state.node(id)))
                    {
                        sums[domain as usize] += per_node.get(id as usize).copied().unwrap_or_default();
                    }
                }
                PartCounts::Domain(sums)
            };
            let weight = ((size + 2) as f64).ln();
            parts.push(Part {
                topology: topology.clone(),
                counts,
                weight,
                slack: f64::from(constraint.max_skew - 1),
            });
        }
        Scoring::Score(Box::new(Crowding { parts, ignored }))
    }
}

/// How many values of the label the nodes have; those without it are of one more.
fn domains_of<'a>(nodes: impl Iterator<Item = &'a NodeId>, topology: &Topology) -> usize {
    let mut seen = vec![false; topology.len() + 1];
    for node in nodes {
        let domain = topology.domain(*node);
        seen[if domain == NOWHERE { topology.len() } else { domain as usize }] = true;
    }
    seen.into_iter().filter(|seen| *seen).count()
}

struct Crowding {
    parts: Vec<Part>,
    /// Nodes that lack a label: they score nothing.
    ignored: Vec<NodeId>,
}

struct Part {
    topology: Arc<Topology>,
    counts: PartCounts,
    weight: f64,
    slack: f64,
}

enum PartCounts {
    Node(PerNode),
    Domain(Vec<u32>),
}

impl Score for Crowding {
    fn score(&self, node: &NodeInfo) -> i64 {
        if !self.ignored.is_empty() && self.ignored.contains(&node.id) {
            return 0;
        }
        let mut sum = 0.0;
        for part in &self.parts {
            let domain = part.topology.domain(node.id);
            if domain == NOWHERE {
                continue;
            }
            let count = match &part.counts {
                PartCounts::Node(counts) => counts.get(node.id as usize).copied().unwrap_or_default(),
                PartCounts::Domain(counts) => counts[domain as usize],
            };
            sum += f64::from(count) * part.weight + part.slack;
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
    fn helps(&self, pod: &PodInfo, change: &Change<'_>, state: &State) -> bool {
        match change {
            Change::Pod(pair) => self.pod_helps(pod, pair.old, pair.new, state),
            Change::Node(pair) => {
                let constraints = self.constraints(pod, state, true);
                let labelled = |node: &NodeInfo| {
                    constraints.iter().all(|constraint| node.labels.get(&constraint.topology_key).is_some())
                };
                match (pair.old, pair.new) {
                    (Some(old), Some(new)) => {
                        let moved = |constraint: &SpreadConstraint| {
                            old.labels.get(&constraint.topology_key)
                                != new.labels.get(&constraint.topology_key)
                        };
                        labelled(old) != labelled(new)
                            || labelled(new) && (constraints.iter().any(moved) || old.taints != new.taints)
                    }
                    (old, new) => new.or(old).is_some_and(labelled),
                }
            }
            _ => false,
        }
    }
}

impl PodTopologySpread {
    fn pod_helps(&self, pod: &PodInfo, old: Option<&PodInfo>, new: Option<&PodInfo>, state: &State) -> bool {
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
                let bears_more = pod.uid == new.uid
                    && old.tolerations != new.tolerations
                    && constraints.iter().any(|constraint| constraint.honor_taints);
                bears_more
                    || constraints.iter().any(|constraint| counts(old, constraint) != counts(new, constraint))
            }
            (old, new) => {
                let other = new.or(old);
                other.is_some_and(|other| constraints.iter().any(|constraint| counts(other, constraint)))
            }
        }
    }
}
