//! The scheduling algorithm: filters the nodes and, if several pass, scores them. Counterpart of
//! `schedulePod` in upstream's `schedule_one.go`.

mod diagnosis;
pub mod random;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::{Duration, Instant};

pub use diagnosis::{Diagnosis, FitError};
pub use random::Random;

use crate::framework::{
    CleanupTask, Code, Cycle, Filters, Nominations, PostFilterContext, PostFilterResult, PreFilterResult,
    PreScoreResult, Profile, Status,
};
use crate::metrics::Metrics;
use crate::metrics::plugin_timer::PluginTimer;
use crate::state::{NodeId, State};

/// With fewer nodes than this all are filtered.
const MIN_FEASIBLE_NODES_TO_FIND: usize = 100;
/// Lower limit of the adaptive percentage of nodes to find.
const MIN_FEASIBLE_NODES_PERCENTAGE_TO_FIND: usize = 5;

/// The selected node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScheduleResult {
    pub node: Arc<str>,
    /// How many nodes were filtered, and how many passed.
    pub evaluated_nodes: usize,
    pub feasible_nodes: usize,
}

/// Why no node was selected.
pub enum ScheduleFailure {
    /// The cluster has no nodes.
    NoNodes,
    /// No node fits. With the result of the PostFilter plugins: the node to nominate with its victims, and
    /// whether to clear the existing nomination.
    Unschedulable {
        error: Box<FitError>,
        nomination: Option<(Arc<str>, Vec<Arc<crate::state::PodInfo>>)>,
        clear_nomination: bool,
    },
    /// An internal error of a plugin or an extender.
    Error(String),
}

/// HTTP extenders; see `crate::extender`.
pub trait Extenders: Send + Sync {
    /// Whether no extenders are configured.
    fn is_empty(&self) -> bool;
    /// Whether any extender filters nodes.
    fn is_filter(&self) -> bool;
    /// Whether any extender scores nodes.
    fn is_scorer(&self) -> bool;
    /// Removes the nodes that an extender rejects and adds their statuses to the diagnosis. An error fails
    /// the attempt.
    fn filter(
        &self,
        cycle: &Cycle<'_>,
        nodes: &mut Vec<NodeId>,
        diagnosis: &mut Diagnosis,
    ) -> Result<(), String>;
    /// Adds the weighted scores of the extenders.
    fn score(&self, cycle: &Cycle<'_>, nodes: &[NodeId], scores: &mut [i64]);
    /// Lets the extenders remove preemption candidates or change their victims.
    fn preempt(&self, _cycle: &Cycle<'_>, _candidates: &mut Vec<Candidate>) -> Result<(), String> {
        Ok(())
    }
}

/// A preemption candidate: a node with its victims, the most important first.
#[derive(Clone, Debug)]
pub struct Candidate {
    pub node: NodeId,
    pub victims: Vec<Arc<crate::state::PodInfo>>,
    /// How many victims would violate a PodDisruptionBudget.
    pub violations: usize,
}

/// Implementation of [`Extenders`] for a configuration without extenders.
pub struct NoExtenders;

impl Extenders for NoExtenders {
    fn is_empty(&self) -> bool {
        true
    }

    fn is_filter(&self) -> bool {
        false
    }

    fn is_scorer(&self) -> bool {
        false
    }

    fn filter(&self, _: &Cycle<'_>, _: &mut Vec<NodeId>, _: &mut Diagnosis) -> Result<(), String> {
        Ok(())
    }

    fn score(&self, _: &Cycle<'_>, _: &[NodeId], _: &mut [i64]) {}
}

/// The state of the algorithm between attempts.
pub struct Algorithm {
    /// `percentageOfNodesToScore`; 0 adapts to the number of nodes.
    pub percentage: i32,
    /// Index of the node at which the next search starts (upstream's `nextStartNodeIndex`), so that all nodes
    /// are considered equally often.
    next_start: usize,
    pub random: Random,
    pub metrics: Arc<Metrics>,
    /// Measures the plugins in the current attempt.
    pub timer: PluginTimer,
    attempts: u64,
    /// Tasks that the PostFilter plugins of the last attempt left to be done.
    pub cleanup_tasks: Vec<CleanupTask>,
}

impl Algorithm {
    /// `seed` decides between nodes with equal scores.
    pub fn new(percentage: i32, seed: u64) -> Algorithm {
        let (metrics, timer) = (Arc::default(), PluginTimer::default());
        Algorithm {
            percentage,
            next_start: 0,
            random: Random::new(seed),
            metrics,
            timer,
            attempts: 0,
            cleanup_tasks: Vec::new(),
        }
    }

