//! InterPodAffinity: pods that want to be near others, or far from them.
//!
//! Which pods a term means on each node, and which terms the pods on nodes have, is kept by the state (see
//! [`crate::state::tally`]); per pod the counts are summed up by domain.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;

use super::arguments;
use crate::framework::{
    Change, Cycle, Filter, MAX_SCORE, Plugin, PreFilter, PreScore, Prepared, Quick, Requeue, Score, Scoring,
    Status,
};
use crate::state::objects::Objects;
use crate::state::pod::AffinityTerm;
use crate::state::tally::{Matcher, NOWHERE, Scope, Topology};
use crate::state::{NodeId, NodeInfo, PodInfo, State};

pub const NAME: &str = "InterPodAffinity";

const AFFINITY: &str = "node(s) didn't match pod affinity rules";
const ANTI_AFFINITY: &str = "node(s) didn't match pod anti-affinity rules";
const EXISTING: &str = "node(s) didn't satisfy existing pods anti-affinity rules";

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

/// Makes the plugin.
pub fn make(args: &Value) -> Result<Plugin, String> {
    let args: Args = arguments(args)?;
    if !(0..=100).contains(&args.hard_pod_affinity_weight) {
        return Err("hardPodAffinityWeight: not in valid range [0, 100]".to_owned());
    }
    let plugin = Arc::new(InterPodAffinity(args));
    Ok(Plugin::new(NAME).pre_filter(plugin.clone()).pre_score(plugin.clone()).requeue(plugin))
}

/// The namespaces a term is about, those its selector means put in.
fn scope(term: &AffinityTerm, objects: &Objects) -> Scope {
    if term.namespace_selector.is_everything() {
        return Scope::Everywhere;
    }
    let mut namespaces = term.namespaces.clone();
    if !term.namespace_selector.is_nothing() {
        namespaces.extend(objects.namespaces(&term.namespace_selector));
        namespaces.sort();
        namespaces.dedup();
    }
    Scope::Namespaces(namespaces)
}

fn matcher<'t>(terms: impl Iterator<Item = &'t Arc<AffinityTerm>>, objects: &Objects) -> Matcher {
    let all_of = terms.map(|term| (scope(term, objects), term.selector.clone())).collect();
    Matcher { all_of, living: false }
}

/// Pods by the domains of one topology.
#[derive(Clone)]
struct Domains {
    key: Arc<str>,
    topology: Arc<Topology>,
    counts: Vec<i64>,
    /// Of all domains.
    total: i64,
}

impl Domains {
    fn new(key: &Arc<str>, state: &State) -> Domains {
        let topology = state.topology(key);
        Domains { key: key.clone(), counts: vec![0; topology.len()], topology, total: 0 }
    }

    fn at(&self, node: NodeId) -> Option<i64> {
        let domain = self.topology.domain(node);
        (domain != NOWHERE).then(|| self.counts[domain as usize])
    }

    /// Whether there are pods in the node's domain.
    fn is_taken(&self, node: NodeId) -> bool {
        self.at(node).is_some_and(|count| count > 0)
    }

    fn add(&mut self, node: NodeId, by: i64) {
        let domain = self.topology.domain(node);
        if domain != NOWHERE {
            self.counts[domain as usize] += by;
            self.total += by;
        }
    }
}

/// The domains of a key in a list of few, added if it is not there.
fn of_key<'a>(list: &'a mut Vec<Domains>, key: &Arc<str>, state: &State) -> &'a mut Domains {
    let at = list.iter().position(|domains| domains.key == *key).unwrap_or_else(|| {
        list.push(Domains::new(key, state));
        list.len() - 1
    });
    &mut list[at]
}

#[derive(Clone)]
struct Nearness<'c> {
    cycle: Cycle<'c>,
    /// Domains where pods are that want this one far away.
    existing: Vec<Domains>,
    /// For each term of affinity, pods that match all terms.
    near: Vec<Domains>,
    near_matcher: Matcher,
    /// For each distinct key of anti-affinity.
    far: Vec<Domains>,
    far_matchers: Vec<(Arc<str>, Matcher)>,
    /// The pod matches its own affinity, so it may be the first.
    matches_itself: bool,
}

