//! DefaultPreemption: makes room for a pod by deleting pods of lower priority from one node.
//!
//! Simulated on copies of the nodes where preemption may help: all pods of lower priority are removed, and if
//! the pod then fits, as many as possible are added again, the most important first. The rest are the
//! victims. Of the candidates the one with the least disruption is selected.

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::sync::Arc;

use jiff::Timestamp;
use serde::Deserialize;
use serde_json::Value;

use super::parse_args;
use crate::algorithm::{Candidate, Diagnosis, FitError};
use crate::framework::{Code, Plugin, PostFilter, PostFilterContext, PostFilterResult, Status};
use crate::state::objects::Budget;
use crate::state::{NodeId, PodInfo};

pub const NAME: &str = "DefaultPreemption";

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Args {
    min_candidate_nodes_percentage: usize,
    min_candidate_nodes_absolute: usize,
}

impl Default for Args {
    fn default() -> Args {
        Args { min_candidate_nodes_percentage: 10, min_candidate_nodes_absolute: 100 }
    }
}

struct DefaultPreemption(Args);

/// Creates the plugin.
pub fn make(args: &Value) -> Result<Plugin, String> {
    let args: Args = parse_args(args)?;
    if args.min_candidate_nodes_percentage > 100 {
        return Err("minCandidateNodesPercentage: not in valid range [0, 100]".to_owned());
    }
    if args.min_candidate_nodes_percentage == 0 && args.min_candidate_nodes_absolute == 0 {
        let words = "minCandidateNodesPercentage and minCandidateNodesAbsolute cannot both be zero";
        return Err(words.to_owned());
    }
    Ok(Plugin::new(NAME).post_filter(Arc::new(DefaultPreemption(args))))
}

impl PostFilter for DefaultPreemption {
    fn post_filter(&self, attempt: &mut PostFilterContext<'_, '_>) -> PostFilterResult {
        let rejected = |words: String, clear: bool| PostFilterResult::Rejected {
            status: Status::unschedulable(format!("preemption: {words}")),
            clear_nomination: clear,
        };
        if let Some(words) = check_can_preempt(attempt) {
            return rejected(words.to_owned(), false);
        }
        let (mut candidates, statuses) = self.find_candidates(attempt);
        let state = attempt.cycle.state;
        if let Err(words) = attempt.extenders.preempt(&attempt.cycle, &mut candidates) {
            return PostFilterResult::Rejected {
                status: Status::error(format!("preemption: {words}")),
                clear_nomination: false,
            };
        }
        let Some(best) = pick_one_node_for_preemption(&candidates) else {
            let absent = Status::unresolvable("Preemption is not helpful for scheduling");
            let error = FitError { nodes: state.order().len(), diagnosis: Diagnosis::new(statuses, absent) };
            return rejected(error.to_string(), true);
        };
        PostFilterResult::Nominate { node: state.node(best.node).name.clone(), victims: best.victims.clone() }
    }
}

/// Why the pod may not preempt others (upstream's `PodEligibleToPreemptOthers`); `None` if it may.
fn check_can_preempt(attempt: &PostFilterContext<'_, '_>) -> Option<&'static str> {
    let pod = attempt.cycle.pod;
    if pod.preemption_disabled {
        return Some("not eligible due to preemptionPolicy=Never.");
    }
    let nominated_node = attempt.cycle.state.node_by_name(pod.nominated.as_ref()?)?;
    if attempt.diagnosis.status_of(nominated_node.id).code == Code::UnschedulableAndUnresolvable {
        return None;
    }
    let is_terminating_victim =
        |other: &Arc<PodInfo>| other.priority < pod.priority && other.terminating && other.preempted;
    nominated_node
        .pods
        .iter()
        .any(is_terminating_victim)
        .then_some("not eligible due to a terminating pod on the nominated node.")
}

impl DefaultPreemption {
    fn find_candidates(
        &self,
        attempt: &mut PostFilterContext<'_, '_>,
    ) -> (Vec<Candidate>, Vec<(NodeId, Status)>) {
        let state = attempt.cycle.state;
        let nodes: Vec<NodeId> = if attempt.diagnosis.absent_nodes_status.code == Code::Unschedulable {
            let is_candidate = |id: &NodeId| attempt.diagnosis.status_of(*id).code == Code::Unschedulable;
            state.order().iter().copied().filter(is_candidate).collect()
        } else {
            let unschedulable = |status: &Status| status.code == Code::Unschedulable;
            let listed = attempt.diagnosis.nodes.iter().filter(|(_, status)| unschedulable(status));
            listed.map(|(id, _)| *id).collect()
        };
        let enough = (nodes.len() * self.0.min_candidate_nodes_percentage / 100)
            .max(self.0.min_candidate_nodes_absolute)
            .min(nodes.len());
        let offset = attempt.random.next_below(nodes.len());
        let budgets: Vec<&Budget> = state.objects.budgets().collect();
        let (mut non_violating, mut violating, mut statuses) = (Vec::new(), Vec::new(), Vec::new());
        let (tail, head) = nodes.split_at(offset);
        for &node in head.iter().chain(tail) {
            match select_victims_on_node(attempt, node, &budgets) {
                Ok(candidate) if candidate.violations == 0 => non_violating.push(candidate),
                Ok(candidate) => violating.push(candidate),
                Err(status) => statuses.push((node, status)),
            }
            if !non_violating.is_empty() && non_violating.len() + violating.len() >= enough {
                break;
            }
        }
        non_violating.append(&mut violating);
        (non_violating, statuses)
    }
}