    /// Finds a node for a pod. The state must have been refreshed before.
    pub fn schedule(
        &mut self,
        profile: &Profile,
        cycle: &Cycle<'_>,
        nominations: &dyn Nominations,
        extenders: &dyn Extenders,
    ) -> Result<ScheduleResult, ScheduleFailure> {
        if cycle.state.order().is_empty() {
            return Err(ScheduleFailure::NoNodes);
        }
        self.timer = PluginTimer::for_attempt(self.attempts, &self.metrics);
        self.attempts += 1;
        let mut search = Search {
            profile,
            timer: self.timer.clone(),
            cycle: *cycle,
            nominations,
            extenders,
            filters: Filters::default(),
            diagnosis: Diagnosis::default(),
            evaluated_nodes: 1,
        };
        let found = self.schedule_pod(&mut search);
        search.filters.add_evaluations(&profile.filter_counts);
        found
    }

    fn schedule_pod(&mut self, search: &mut Search<'_, '_>) -> Result<ScheduleResult, ScheduleFailure> {
        let (profile, cycle) = (search.profile, search.cycle);
        let feasible_nodes = search.find_feasible_nodes(self).map_err(ScheduleFailure::Error)?;
        match &feasible_nodes[..] {
            [] => {
                let started = Instant::now();
                let failure = search.run_post_filter_plugins(self);
                let has_nomination =
                    matches!(failure, ScheduleFailure::Unschedulable { nomination: Some(_), .. });
                let status = if has_nomination { "Success" } else { "Unschedulable" };
                self.metrics.observe_extension_point(
                    &profile.scheduler_name,
                    ("PostFilter", status, started.elapsed()),
                );
                Err(failure)
            }
            [only] => {
                let node = cycle.state.node(*only).name.clone();
                Ok(ScheduleResult { node, evaluated_nodes: search.evaluated_nodes, feasible_nodes: 1 })
            }
            several => {
                let scores =
                    search.prioritize_nodes(several, &self.metrics).map_err(ScheduleFailure::Error)?;
                let best = self.random.best(&scores);
                Ok(ScheduleResult {
                    node: cycle.state.node(several[best]).name.clone(),
                    evaluated_nodes: search.evaluated_nodes,
                    feasible_nodes: several.len(),
                })
            }
        }
    }

    /// How many feasible nodes end the search (upstream's `numFeasibleNodesToFind`).
    fn num_feasible_nodes_to_find(&self, profile: &Profile, nodes: usize) -> usize {
        if nodes < MIN_FEASIBLE_NODES_TO_FIND {
            return nodes;
        }
        let percentage = match profile.percentage.unwrap_or(self.percentage) {
            0 => 50usize.saturating_sub(nodes / 125).max(MIN_FEASIBLE_NODES_PERCENTAGE_TO_FIND),
            set => set.clamp(0, 100) as usize,
        };
        (nodes * percentage / 100).max(MIN_FEASIBLE_NODES_TO_FIND)
    }
}

/// The state of one attempt.
struct Search<'a, 'c> {
    profile: &'c Profile,
    timer: PluginTimer,
    cycle: Cycle<'c>,
    nominations: &'a dyn Nominations,
    extenders: &'a dyn Extenders,
    filters: Filters<'c>,
    diagnosis: Diagnosis,
    /// How many nodes were filtered.
    evaluated_nodes: usize,
}

impl<'c> Search<'_, 'c> {
    fn find_feasible_nodes(&mut self, algorithm: &mut Algorithm) -> Result<Vec<NodeId>, String> {
        let started = Instant::now();
        let prepared = self.run_pre_filter_plugins();
        let status = match &prepared {
            Ok(Some(_)) => "Success",
            Ok(None) => "Unschedulable",
            Err(_) => "Error",
        };
        algorithm
            .metrics
            .observe_extension_point(&self.profile.scheduler_name, ("PreFilter", status, started.elapsed()));
        let Some(only) = prepared? else { return Ok(Vec::new()) };
        let started = Instant::now();
        let found = self.find_nodes_that_fit_pod(only, algorithm);
        let status = match &found {
            Ok(found) if found.is_empty() => "Unschedulable",
            Ok(_) => "Success",
            Err(_) => "Error",
        };
        algorithm
            .metrics
            .observe_extension_point(&self.profile.scheduler_name, ("Filter", status, started.elapsed()));
        found
    }

