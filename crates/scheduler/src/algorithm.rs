//! Finds a node for a pod: filter, and if several pass, score.

mod diagnosis;
pub mod random;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::{Duration, Instant};

pub use diagnosis::{Diagnosis, FitError};
pub use random::Random;

use crate::framework::{
    Attempt, Chore, Code, Cycle, Filters, Nominations, Prepared, Profile, Rescue, Scoring, Status,
};
use crate::metrics::Metrics;
use crate::metrics::stopwatch::Stopwatch;
use crate::state::{NodeId, State};

/// With fewer nodes than this all are looked at.
const MIN_FEASIBLE: usize = 100;
/// At least this part of the nodes is looked at, in percent.
const MIN_PERCENTAGE: usize = 5;

/// The node that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    pub node: Arc<str>,
    /// How many nodes were looked at, and how many passed.
    pub evaluated: usize,
    pub feasible: usize,
}

/// Why no node was found.
pub enum Failure {
    /// There are no nodes.
    NoNodes,
    /// No node will do. With what was found to make room.
    Unfit { error: Box<FitError>, rescue: Option<(Arc<str>, Vec<Arc<crate::state::PodInfo>>)>, clear: bool },
    /// Something went wrong.
    Error(String),
}

/// Programs outside that take part; see `crate::extender`.
pub trait Extenders: Send + Sync {
    /// Whether there are none.
    fn is_empty(&self) -> bool;
    /// Whether any of them filters nodes.
    fn filters(&self) -> bool;
    /// Whether any of them scores nodes.
    fn scores(&self) -> bool;
    /// Takes out nodes, with statuses for them; fails the attempt by an error.
    fn filter(
        &self,
        cycle: &Cycle<'_>,
        nodes: &mut Vec<NodeId>,
        diagnosis: &mut Diagnosis,
    ) -> Result<(), String>;
    /// Adds to the scores.
    fn score(&self, cycle: &Cycle<'_>, nodes: &[NodeId], scores: &mut [i64]);
    /// Takes out nodes that no room is to be made on, or changes which pods have to go there.
    fn preempt(&self, _cycle: &Cycle<'_>, _candidates: &mut Vec<Candidate>) -> Result<(), String> {
        Ok(())
    }
}

/// A node with the pods that would have to go to make room, the most important first.
#[derive(Clone, Debug)]
pub struct Candidate {
    pub node: NodeId,
    pub victims: Vec<Arc<crate::state::PodInfo>>,
    /// How many of them a disruption budget protects.
    pub violations: usize,
}

/// No extenders.
pub struct NoExtenders;

impl Extenders for NoExtenders {
    fn is_empty(&self) -> bool {
        true
    }

    fn filters(&self) -> bool {
        false
    }

    fn scores(&self) -> bool {
        false
    }

    fn filter(&self, _: &Cycle<'_>, _: &mut Vec<NodeId>, _: &mut Diagnosis) -> Result<(), String> {
        Ok(())
    }

    fn score(&self, _: &Cycle<'_>, _: &[NodeId], _: &mut [i64]) {}
}

/// What the algorithm keeps from one pod to the next.
pub struct Algorithm {
    /// How much of the nodes to look at, in percent; 0 adapts to how many there are.
    pub percentage: i32,
    /// Where to go on looking, so that every node gets its turn.
    next_start: usize,
    pub random: Random,
    pub metrics: Arc<Metrics>,
    /// Measures the plugins of the last attempt.
    pub watch: Stopwatch,
    attempts: u64,
    /// What the post-filters of the last attempt would have done.
    pub chores: Vec<Chore>,
}

impl Algorithm {
    /// A new start. The seed decides between equal nodes.
    pub fn new(percentage: i32, seed: u64) -> Algorithm {
        let (metrics, watch) = (Arc::default(), Stopwatch::default());
        Algorithm {
            percentage,
            next_start: 0,
            random: Random::new(seed),
            metrics,
            watch,
            attempts: 0,
            chores: Vec::new(),
        }
    }