/// Sort key by importance: higher priority first, then earlier start (upstream's `MoreImportantPod`).
fn victim_order(pod: &PodInfo) -> (Reverse<i32>, Timestamp) {
    (Reverse(pod.priority), pod.started.unwrap_or(Timestamp::MAX))
}

/// Finds the victims on a node (upstream's `SelectVictimsOnNode`).
fn select_victims_on_node(
    attempt: &PostFilterContext<'_, '_>,
    node: NodeId,
    budgets: &[&Budget],
) -> Result<Candidate, Status> {
    let pod = attempt.cycle.pod;
    let original = attempt.cycle.state.node(node);
    let mut lower: Vec<Arc<PodInfo>> =
        original.pods.iter().filter(|other| other.priority < pod.priority).cloned().collect();
    if lower.is_empty() {
        return Err(Status::unresolvable("No preemption victims found for incoming pod"));
    }
    let (mut filters, mut copy) = (attempt.filters.fork(), original.clone());
    for other in &lower {
        copy.remove(&other.uid);
        filters.remove_pod(other, &copy);
    }
    let status = filters.run_with_nominated(pod, &copy, attempt.nominations);
    if !status.is_success() {
        return Err(status);
    }
    lower.sort_by_key(|other| victim_order(other));
    let (violating, non_violating) = filter_pods_with_pdb_violation(&lower, budgets);
    let (mut victims, mut violations) = (Vec::new(), 0);
    let both = !violating.is_empty() && !non_violating.is_empty();
    let first = violating.len();
    for (i, other) in violating.into_iter().chain(non_violating).enumerate() {
        copy.add(other.clone());
        filters.add_pod(other, &copy);
        if !filters.run_with_nominated(pod, &copy, attempt.nominations).is_success() {
            copy.remove(&other.uid);
            filters.remove_pod(other, &copy);
            victims.push(other.clone());
            violations += usize::from(i < first);
        }
    }
    if victims.is_empty() {
        return Err(Status::error(format!("expected at least one victim pod on node {:?}", original.name)));
    }
    if both {
        victims.sort_by_key(|other| victim_order(other));
    }
    Ok(Candidate { node, victims, violations })
}

/// Splits pods into those whose deletion would violate a PodDisruptionBudget, and the others.
fn filter_pods_with_pdb_violation<'p>(
    pods: &'p [Arc<PodInfo>],
    budgets: &[&Budget],
) -> (Vec<&'p Arc<PodInfo>>, Vec<&'p Arc<PodInfo>>) {
    let mut allowed: Vec<i32> = budgets.iter().map(|budget| budget.allowed).collect();
    pods.iter().partition(|pod| {
        let mut is_violating = false;
        for (budget, left) in budgets.iter().zip(&mut allowed) {
            let covers = *budget.namespace == *pod.namespace
                && !pod.labels.is_empty()
                && !budget.selector.is_everything()
                && pod.labels.matched_by(&budget.selector)
                && !budget.disrupted.iter().any(|name| **name == *pod.name);
            if covers {
                *left -= 1;
                is_violating |= *left < 0;
            }
        }
        is_violating
    })
}

/// Selects the candidate with the least disruption (upstream's `pickOneNodeForPreemption`): fewest PDB
/// violations, then lowest priority of the most important victim, lowest sum of priorities, fewest victims,
/// latest start of the most important victims.
fn pick_one_node_for_preemption(candidates: &[Candidate]) -> Option<&Candidate> {
    let cost = |candidate: &Candidate| {
        let highest = candidate.victims.first().map_or(i32::MIN, |pod| pod.priority);
        // 2^31 is added as upstream does: it makes every priority non-negative, so that more victims mean a
        // higher sum.
        let sum: i64 = candidate.victims.iter().map(|pod| i64::from(pod.priority) + (1 << 31)).sum();
        let of_highest = candidate.victims.iter().filter(|pod| pod.priority == highest);
        let earliest = of_highest.map(|pod| pod.started.unwrap_or(Timestamp::MAX)).min();
        (candidate.violations, highest, sum, candidate.victims.len(), Reverse(earliest))
    };
    candidates.iter().min_by_key(|candidate| cost(candidate))
}