impl PreFilter for InterPodAffinity {
    fn pre_filter<'c>(&'c self, cycle: &Cycle<'c>) -> Prepared<'c> {
        let (state, pod) = (cycle.state, cycle.pod);
        if let Some(words) = &pod.broken {
            return Prepared::Reject(Status::unresolvable(format!("parsing pod: {words}")));
        }
        let namespace = state.objects.namespace(&pod.namespace);
        let mut existing = Vec::new();
        for (term, uses) in &state.terms().anti {
            if term.matches(pod, namespace) {
                let domains = of_key(&mut existing, &term.topology_key, state);
                uses.iter().for_each(|(node, count)| domains.add(*node, i64::from(*count)));
            }
        }
        if existing.is_empty() && pod.required().is_empty() && pod.required_anti().is_empty() {
            return Prepared::Skip;
        }
        let near_matcher = matcher(pod.required().iter(), &state.objects);
        let mut near: Vec<_> =
            pod.required().iter().map(|term| Domains::new(&term.topology_key, state)).collect();
        if !near.is_empty() {
            let per_node = state.count(&near_matcher);
            for domains in &mut near {
                add_all(domains, &per_node, state, 1);
            }
        }
        let (mut far, mut far_matchers) = (Vec::new(), Vec::new());
        for term in pod.required_anti() {
            let matcher = matcher([term].into_iter(), &state.objects);
            add_all(of_key(&mut far, &term.topology_key, state), &state.count(&matcher), state, 1);
            far_matchers.push((term.topology_key.clone(), matcher));
        }
        let matches_itself = near_matcher.matches(pod);
        let cycle = *cycle;
        Prepared::Filter(Box::new(Nearness {
            cycle,
            existing,
            near,
            near_matcher,
            far,
            far_matchers,
            matches_itself,
        }))
    }
}

fn add_all(domains: &mut Domains, per_node: &[u32], state: &State, weight: i64) {
    for &id in state.order() {
        let count = per_node.get(id as usize).copied().unwrap_or_default();
        if count > 0 {
            domains.add(id, i64::from(count) * weight);
        }
    }
}

impl Nearness<'_> {
    fn is_near(&self, node: NodeId) -> bool {
        let mut all = true;
        for domains in &self.near {
            match domains.at(node) {
                None => return false,
                Some(count) => all &= count > 0,
            }
        }
        all || self.matches_itself && self.near.iter().all(|domains| domains.total == 0)
    }

    fn step(&mut self, other: &PodInfo, node: &NodeInfo, by: i64) {
        let Cycle { state, pod, .. } = self.cycle;
        let namespace = state.objects.namespace(&pod.namespace);
        for term in other.required_anti() {
            if term.matches(pod, namespace) {
                of_key(&mut self.existing, &term.topology_key, state).add(node.id, by);
            }
        }
        if !self.near.is_empty() && self.near_matcher.matches(other) {
            self.near.iter_mut().for_each(|domains| domains.add(node.id, by));
        }
        for (key, matcher) in &self.far_matchers {
            if matcher.matches(other) {
                of_key(&mut self.far, key, state).add(node.id, by);
            }
        }
    }
}

impl<'c> Filter<'c> for Nearness<'c> {
    fn filter(&self, node: &NodeInfo) -> Status {
        if !self.near.is_empty() && !self.is_near(node.id) {
            return Status::unresolvable(AFFINITY);
        }
        if self.far.iter().any(|domains| domains.is_taken(node.id)) {
            return Status::unschedulable(ANTI_AFFINITY);
        }
        if self.existing.iter().any(|domains| domains.is_taken(node.id)) {
            return Status::unschedulable(EXISTING);
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

    fn quick(&self) -> Option<&dyn Quick> {
        Some(self)
    }
}

impl Quick for Nearness<'_> {
    fn rules_out(&self, node: NodeId) -> bool {
        !self.near.is_empty() && !self.is_near(node)
            || self.far.iter().chain(&self.existing).any(|domains| domains.is_taken(node))
    }
}