    /// Finds a node for a pod. The state must be refreshed.
    pub fn schedule(
        &mut self,
        profile: &Profile,
        cycle: &Cycle<'_>,
        nominations: &dyn Nominations,
        extenders: &dyn Extenders,
    ) -> Result<Placement, Failure> {
        if cycle.state.order().is_empty() {
            return Err(Failure::NoNodes);
        }
        self.watch = Stopwatch::for_attempt(self.attempts, &self.metrics);
        self.attempts += 1;
        let mut search = Search {
            profile,
            watch: self.watch.clone(),
            cycle: *cycle,
            nominations,
            extenders,
            filters: Filters::default(),
            diagnosis: Diagnosis::default(),
            evaluated: 1,
        };
        let found = self.place(&mut search);
        search.filters.count(&profile.filters_asked);
        found
    }

    fn place(&mut self, search: &mut Search<'_, '_>) -> Result<Placement, Failure> {
        let (profile, cycle) = (search.profile, search.cycle);
        let feasible = search.feasible(self).map_err(Failure::Error)?;
        match &feasible[..] {
            [] => {
                let begun = Instant::now();
                let failure = search.fail(self);
                let helped = matches!(failure, Failure::Unfit { rescue: Some(_), .. });
                let status = if helped { "Success" } else { "Unschedulable" };
                self.metrics.ran(&profile.scheduler_name, ("PostFilter", status, begun.elapsed()));
                Err(failure)
            }
            [only] => {
                let node = cycle.state.node(*only).name.clone();
                Ok(Placement { node, evaluated: search.evaluated, feasible: 1 })
            }
            several => {
                let scores = search.scores(several, &self.metrics).map_err(Failure::Error)?;
                let best = self.random.best(&scores);
                Ok(Placement {
                    node: cycle.state.node(several[best]).name.clone(),
                    evaluated: search.evaluated,
                    feasible: several.len(),
                })
            }
        }
    }

    /// After how many nodes that will do the search ends.
    fn enough(&self, profile: &Profile, nodes: usize) -> usize {
        if nodes < MIN_FEASIBLE {
            return nodes;
        }
        let percentage = match profile.percentage.unwrap_or(self.percentage) {
            0 => 50usize.saturating_sub(nodes / 125).max(MIN_PERCENTAGE),
            set => set.clamp(0, 100) as usize,
        };
        (nodes * percentage / 100).max(MIN_FEASIBLE)
    }
}

/// One pod's search.
struct Search<'a, 'c> {
    profile: &'c Profile,
    watch: Stopwatch,
    cycle: Cycle<'c>,
    nominations: &'a dyn Nominations,
    extenders: &'a dyn Extenders,
    filters: Filters<'c>,
    diagnosis: Diagnosis,
    /// How many nodes were looked at.
    evaluated: usize,
}

impl<'c> Search<'_, 'c> {
    fn feasible(&mut self, algorithm: &mut Algorithm) -> Result<Vec<NodeId>, String> {
        let begun = Instant::now();
        let prepared = self.prepare();
        let status = match &prepared {
            Ok(Some(_)) => "Success",
            Ok(None) => "Unschedulable",
            Err(_) => "Error",
        };
        algorithm.metrics.ran(&self.profile.scheduler_name, ("PreFilter", status, begun.elapsed()));
        let Some(only) = prepared? else { return Ok(Vec::new()) };
        let begun = Instant::now();
        let found = self.filtered(only, algorithm);
        let status = match &found {
            Ok(found) if found.is_empty() => "Unschedulable",
            Ok(_) => "Success",
            Err(_) => "Error",
        };
        algorithm.metrics.ran(&self.profile.scheduler_name, ("Filter", status, begun.elapsed()));
        found
    }

