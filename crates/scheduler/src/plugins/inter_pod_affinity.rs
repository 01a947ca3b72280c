//! InterPodAffinity: pod affinity and anti-affinity.
//!
//! The state keeps the number of matching pods on each node and the terms of the pods there (see
//! [`crate::state::topology`]); per pod the plugin only sums up the counts by topology domain.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;

use super::parse_args;
use crate::framework::{
    ClusterEvent, Cycle, FastFilter, Filter, MAX_SCORE, Plugin, PreFilter, PreFilterResult, PreScore,
    PreScoreResult, Requeue, Score, Status,
};
use crate::state::objects::Objects;
use crate::state::pod::AffinityTerm;
use crate::state::topology::{NO_DOMAIN, PodMatcher, Scope, Topology};
use crate::state::{NodeId, NodeInfo, PodInfo, State};

pub const NAME: &str = "InterPodAffinity";

const AFFINITY_MISMATCH: &str = "node(s) didn't match pod affinity rules";
const ANTI_AFFINITY_MISMATCH: &str = "node(s) didn't match pod anti-affinity rules";
const EXISTING_ANTI_AFFINITY_MISMATCH: &str = "node(s) didn't satisfy existing pods anti-affinity rules";

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Args {
    hard_pod_affinity_weight: i64,
    ignore_preferred_terms_of_existing_pods: bool,
}

impl Default for Args {
    fn default() -> Args {
        Args { hard_pod_affinity_weight: 1, ignore_preferred_terms_of_existing_pods: false }
    }
}

struct InterPodAffinity(Args);

/// Creates the plugin.
pub fn make(args: &Value) -> Result<Plugin, String> {
    let args: Args = parse_args(args)?;
    if !(0..=100).contains(&args.hard_pod_affinity_weight) {
        return Err("hardPodAffinityWeight: not in valid range [0, 100]".to_owned());
    }
    let plugin = Arc::new(InterPodAffinity(args));
    Ok(Plugin::new(NAME).pre_filter(plugin.clone()).pre_score(plugin.clone()).requeue(plugin))
}

/// The namespaces of a term, with its namespace selector resolved.
fn scope(term: &AffinityTerm, objects: &Objects) -> Scope {
    if term.namespace_selector.is_everything() {
        return Scope::AllNamespaces;
    }
    let mut namespaces = term.namespaces.clone();
    if !term.namespace_selector.is_nothing() {
        namespaces.extend(objects.namespaces(&term.namespace_selector));
        namespaces.sort();
        namespaces.dedup();
    }
    Scope::Namespaces(namespaces)
}

fn matcher<'t>(terms: impl Iterator<Item = &'t Arc<AffinityTerm>>, objects: &Objects) -> PodMatcher {
    let all_of = terms.map(|term| (scope(term, objects), term.selector.clone())).collect();
    PodMatcher { all_of, exclude_terminating: false }
}

/// Number of pods by topology domain, for one topology key.
#[derive(Clone)]
struct DomainCounts {
    key: Arc<str>,
    topology: Arc<Topology>,
    counts: Vec<i64>,
    /// Sum over all domains.
    total: i64,
}

impl DomainCounts {
    fn new(key: &Arc<str>, state: &State) -> DomainCounts {
        let topology = state.topology(key);
        DomainCounts { key: key.clone(), counts: vec![0; topology.len()], topology, total: 0 }
    }

    fn count_at(&self, node: NodeId) -> Option<i64> {
        let domain = self.topology.domain(node);
        (domain != NO_DOMAIN).then(|| self.counts[domain as usize])
    }

    /// Whether the node's domain has matching pods.
    fn has_pods(&self, node: NodeId) -> bool {
        self.count_at(node).is_some_and(|count| count > 0)
    }

    fn add(&mut self, node: NodeId, by: i64) {
        let domain = self.topology.domain(node);
        if domain != NO_DOMAIN {
            self.counts[domain as usize] += by;
            self.total += by;
        }
    }
}

/// Returns the counts for a topology key; adds them if missing. A pod has few keys, so a list is enough.
fn counts_for_key<'a>(
    list: &'a mut Vec<DomainCounts>,
    key: &Arc<str>,
    state: &State,
) -> &'a mut DomainCounts {
    let at = list.iter().position(|domains| domains.key == *key).unwrap_or_else(|| {
        list.push(DomainCounts::new(key, state));
        list.len() - 1
    });
    &mut list[at]
}

#[derive(Clone)]
struct AffinityFilter<'c> {
    cycle: Cycle<'c>,
    /// Domains of pods whose anti-affinity excludes this pod.
    existing_anti_affinity_counts: Vec<DomainCounts>,
    /// For each affinity term, the pods that match all terms.
    affinity_counts: Vec<DomainCounts>,
    affinity_matcher: PodMatcher,
    /// For each distinct topology key of anti-affinity.
    anti_affinity_counts: Vec<DomainCounts>,
    anti_affinity_terms: Vec<(Arc<str>, PodMatcher)>,
    /// Whether the pod matches its own affinity terms: it may then be the first of its group.
    matches_itself: bool,
}

