//! How long single plugins take: measured in one attempt of ten, and in that on one node of sixteen, since a plugin
//! often takes less time than looking at the clock does.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Metrics;
use crate::framework::{Filter, Quick, Status};
use crate::state::{NodeInfo, PodInfo};

/// One attempt of so many is measured.
const ATTEMPTS: u64 = 10;
/// There, so many nodes apart.
const NODES: usize = 16;

/// Measures the plugins of one attempt, or does not.
#[derive(Clone, Default)]
pub struct Stopwatch(Option<Arc<Metrics>>);

impl Stopwatch {
    /// For the attempt of this number.
    pub fn for_attempt(number: u64, metrics: &Arc<Metrics>) -> Stopwatch {
        Stopwatch(number.is_multiple_of(ATTEMPTS).then(|| metrics.clone()))
    }

    /// Asks a plugin. `status` names what it said.
    pub fn time<T>(
        &self,
        plugin: &'static str,
        point: &'static str,
        ask: impl FnOnce() -> T,
        status: impl FnOnce(&T) -> &'static str,
    ) -> T {
        let Some(metrics) = &self.0 else { return ask() };
        let begun = Instant::now();
        let said = ask();
        metrics.plugin_ran(plugin, (point, status(&said), begun.elapsed()));
        said
    }

    /// The same for the node of this number.
    pub fn time_node<T>(
        &self,
        number: usize,
        plugin: &'static str,
        point: &'static str,
        ask: impl FnOnce() -> T,
        status: impl FnOnce(&T) -> &'static str,
    ) -> T {
        if self.0.is_none() || !number.is_multiple_of(NODES) {
            return ask();
        }
        self.time(plugin, point, ask, status)
    }

    /// What was measured elsewhere.
    pub fn note(&self, plugin: &'static str, point: &'static str, done: bool, time: Duration) {
        if let Some(metrics) = &self.0 {
            metrics.plugin_ran(plugin, (point, if done { "Success" } else { "Error" }, time));
        }
    }

    /// A filter that is measured, if anything is.
    pub fn watch<'c>(
        &self,
        plugin: &'static str,
        filter: Box<dyn Filter<'c> + 'c>,
    ) -> Box<dyn Filter<'c> + 'c> {
        if self.0.is_none() {
            return filter;
        }
        Box::new(Watched { plugin, filter, watch: self.clone(), nodes: Cell::new(0) })
    }
}

struct Watched<'c> {
    plugin: &'static str,
    filter: Box<dyn Filter<'c> + 'c>,
    watch: Stopwatch,
    nodes: Cell<usize>,
}

impl<'c> Filter<'c> for Watched<'c> {
    fn filter(&self, node: &NodeInfo) -> Status {
        let number = self.nodes.replace(self.nodes.get().wrapping_add(1));
        let ask = || self.filter.filter(node);
        self.watch.time_node(number, self.plugin, "Filter", ask, |status| status.code.name())
    }

    fn add_pod(&mut self, pod: &PodInfo, node: &NodeInfo) {
        self.filter.add_pod(pod, node);
    }

    fn remove_pod(&mut self, pod: &PodInfo, node: &NodeInfo) {
        self.filter.remove_pod(pod, node);
    }

    fn fork(&self) -> Option<Box<dyn Filter<'c> + 'c>> {
        self.filter.fork()
    }

    fn quick(&self) -> Option<&dyn Quick> {
        self.filter.quick()
    }
}