impl PreScore for InterPodAffinity {
    fn pre_score<'c>(&'c self, cycle: &Cycle<'c>, _: &[NodeId]) -> Scoring<'c> {
        let (state, pod) = (cycle.state, cycle.pod);
        let own = pod.affinity.as_deref();
        let (preferred, preferred_anti) =
            own.map_or((&[][..], &[][..]), |own| (&own.preferred, &own.preferred_anti));
        if self.0.ignore_preferred_terms_of_existing_pods && preferred.is_empty() && preferred_anti.is_empty()
        {
            return Scoring::Skip;
        }
        let mut sums = Vec::new();
        let namespace = state.objects.namespace(&pod.namespace);
        for ((weight, term), uses) in &state.terms().scored {
            let weight = weight.map_or(self.0.hard_pod_affinity_weight, i64::from);
            if weight != 0 && term.matches(pod, namespace) {
                let domains = of_key(&mut sums, &term.topology_key, state);
                uses.iter().for_each(|(node, count)| domains.add(*node, i64::from(*count) * weight));
            }
        }
        for (sign, terms) in [(1, preferred), (-1, preferred_anti)] {
            for (weight, term) in terms {
                let per_node = state.count(&matcher([term].into_iter(), &state.objects));
                if per_node.iter().any(|count| *count > 0) {
                    let domains = of_key(&mut sums, &term.topology_key, state);
                    add_all(domains, &per_node, state, sign * i64::from(*weight));
                }
            }
        }
        if sums.is_empty() { Scoring::Skip } else { Scoring::Score(Box::new(Company(sums))) }
    }
}

struct Company(Vec<Domains>);

impl Score for Company {
    fn score(&self, node: &NodeInfo) -> i64 {
        self.0.iter().filter_map(|domains| domains.at(node.id)).sum()
    }

    fn normalize(&self, _: &[NodeId], scores: &mut [i64]) {
        let least = scores.iter().copied().min().unwrap_or_default();
        let most = scores.iter().copied().max().unwrap_or_default();
        let range = (most - least) as f64;
        for score in scores {
            let part = if range > 0.0 { MAX_SCORE as f64 * ((*score - least) as f64 / range) } else { 0.0 };
            *score = part as i64;
        }
    }
}

impl Requeue for InterPodAffinity {
    fn helps(&self, pod: &PodInfo, change: &Change<'_>, state: &State) -> bool {
        match change {
            Change::Pod(pair) => pod_helps(pod, pair.old, pair.new, &state.objects),
            Change::Node(pair) => pair.new.is_some_and(|new| node_helps(pod, pair.old, new)),
            _ => false,
        }
    }
}

fn pod_helps(pod: &PodInfo, old: Option<&PodInfo>, new: Option<&PodInfo>, objects: &Objects) -> bool {
    if let (Some(old), Some(new)) = (old, new)
        && new.uid == pod.uid
    {
        return old.labels != new.labels;
    }
    let loose = |other: &PodInfo| other.node_name.is_none() && other.nominated.is_none();
    if [old, new].into_iter().flatten().any(loose) {
        return false;
    }
    let near = matcher(pod.required().iter(), objects);
    let far = matcher(pod.required_anti().iter(), objects);
    let matches = |matcher: &Matcher, other: &PodInfo| !matcher.all_of.is_empty() && matcher.matches(other);
    match (old, new) {
        (Some(old), Some(new)) => {
            !matches(&near, old) && matches(&near, new) || matches(&far, old) && !matches(&far, new)
        }
        (None, Some(new)) => matches(&near, new),
        (Some(old), None) => {
            matches(&far, old) || matches(&matcher(old.required_anti().iter(), objects), pod)
        }
        (None, None) => false,
    }
}

fn node_helps(pod: &PodInfo, old: Option<&NodeInfo>, new: &NodeInfo) -> bool {
    let values = |term: &Arc<AffinityTerm>| {
        (old.and_then(|old| old.labels.get(&term.topology_key)), new.labels.get(&term.topology_key))
    };
    let nearer = |term: &Arc<AffinityTerm>| {
        let (was, is) = values(term);
        is.is_some() && was != is
    };
    let farther = |term: &Arc<AffinityTerm>| {
        let (was, is) = values(term);
        old.is_none() || was.is_some() && was != is
    };
    pod.required().iter().any(nearer) || pod.required_anti().iter().any(farther)
}