    /// The nodes that pass the filters, of all or of those that come into question.
    fn filtered(
        &mut self,
        only: Option<Vec<String>>,
        algorithm: &mut Algorithm,
    ) -> Result<Vec<NodeId>, String> {
        let state = self.cycle.state;
        // A node that was promised is likely the only one.
        if let Some(node) = self.cycle.pod.nominated.as_ref().and_then(|name| state.node_named(name)) {
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
            None => self.search(all, algorithm)?,
            Some(names) => {
                let there: Vec<NodeId> =
                    names.iter().filter_map(|name| state.node_named(name)).map(|node| node.id).collect();
                self.search(&there, algorithm)?
            }
        };
        algorithm.next_start = (algorithm.next_start + self.evaluated) % all.len();
        if !self.extenders.is_empty() {
            let before = found.len();
            self.extenders.filter(&self.cycle, &mut found, &mut self.diagnosis)?;
            if found.len() != before {
                self.diagnosis.rejected_by.insert("Extender");
            }
        }
        Ok(found)
    }

    /// Asks the pre-filters. `None` if one of them has turned the pod away; else the nodes that come into
    /// question if not all do.
    fn prepare(&mut self) -> Result<Option<Option<Vec<String>>>, String> {
        let mut only: Option<Vec<String>> = None;
        let mut narrowed: Vec<&'static str> = Vec::new();
        let mut turned_away: Option<Status> = None;
        for (place, (name, plugin)) in self.profile.pre_filter.iter().enumerate() {
            let ask = || plugin.pre_filter(&self.cycle);
            match self.watch.time(name, "PreFilter", ask, Prepared::name) {
                Prepared::Skip => {}
                Prepared::Filter(filter) => self.filters.push(name, place, self.watch.watch(name, filter)),
                Prepared::Only(nodes, filter) => {
                    self.filters.push(name, place, self.watch.watch(name, filter));
                    narrowed.push(name);
                    narrowed.sort_unstable();
                    match &mut only {
                        None => only = Some(nodes),
                        Some(known) => known.retain(|node| nodes.contains(node)),
                    }
                    if only.as_ref().is_some_and(Vec::is_empty) {
                        let words = match &narrowed[..] {
                            [one] => format!("node(s) didn't satisfy plugin {one}"),
                            several => {
                                format!(
                                    "node(s) didn't satisfy plugin(s) [{}] simultaneously",
                                    several.join(" ")
                                )
                            }
                        };
                        self.diagnosis.rejected_by.extend(&narrowed);
                        self.diagnosis.reject_all(Status::unresolvable(words));
                        return Ok(None);
                    }
                }
                Prepared::Reject(status) => {
                    let status = status.by(name);
                    match status.code {
                        Code::Error => {
                            return Err(format!("running PreFilter plugin {name:?}: {}", status.message()));
                        }
                        Code::Unschedulable => turned_away = Some(status),
                        _ => {
                            self.diagnosis.reject_all(status);
                            return Ok(None);
                        }
                    }
                }
            }
        }
        if let Some(status) = turned_away {
            self.diagnosis.reject_all(status);
            return Ok(None);
        }
        if only.is_some() {
            let words = format!("node(s) didn't satisfy plugin(s) [{}]", narrowed.join(" "));
            self.diagnosis.absent = Status::unresolvable(words);
            self.diagnosis.rejected_by.extend(&narrowed);
        }
        Ok(Some(only))
    }