    /// Returns the nodes that pass the filters, out of all nodes or of those named by PreFilter plugins.
    fn find_nodes_that_fit_pod(
        &mut self,
        only: Option<Vec<String>>,
        algorithm: &mut Algorithm,
    ) -> Result<Vec<NodeId>, String> {
        let state = self.cycle.state;
        // A nominated node is likely the only candidate, so it is evaluated first; the others only if it does
        // not fit.
        if let Some(node) = self.cycle.pod.nominated.as_ref().and_then(|name| state.node_by_name(name)) {
            let mut found = Vec::new();
            if self.filters.run_with_nominated(self.cycle.pod, node, self.nominations).is_success() {
                found.push(node.id);
                self.extenders.filter(&self.cycle, &mut found, &mut Diagnosis::default())?;
            }
            if !found.is_empty() {
                return Ok(found);
            }
        }
        let all = state.order();
        let mut found = match &only {
            None => self.find_nodes_that_pass_filters(all, algorithm)?,
            Some(names) => {
                let there: Vec<NodeId> =
                    names.iter().filter_map(|name| state.node_by_name(name)).map(|node| node.id).collect();
                self.find_nodes_that_pass_filters(&there, algorithm)?
            }
        };
        algorithm.next_start = (algorithm.next_start + self.evaluated_nodes) % all.len();
        if !self.extenders.is_empty() {
            let before = found.len();
            self.extenders.filter(&self.cycle, &mut found, &mut self.diagnosis)?;
            if found.len() != before {
                self.diagnosis.rejected_by.insert("Extender");
            }
        }
        Ok(found)
    }

    /// Runs the PreFilter plugins. `None` if one of them rejects the pod, `Some(None)` if all nodes are
    /// candidates, otherwise the names of the candidates.
    fn run_pre_filter_plugins(&mut self) -> Result<Option<Option<Vec<String>>>, String> {
        let mut only: Option<Vec<String>> = None;
        let mut plugins_with_node_names: Vec<&'static str> = Vec::new();
        let mut rejection: Option<Status> = None;
        for (index, (name, plugin)) in self.profile.pre_filter.iter().enumerate() {
            let call = || plugin.pre_filter(&self.cycle);
            match self.timer.time(name, "PreFilter", call, PreFilterResult::name) {
                PreFilterResult::Skip => {}
                PreFilterResult::Filter(filter) => {
                    self.filters.push(name, index, self.timer.wrap_filter(name, filter))
                }
                PreFilterResult::FilterNodes(nodes, filter) => {
                    self.filters.push(name, index, self.timer.wrap_filter(name, filter));
                    plugins_with_node_names.push(name);
                    plugins_with_node_names.sort_unstable();
                    match &mut only {
                        None => only = Some(nodes),
                        Some(known) => known.retain(|node| nodes.contains(node)),
                    }
                    if only.as_ref().is_some_and(Vec::is_empty) {
                        let message = match &plugins_with_node_names[..] {
                            [one] => format!("node(s) didn't satisfy plugin {one}"),
                            several => {
                                format!(
                                    "node(s) didn't satisfy plugin(s) [{}] simultaneously",
                                    several.join(" ")
                                )
                            }
                        };
                        self.diagnosis.rejected_by.extend(&plugins_with_node_names);
                        self.diagnosis.reject_all(Status::unresolvable(message));
                        return Ok(None);
                    }
                }
                PreFilterResult::Reject(status) => {
                    let status = status.with_plugin(name);
                    match status.code {
                        Code::Error => {
                            return Err(format!("running PreFilter plugin {name:?}: {}", status.message()));
                        }
                        Code::Unschedulable => rejection = Some(status),
                        _ => {
                            self.diagnosis.reject_all(status);
                            return Ok(None);
                        }
                    }
                }
            }
        }
        if let Some(status) = rejection {
            self.diagnosis.reject_all(status);
            return Ok(None);
        }
        if only.is_some() {
            let message = format!("node(s) didn't satisfy plugin(s) [{}]", plugins_with_node_names.join(" "));
            self.diagnosis.absent_nodes_status = Status::unresolvable(message);
            self.diagnosis.rejected_by.extend(&plugins_with_node_names);
        }
        Ok(Some(only))
    }

    fn find_nodes_that_pass_filters(
        &mut self,
        nodes: &[NodeId],
        algorithm: &Algorithm,
    ) -> Result<Vec<NodeId>, String> {
        let mut num_to_find = algorithm.num_feasible_nodes_to_find(self.profile, nodes.len());
        let needs_scores = !self.profile.scorers.is_empty() || self.extenders.is_scorer();
        if !needs_scores && !self.extenders.is_filter() {
            num_to_find = 1;
        }
        let mut found = Vec::with_capacity(num_to_find.min(nodes.len()));
        let state = self.cycle.state;
        let start = if nodes.is_empty() { 0 } else { algorithm.next_start % nodes.len() };
        let (tail, head) = nodes.split_at(start);
        // Fast filters only say that a node is rejected, not why. The full filters run on the skipped nodes
        // only if no node is found, because only then are the reasons needed for the diagnosis.
        let fast_filters = self.filters.fast_filters();
        let mut skipped = Vec::new();
        for &id in head.iter().chain(tail) {
            if fast_filters.iter().any(|fast_filters| fast_filters.rejects(id)) {
                skipped.push(id);
                continue;
            }
            let node = state.node(id);
            let status = self.filters.run_with_nominated(self.cycle.pod, node, self.nominations);
            match status.code {
                Code::Success => {
                    found.push(id);
                    if found.len() >= num_to_find {
                        break;
                    }
                }
                Code::Error => return Err(status.message()),
                _ => self.diagnosis.add(id, status),
            }
        }
        self.evaluated_nodes = found.len() + skipped.len() + self.diagnosis.nodes.len();
        if found.is_empty() {
            for id in skipped {
                let node = state.node(id);
                let status = self.filters.run_with_nominated(self.cycle.pod, node, self.nominations);
                match status.code {
                    Code::Success => found.push(id),
                    Code::Error => return Err(status.message()),
                    _ => self.diagnosis.add(id, status),
                }
            }
        }
        Ok(found)
    }