impl PreFilter for InterPodAffinity {
    fn pre_filter<'c>(&'c self, cycle: &Cycle<'c>) -> PreFilterResult<'c> {
        let (state, pod) = (cycle.state, cycle.pod);
        if let Some(message) = &pod.parse_error {
            return PreFilterResult::Reject(Status::unresolvable(format!("parsing pod: {message}")));
        }
        let namespace = state.objects.namespace(&pod.namespace);
        let mut existing_anti_affinity_counts = Vec::new();
        for (term, uses) in &state.terms().anti {
            if term.matches(pod, namespace) {
                let domains = counts_for_key(&mut existing_anti_affinity_counts, &term.topology_key, state);
                uses.iter().for_each(|(node, count)| domains.add(*node, i64::from(*count)));
            }
        }
        if existing_anti_affinity_counts.is_empty()
            && pod.required().is_empty()
            && pod.required_anti().is_empty()
        {
            return PreFilterResult::Skip;
        }
        let affinity_matcher = matcher(pod.required().iter(), &state.objects);
        let mut affinity_counts: Vec<_> =
            pod.required().iter().map(|term| DomainCounts::new(&term.topology_key, state)).collect();
        if !affinity_counts.is_empty() {
            let per_node = state.count(&affinity_matcher);
            for domains in &mut affinity_counts {
                add_all(domains, &per_node, state, 1);
            }
        }
        let (mut anti_affinity_counts, mut anti_affinity_terms) = (Vec::new(), Vec::new());
        for term in pod.required_anti() {
            let matcher = matcher([term].into_iter(), &state.objects);
            add_all(
                counts_for_key(&mut anti_affinity_counts, &term.topology_key, state),
                &state.count(&matcher),
                state,
                1,
            );
            anti_affinity_terms.push((term.topology_key.clone(), matcher));
        }
        let matches_itself = affinity_matcher.matches(pod);
        let cycle = *cycle;
        PreFilterResult::Filter(Box::new(AffinityFilter {
            cycle,
            existing_anti_affinity_counts,
            affinity_counts,
            affinity_matcher,
            anti_affinity_counts,
            anti_affinity_terms,
            matches_itself,
        }))
    }
}

fn add_all(domains: &mut DomainCounts, per_node: &[u32], state: &State, weight: i64) {
    for &id in state.order() {
        let count = per_node.get(id as usize).copied().unwrap_or_default();
        if count > 0 {
            domains.add(id, i64::from(count) * weight);
        }
    }
}

impl AffinityFilter<'_> {
    fn matches_pod_affinity(&self, node: NodeId) -> bool {
        let mut all = true;
        for domains in &self.affinity_counts {
            match domains.count_at(node) {
                None => return false,
                Some(count) => all &= count > 0,
            }
        }
        all || self.matches_itself && self.affinity_counts.iter().all(|domains| domains.total == 0)
    }

    fn update_counts(&mut self, other: &PodInfo, node: &NodeInfo, by: i64) {
        let Cycle { state, pod, .. } = self.cycle;
        let namespace = state.objects.namespace(&pod.namespace);
        for term in other.required_anti() {
            if term.matches(pod, namespace) {
                counts_for_key(&mut self.existing_anti_affinity_counts, &term.topology_key, state)
                    .add(node.id, by);
            }
        }
        if !self.affinity_counts.is_empty() && self.affinity_matcher.matches(other) {
            self.affinity_counts.iter_mut().for_each(|domains| domains.add(node.id, by));
        }
        for (key, matcher) in &self.anti_affinity_terms {
            if matcher.matches(other) {
                counts_for_key(&mut self.anti_affinity_counts, key, state).add(node.id, by);
            }
        }
    }
}

impl<'c> Filter<'c> for AffinityFilter<'c> {
    fn filter(&self, node: &NodeInfo) -> Status {
        if !self.affinity_counts.is_empty() && !self.matches_pod_affinity(node.id) {
            return Status::unresolvable(AFFINITY_MISMATCH);
        }
        if self.anti_affinity_counts.iter().any(|domains| domains.has_pods(node.id)) {
            return Status::unschedulable(ANTI_AFFINITY_MISMATCH);
        }
        if self.existing_anti_affinity_counts.iter().any(|domains| domains.has_pods(node.id)) {
            return Status::unschedulable(EXISTING_ANTI_AFFINITY_MISMATCH);
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

    fn fast_filter(&self) -> Option<&dyn FastFilter> {
        Some(self)
    }
}

impl FastFilter for AffinityFilter<'_> {
    fn rejects(&self, node: NodeId) -> bool {
        !self.affinity_counts.is_empty() && !self.matches_pod_affinity(node)
            || self
                .anti_affinity_counts
                .iter()
                .chain(&self.existing_anti_affinity_counts)
                .any(|domains| domains.has_pods(node))
    }
}