    fn search(&mut self, nodes: &[NodeId], algorithm: &Algorithm) -> Result<Vec<NodeId>, String> {
        let mut enough = algorithm.enough(self.profile, nodes.len());
        let scored = !self.profile.scorers.is_empty() || self.extenders.scores();
        if !scored && !self.extenders.filters() {
            enough = 1;
        }
        let mut found = Vec::with_capacity(enough.min(nodes.len()));
        let state = self.cycle.state;
        let start = if nodes.is_empty() { 0 } else { algorithm.next_start % nodes.len() };
        let (tail, head) = nodes.split_at(start);
        let quick = self.filters.quick();
        let mut ruled_out = Vec::new();
        for &id in head.iter().chain(tail) {
            if quick.iter().any(|quick| quick.rules_out(id)) {
                ruled_out.push(id);
                continue;
            }
            let node = state.node(id);
            let status = self.filters.run_with_nominated(self.cycle.pod, node, self.nominations);
            match status.code {
                Code::Success => {
                    found.push(id);
                    if found.len() >= enough {
                        break;
                    }
                }
                Code::Error => return Err(status.message()),
                _ => self.diagnosis.add(id, status),
            }
        }
        self.evaluated = found.len() + ruled_out.len() + self.diagnosis.nodes.len();
        if found.is_empty() {
            for id in ruled_out {
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

    fn scores(&self, nodes: &[NodeId], metrics: &Metrics) -> Result<Vec<i64>, String> {
        let (mut preparing, mut scoring) = (Duration::ZERO, Duration::ZERO);
        let mut totals = vec![0i64; nodes.len()];
        let mut scores = vec![0i64; nodes.len()];
        let times = nodes.len() as u64;
        for (scorer, asked) in self.profile.scorers.iter().zip(&self.profile.scorers_asked) {
            let begun = Instant::now();
            let prepare = || scorer.score.pre_score(&self.cycle, nodes);
            let scored = self.watch.time(scorer.plugin, "PreScore", prepare, Scoring::name);
            preparing += begun.elapsed();
            let score = match scored {
                Scoring::Skip => continue,
                Scoring::Score(score) => score,
                Scoring::Fail(words) => {
                    return Err(format!("running PreScore plugin {:?}: {words}", scorer.plugin));
                }
            };
            let begun = Instant::now();
            asked.add(1, times);
            let told = |_: &_| "Success";
            for (number, (value, id)) in scores.iter_mut().zip(nodes).enumerate() {
                let ask = || score.score(self.cycle.state.node(*id));
                *value = self.watch.time_node(number, scorer.plugin, "Score", ask, told);
            }
            let normalize = || score.normalize(nodes, &mut scores);
            self.watch.time(scorer.plugin, "ScoreExtensionNormalize", normalize, |()| "Success");
            for (total, value) in totals.iter_mut().zip(&scores) {
                *total += value * scorer.weight;
            }
            scoring += begun.elapsed();
        }
        metrics.ran(&self.profile.scheduler_name, ("PreScore", "Success", preparing));
        metrics.ran(&self.profile.scheduler_name, ("Score", "Success", scoring));
        if !self.extenders.is_empty() {
            self.extenders.score(&self.cycle, nodes, &mut totals);
        }
        Ok(totals)
    }

    /// Asks the post-filters for a way out.
    fn fail(&mut self, algorithm: &mut Algorithm) -> Failure {
        let mut reasons = Vec::new();
        let (mut rescue, mut clear) = (None, false);
        for (name, plugin) in &self.profile.post_filter {
            let mut attempt = Attempt {
                cycle: self.cycle,
                filters: &self.filters,
                diagnosis: &self.diagnosis,
                nominations: self.nominations,
                random: &mut algorithm.random,
                extenders: self.extenders,
            };
            let ask = || plugin.post_filter(&mut attempt);
            let status = match self.watch.time(name, "PostFilter", ask, Rescue::name) {
                Rescue::Nominate { node, victims } => {
                    rescue = Some((node, victims));
                    reasons.clear();
                    break;
                }
                Rescue::Later { status, chore } => {
                    algorithm.chores.push(chore);
                    status
                }
                Rescue::Nothing { status, clear: hopeless } => {
                    clear |= hopeless;
                    status
                }
            };
            let last = matches!(status.code, Code::UnschedulableAndUnresolvable | Code::Error);
            if last {
                reasons.clear();
            }
            reasons.extend(status.by(name).reasons);
            if last {
                break;
            }
        }
        self.diagnosis.post_filter_message = reasons.join(", ");
        let nodes = self.cycle.state.order().len();
        Failure::Unfit {
            error: Box::new(FitError { nodes, diagnosis: std::mem::take(&mut self.diagnosis) }),
            rescue,
            clear,
        }
    }
}

/// The names of nodes.
pub fn names<'s>(state: &'s State, nodes: &'s [NodeId]) -> impl Iterator<Item = &'s Arc<str>> {
    nodes.iter().map(|id| &state.node(*id).name)
}