    fn prioritize_nodes(&self, nodes: &[NodeId], metrics: &Metrics) -> Result<Vec<i64>, String> {
        let (mut preparing, mut scoring) = (Duration::ZERO, Duration::ZERO);
        let mut total_scores = vec![0i64; nodes.len()];
        let mut scores = vec![0i64; nodes.len()];
        let times = nodes.len() as u64;
        for (scorer, evaluation_counts) in self.profile.scorers.iter().zip(&self.profile.score_counts) {
            let started = Instant::now();
            let prepare = || scorer.score.pre_score(&self.cycle, nodes);
            let result = self.timer.time(scorer.plugin, "PreScore", prepare, PreScoreResult::name);
            preparing += started.elapsed();
            let score = match result {
                PreScoreResult::Skip => continue,
                PreScoreResult::Score(score) => score,
                PreScoreResult::Error(message) => {
                    return Err(format!("running PreScore plugin {:?}: {message}", scorer.plugin));
                }
            };
            let started = Instant::now();
            evaluation_counts.add(1, times);
            let status_name = |_: &_| "Success";
            for (number, (value, id)) in scores.iter_mut().zip(nodes).enumerate() {
                let call = || score.score(self.cycle.state.node(*id));
                *value = self.timer.time_node(number, scorer.plugin, "Score", call, status_name);
            }
            let normalize = || score.normalize(nodes, &mut scores);
            self.timer.time(scorer.plugin, "ScoreExtensionNormalize", normalize, |()| "Success");
            for (total, value) in total_scores.iter_mut().zip(&scores) {
                *total += value * scorer.weight;
            }
            scoring += started.elapsed();
        }
        metrics.observe_extension_point(&self.profile.scheduler_name, ("PreScore", "Success", preparing));
        metrics.observe_extension_point(&self.profile.scheduler_name, ("Score", "Success", scoring));
        if !self.extenders.is_empty() {
            self.extenders.score(&self.cycle, nodes, &mut total_scores);
        }
        Ok(total_scores)
    }

    /// Runs the PostFilter plugins. The first nomination wins; reasons are collected from the others.
    fn run_post_filter_plugins(&mut self, algorithm: &mut Algorithm) -> ScheduleFailure {
        let mut reasons = Vec::new();
        let (mut nomination, mut clear_nomination) = (None, false);
        for (name, plugin) in &self.profile.post_filter {
            let mut attempt = PostFilterContext {
                cycle: self.cycle,
                filters: &self.filters,
                diagnosis: &self.diagnosis,
                nominations: self.nominations,
                random: &mut algorithm.random,
                extenders: self.extenders,
            };
            let call = || plugin.post_filter(&mut attempt);
            let status = match self.timer.time(name, "PostFilter", call, PostFilterResult::name) {
                PostFilterResult::Nominate { node, victims } => {
                    nomination = Some((node, victims));
                    reasons.clear();
                    break;
                }
                PostFilterResult::Cleanup { status, task: chore } => {
                    algorithm.cleanup_tasks.push(chore);
                    status
                }
                PostFilterResult::Rejected { status, clear_nomination: clear_requested } => {
                    clear_nomination |= clear_requested;
                    status
                }
            };
            let last = matches!(status.code, Code::UnschedulableAndUnresolvable | Code::Error);
            if last {
                reasons.clear();
            }
            reasons.extend(status.with_plugin(name).reasons);
            if last {
                break;
            }
        }
        self.diagnosis.post_filter_message = reasons.join(", ");
        let nodes = self.cycle.state.order().len();
        ScheduleFailure::Unschedulable {
            error: Box::new(FitError { nodes, diagnosis: std::mem::take(&mut self.diagnosis) }),
            nomination,
            clear_nomination,
        }
    }
}

/// Returns the names of nodes.
pub fn node_names<'s>(state: &'s State, nodes: &'s [NodeId]) -> impl Iterator<Item = &'s Arc<str>> {
    nodes.iter().map(|id| &state.node(*id).name)
}
