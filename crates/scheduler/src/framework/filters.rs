//! The filters of one cycle together.

use std::cell::RefCell;
use std::sync::Arc;

use super::{EvaluationCounts, FastFilter, Filter, Status};
use crate::state::{NodeInfo, PodInfo};

/// The best a node can be.
pub const MAX_SCORE: i64 = 100;

/// Pods that wait for room on a node that was promised to them.
pub trait Nominations {
    /// The pods promised a node.
    fn on_node(&self, node: &str) -> &[Arc<PodInfo>];
}

/// No pod is promised anything.
pub struct NoNominations;

impl Nominations for NoNominations {
    fn on_node(&self, _node: &str) -> &[Arc<PodInfo>] {
        &[]
    }
}

/// The filters that have something to say about a pod, in order.
#[derive(Default)]
pub struct Filters<'c> {
    all: Vec<(PluginIndex, Box<dyn Filter<'c> + 'c>)>,
    /// How many nodes were asked about, by how many filters were asked about them less one.
    stop_counts: RefCell<Vec<u64>>,
}

/// A plugin by its name and by its place among those of the profile.
type PluginIndex = (&'static str, usize);

impl<'c> Filters<'c> {
    /// Adds a plugin's filter.
    pub fn push(&mut self, plugin: &'static str, index: usize, filter: Box<dyn Filter<'c> + 'c>) {
        self.all.push(((plugin, index), filter));
        self.stop_counts.get_mut().push(0);
    }

    /// Asks each filter; the first that says no ends it.
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

    /// Adds to the plugins how often each was asked.
    pub fn add_evaluations(&self, plugins: &[EvaluationCounts]) {
        let mut nodes = 0;
        for (((_, index), _), count) in self.all.iter().zip(&*self.stop_counts.borrow()).rev() {
            nodes += count;
            plugins[*index].add(1, nodes);
        }
    }

    /// The filters that can rule out nodes at once.
    pub fn fast_filters(&self) -> Vec<&dyn FastFilter> {
        self.all.iter().filter_map(|(_, filter)| filter.fast_filter()).collect()
    }

    /// The node must do with the pods of no less priority that are promised it, and without them, since
    /// they may end up elsewhere.
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

    /// Copies that can be changed by themselves. Filters that never change are asked where they are.
    pub fn fork<'a>(&'a self) -> FilterFork<'a, 'c> {
        FilterFork { parent: self, copies: self.all.iter().map(|(_, filter)| filter.fork()).collect() }
    }
}

/// Filters with changes of their own.
pub struct FilterFork<'a, 'c> {
    parent: &'a Filters<'c>,
    /// In the order of the filters.
    copies: Vec<Option<Box<dyn Filter<'c> + 'c>>>,
}

impl<'a, 'c> FilterFork<'a, 'c> {
    /// Another pod is put on the node.
    pub fn add_pod(&mut self, pod: &PodInfo, node: &NodeInfo) {
        self.copies.iter_mut().flatten().for_each(|filter| filter.add_pod(pod, node));
    }

    /// Another pod is taken off the node.
    pub fn remove_pod(&mut self, pod: &PodInfo, node: &NodeInfo) {
        self.copies.iter_mut().flatten().for_each(|filter| filter.remove_pod(pod, node));
    }

    /// Asks each filter.
    pub fn run(&self, node: &NodeInfo) -> Status {
        let filters = self.parent.all.iter().zip(&self.copies);
        self.parent.evaluate(filters.map(|((_, filter), copies)| &**copies.as_ref().unwrap_or(filter)), node)
    }

    fn copy(&self) -> FilterFork<'a, 'c> {
        let copies =
            self.copies.iter().map(|copies| copies.as_ref().and_then(|filter| filter.fork())).collect();
        FilterFork { parent: self.parent, copies }
    }

    /// As [`Filters::run_with_nominated`].
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

/// Brings scores between 0 and [`MAX_SCORE`], the highest becoming the best, or with `reverse` the worst.
pub fn default_normalize_score(scores: &mut [i64], reverse: bool) {
    let highest = scores.iter().copied().max().unwrap_or_default().max(0);
    for score in scores.iter_mut() {
        let share = if highest == 0 { 0 } else { MAX_SCORE * *score / highest };
        *score = if reverse { MAX_SCORE - share } else { share };
    }
}