impl PreScore for InterPodAffinity {
    fn pre_score<'c>(&'c self, cycle: &Cycle<'c>, _: &[NodeId]) -> PreScoreResult<'c> {
        let (state, pod) = (cycle.state, cycle.pod);
        let own = pod.affinity.as_deref();
        let (preferred, preferred_anti) =
            own.map_or((&[][..], &[][..]), |own| (&own.preferred, &own.preferred_anti));
        if self.0.ignore_preferred_terms_of_existing_pods && preferred.is_empty() && preferred_anti.is_empty()
        {
            return PreScoreResult::Skip;
        }
        let mut topology_scores = Vec::new();
        let namespace = state.objects.namespace(&pod.namespace);
        for ((weight, term), uses) in &state.terms().scoring {
            let weight = weight.map_or(self.0.hard_pod_affinity_weight, i64::from);
            if weight != 0 && term.matches(pod, namespace) {
                let domains = counts_for_key(&mut topology_scores, &term.topology_key, state);
                uses.iter().for_each(|(node, count)| domains.add(*node, i64::from(*count) * weight));
            }
        }
        for (sign, terms) in [(1, preferred), (-1, preferred_anti)] {
            for (weight, term) in terms {
                let per_node = state.count(&matcher([term].into_iter(), &state.objects));
                if per_node.iter().any(|count| *count > 0) {
                    let domains = counts_for_key(&mut topology_scores, &term.topology_key, state);
                    add_all(domains, &per_node, state, sign * i64::from(*weight));
                }
            }
        }
        if topology_scores.is_empty() {
            PreScoreResult::Skip
        } else {
            PreScoreResult::Score(Box::new(TopologyScore(topology_scores)))
        }
    }
}

struct TopologyScore(Vec<DomainCounts>);

impl Score for TopologyScore {
    fn score(&self, node: &NodeInfo) -> i64 {
        self.0.iter().filter_map(|domains| domains.count_at(node.id)).sum()
    }

    fn normalize(&self, _: &[NodeId], scores: &mut [i64]) {
        let min = scores.iter().copied().min().unwrap_or_default();
        let max = scores.iter().copied().max().unwrap_or_default();
        let range = (max - min) as f64;
        for score in scores {
            let normalized =
                if range > 0.0 { MAX_SCORE as f64 * ((*score - min) as f64 / range) } else { 0.0 };
            *score = normalized as i64;
        }
    }
}

impl Requeue for InterPodAffinity {
    fn is_schedulable_after_change(&self, pod: &PodInfo, change: &ClusterEvent<'_>, state: &State) -> bool {
        match change {
            ClusterEvent::Pod(pair) => {
                is_schedulable_after_pod_change(pod, pair.old, pair.new, &state.objects)
            }
            ClusterEvent::Node(pair) => {
                pair.new.is_some_and(|new| is_schedulable_after_node_change(pod, pair.old, new))
            }
            _ => false,
        }
    }
}

fn is_schedulable_after_pod_change(
    pod: &PodInfo,
    old: Option<&PodInfo>,
    new: Option<&PodInfo>,
    objects: &Objects,
) -> bool {
    if let (Some(old), Some(new)) = (old, new)
        && new.uid == pod.uid
    {
        return old.labels != new.labels;
    }
    let has_no_node = |other: &PodInfo| other.node_name.is_none() && other.nominated.is_none();
    if [old, new].into_iter().flatten().any(has_no_node) {
        return false;
    }
    let affinity_matcher = matcher(pod.required().iter(), objects);
    let anti_affinity_matcher = matcher(pod.required_anti().iter(), objects);
    let matches =
        |matcher: &PodMatcher, other: &PodInfo| !matcher.all_of.is_empty() && matcher.matches(other);
    match (old, new) {
        (Some(old), Some(new)) => {
            !matches(&affinity_matcher, old) && matches(&affinity_matcher, new)
                || matches(&anti_affinity_matcher, old) && !matches(&anti_affinity_matcher, new)
        }
        (None, Some(new)) => matches(&affinity_matcher, new),
        (Some(old), None) => {
            matches(&anti_affinity_matcher, old)
                || matches(&matcher(old.required_anti().iter(), objects), pod)
        }
        (None, None) => false,
    }
}

fn is_schedulable_after_node_change(pod: &PodInfo, old: Option<&NodeInfo>, new: &NodeInfo) -> bool {
    let values = |term: &Arc<AffinityTerm>| {
        (old.and_then(|old| old.labels.get(&term.topology_key)), new.labels.get(&term.topology_key))
    };
    let label_added = |term: &Arc<AffinityTerm>| {
        let (was, is) = values(term);
        is.is_some() && was != is
    };
    let label_changed = |term: &Arc<AffinityTerm>| {
        let (was, is) = values(term);
        old.is_none() || was.is_some() && was != is
    };
    pod.required().iter().any(label_added) || pod.required_anti().iter().any(label_changed)
}
