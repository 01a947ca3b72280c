//! Runs the filters of one scheduling cycle.

use std::cell::RefCell;
use std::sync::Arc;

use super::{EvaluationCounts, FastFilter, Filter, Status};
use crate::state::{NodeInfo, PodInfo};

/// The highest score of a node (upstream's `MaxNodeScore`).
pub const MAX_SCORE: i64 = 100;

/// Pods that are nominated to a node and wait for their victims to terminate (upstream's `PodNominator`).
pub trait Nominations {
    /// Returns the pods nominated to a node.
    fn on_node(&self, node: &str) -> &[Arc<PodInfo>];
}

/// Implementation of [`Nominations`] without nominated pods.
pub struct NoNominations;

impl Nominations for NoNominations {
    fn on_node(&self, _node: &str) -> &[Arc<PodInfo>] {
        &[]
    }
}

/// The filters that apply to a pod, in order.
#[derive(Default)]
pub struct Filters<'c> {
    all: Vec<(PluginIndex, Box<dyn Filter<'c> + 'c>)>,
    /// For each filter, the number of nodes at which evaluation stopped. Added up from the end by
    /// `add_evaluations`: a filter has seen all nodes that a later one has seen.
    stop_counts: RefCell<Vec<u64>>,
}

/// Name of a plugin and its index in the profile.
type PluginIndex = (&'static str, usize);

impl<'c> Filters<'c> {
    /// Adds the filter of a plugin.
    pub fn push(&mut self, plugin: &'static str, index: usize, filter: Box<dyn Filter<'c> + 'c>) {
        self.all.push(((plugin, index), filter));
        self.stop_counts.get_mut().push(0);
    }

    /// Runs the filters until one rejects the node.
    pub fn run(&self, node: &NodeInfo) -> Status {
        self.evaluate(self.all.iter().map(|(_, filter)| &**filter), node)
    }

    fn evaluate<'f>(
        &self,
        filters: impl Iterator<Item = &'f (dyn Filter<'c> + 'c)>,
        node: &NodeInfo,
    ) -> Status
    where
        'c: 'f,
    {
        for (i, filter) in filters.enumerate() {
            let status = filter.filter(node);
            if !status.is_success() {
                self.stop_counts.borrow_mut()[i] += 1;
                return status.with_plugin(self.all[i].0.0);
            }
        }
        if let Some(all) = self.stop_counts.borrow_mut().last_mut() {
            *all += 1;
        }
        Status::success()
    }

    /// Adds the evaluations in this cycle to the counts of the plugins.
    pub fn add_evaluations(&self, plugins: &[EvaluationCounts]) {
        let mut nodes = 0;
        for (((_, index), _), count) in self.all.iter().zip(&*self.stop_counts.borrow()).rev() {
            nodes += count;
            plugins[*index].add(1, nodes);
        }
    }

    /// Returns the fast filters.
    pub fn fast_filters(&self) -> Vec<&dyn FastFilter> {
        self.all.iter().filter_map(|(_, filter)| filter.fast_filter()).collect()
    }

    /// Runs the filters with the nominated pods of equal or higher priority added to the node, and again
    /// without them: those pods may end up on another node, and affinity to them must not be relied on.
    pub fn run_with_nominated(
        &self,
        pod: &PodInfo,
        node: &NodeInfo,
        nominations: &dyn Nominations,
    ) -> Status {
        if nominations.on_node(&node.name).is_empty() {
            return self.run(node);
        }
        self.fork().run_with_nominated(pod, node, nominations)
    }

    /// Returns copies that can be modified independently. Filters without state are shared.
    pub fn fork<'a>(&'a self) -> FilterFork<'a, 'c> {
        FilterFork { parent: self, copies: self.all.iter().map(|(_, filter)| filter.fork()).collect() }
    }
}

/// Independent copies of the filters, for simulations.
pub struct FilterFork<'a, 'c> {
    parent: &'a Filters<'c>,
    /// In the order of the filters; `None` where the filter of the parent is used.
    copies: Vec<Option<Box<dyn Filter<'c> + 'c>>>,
}

impl<'a, 'c> FilterFork<'a, 'c> {
    /// Adds another pod to the node.
    pub fn add_pod(&mut self, pod: &PodInfo, node: &NodeInfo) {
        self.copies.iter_mut().flatten().for_each(|filter| filter.add_pod(pod, node));
    }

    /// Removes another pod from the node.
    pub fn remove_pod(&mut self, pod: &PodInfo, node: &NodeInfo) {
        self.copies.iter_mut().flatten().for_each(|filter| filter.remove_pod(pod, node));
    }

    /// Runs the filters until one rejects the node.
    pub fn run(&self, node: &NodeInfo) -> Status {
        let filters = self.parent.all.iter().zip(&self.copies);
        self.parent.evaluate(filters.map(|((_, filter), copies)| &**copies.as_ref().unwrap_or(filter)), node)
    }

    fn copy(&self) -> FilterFork<'a, 'c> {
        let copies =
            self.copies.iter().map(|copies| copies.as_ref().and_then(|filter| filter.fork())).collect();
        FilterFork { parent: self.parent, copies }
    }

    /// See [`Filters::run_with_nominated`].
    pub fn run_with_nominated(
        &self,
        pod: &PodInfo,
        node: &NodeInfo,
        nominations: &dyn Nominations,
    ) -> Status {
        let nominated_pods = nominations.on_node(&node.name);
        let is_included = |other: &&Arc<PodInfo>| other.priority >= pod.priority && other.uid != pod.uid;
        if nominated_pods.iter().any(|other| is_included(&other)) {
            let (mut filters, mut node_with_nominated) = (self.copy(), node.clone());
            for other in nominated_pods.iter().filter(is_included) {
                filters.add_pod(other, &node_with_nominated);
                node_with_nominated.add(other.clone());
            }
            let status = filters.run(&node_with_nominated);
            if !status.is_success() {
                return status;
            }
        }
        self.run(node)
    }
}

/// Scales the scores to 0 to [`MAX_SCORE`]. With `reverse` the highest score becomes the lowest (upstream's
/// `DefaultNormalizeScore`).
pub fn default_normalize_score(scores: &mut [i64], reverse: bool) {
    let highest = scores.iter().copied().max().unwrap_or_default().max(0);
    for score in scores.iter_mut() {
        let share = if highest == 0 { 0 } else { MAX_SCORE * *score / highest };
        *score = if reverse { MAX_SCORE - share } else { share };
    }
}
