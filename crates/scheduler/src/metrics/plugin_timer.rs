//! Durations of single plugins. Sampled like upstream (`pluginMetricsSamplePercent` is 10): one attempt of
//! ten, and in it one node of sixteen, because a plugin often takes less time than reading the clock.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Metrics;
use crate::framework::{FastFilter, Filter, Status};
use crate::state::{NodeInfo, PodInfo};

/// One of this many attempts is measured.
const ATTEMPT_SAMPLE_INTERVAL: u64 = 10;
/// In a measured attempt, one of this many nodes is measured.
const NODE_SAMPLE_INTERVAL: usize = 16;

/// Measures the plugins of one attempt; `None` if the attempt is not sampled.
#[derive(Clone, Default)]
pub struct PluginTimer(Option<Arc<Metrics>>);

impl PluginTimer {
    /// Creates the timer for the attempt with this number.
    pub fn for_attempt(number: u64, metrics: &Arc<Metrics>) -> PluginTimer {
        PluginTimer(number.is_multiple_of(ATTEMPT_SAMPLE_INTERVAL).then(|| metrics.clone()))
    }

    /// Calls a plugin and records its duration. `status` returns the status label for the result.
    pub fn time<T>(
        &self,
        plugin: &'static str,
        point: &'static str,
        call: impl FnOnce() -> T,
        status: impl FnOnce(&T) -> &'static str,
    ) -> T {
        let Some(metrics) = &self.0 else { return call() };
        let started = Instant::now();
        let result = call();
        metrics.observe_plugin(plugin, (point, status(&result), started.elapsed()));
        result
    }

    /// Like `time`, for the node with this number.
    pub fn time_node<T>(
        &self,
        number: usize,
        plugin: &'static str,
        point: &'static str,
        call: impl FnOnce() -> T,
        status: impl FnOnce(&T) -> &'static str,
    ) -> T {
        if self.0.is_none() || !number.is_multiple_of(NODE_SAMPLE_INTERVAL) {
            return call();
        }
        self.time(plugin, point, call, status)
    }

    /// Records a duration that was measured elsewhere.
    pub fn observe(&self, plugin: &'static str, point: &'static str, done: bool, time: Duration) {
        if let Some(metrics) = &self.0 {
            metrics.observe_plugin(plugin, (point, if done { "Success" } else { "Error" }, time));
        }
    }

    /// Wraps a filter to measure it, if the attempt is sampled.
    pub fn wrap_filter<'c>(
        &self,
        plugin: &'static str,
        filter: Box<dyn Filter<'c> + 'c>,
    ) -> Box<dyn Filter<'c> + 'c> {
        if self.0.is_none() {
            return filter;
        }
        Box::new(TimedFilter { plugin, filter, timer: self.clone(), nodes: Cell::new(0) })
    }
}

struct TimedFilter<'c> {
    plugin: &'static str,
    filter: Box<dyn Filter<'c> + 'c>,
    timer: PluginTimer,
    nodes: Cell<usize>,
}

impl<'c> Filter<'c> for TimedFilter<'c> {
    fn filter(&self, node: &NodeInfo) -> Status {
        let number = self.nodes.replace(self.nodes.get().wrapping_add(1));
        let call = || self.filter.filter(node);
        self.timer.time_node(number, self.plugin, "Filter", call, |status| status.code.name())
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

    fn fast_filter(&self) -> Option<&dyn FastFilter> {
        self.filter.fast_filter()
    }
}
