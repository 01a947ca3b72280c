//! NodeResourcesFit: the node must have enough free resources for the pod; scores nodes by their utilization.

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;

use super::dynamic_resources::extended_resources::{ExtendedResource, resources_with_device_class};
use super::parse_args;
use crate::framework::{
    ClusterEvent, Code, Cycle, FnFilter, MAX_SCORE, Plugin, PreFilter, PreFilterResult, PreScore,
    PreScoreResult, Requeue, Score, Status,
};
use crate::state::resources::{ResourceName, Resources, is_extended, is_scalar};
use crate::state::{NodeId, NodeInfo, PodInfo, State};

pub const NAME: &str = "NodeResourcesFit";

/// The highest score in a configured shape (upstream's `MaxCustomPriorityScore`).
const MAX_CONFIGURED_SCORE: i64 = 10;

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Args {
    ignored_resources: Vec<String>,
    ignored_resource_groups: Vec<String>,
    scoring_strategy: ScoringStrategy,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ScoringStrategy {
    #[serde(rename = "type")]
    kind: ScoringStrategyType,
    resources: Vec<ResourceSpec>,
    requested_to_capacity_ratio: Option<RequestedToCapacityRatioParam>,
}

#[derive(Clone, Copy, Default, Deserialize, PartialEq, Eq)]
enum ScoringStrategyType {
    #[default]
    LeastAllocated,
    MostAllocated,
    RequestedToCapacityRatio,
}

#[derive(Deserialize)]
struct RequestedToCapacityRatioParam {
    shape: Vec<UtilizationShapePoint>,
}

#[derive(Deserialize)]
struct UtilizationShapePoint {
    utilization: i64,
    score: i64,
}

/// A resource with its weight, as in plugin arguments.
#[derive(Clone, Deserialize)]
pub(super) struct ResourceSpec {
    pub name: String,
    #[serde(default)]
    pub weight: i64,
}

/// Returns the resources with their weights; CPU and memory with equal weights by default.
pub(super) fn resources_with_weights(specs: &[ResourceSpec]) -> Result<Vec<(ResourceName, i64)>, String> {
    if specs.is_empty() {
        return Ok(vec![(ResourceName::Cpu, 1), (ResourceName::Memory, 1)]);
    }
    let read = |spec: &ResourceSpec| match spec.weight {
        0 => Ok((ResourceName::from(&*spec.name), 1)),
        1..=100 => Ok((ResourceName::from(&*spec.name), spec.weight)),
        weight => Err(format!("resource weight of {} not in valid range [1, 100]: {weight}", spec.name)),
    };
    specs.iter().map(read).collect()
}

struct Fit {
    ignored: Vec<String>,
    ignored_groups: Vec<String>,
    strategy_type: ScoringStrategyType,
    resources: Vec<(ResourceName, i64)>,
    /// Utilization and score, in ascending order.
    shape: Vec<(i64, i64)>,
}

/// Creates the plugin.
pub fn make(args: &Value) -> Result<Plugin, String> {
    let args: Args = parse_args(args)?;
    let strategy = args.scoring_strategy;
    let mut shape = Vec::new();
    if strategy.kind == ScoringStrategyType::RequestedToCapacityRatio {
        let ratio = strategy.requested_to_capacity_ratio.ok_or("requestedToCapacityRatio: Required value")?;
        shape = read_shape(&ratio.shape)?;
    }
    let plugin = Arc::new(Fit {
        ignored: args.ignored_resources,
        ignored_groups: args.ignored_resource_groups,
        strategy_type: strategy.kind,
        resources: resources_with_weights(&strategy.resources)?,
        shape,
    });
    Ok(Plugin::new(NAME).pre_filter(plugin.clone()).pre_score(plugin.clone()).requeue(plugin))
}

fn read_shape(points: &[UtilizationShapePoint]) -> Result<Vec<(i64, i64)>, String> {
    if points.is_empty() {
        return Err("shape: at least one point must be specified".to_owned());
    }
    for (i, point) in points.iter().enumerate() {
        if !(0..=100).contains(&point.utilization) {
            return Err(format!("shape[{i}].utilization: not in valid range [0, 100]"));
        }
        if !(0..=MAX_CONFIGURED_SCORE).contains(&point.score) {
            return Err(format!("shape[{i}].score: not in valid range [0, 10]"));
        }
        if i > 0 && points[i - 1].utilization >= point.utilization {
            return Err(format!(
                "shape[{i}].utilization: utilization values must be sorted in increasing order"
            ));
        }
    }
    let scaled =
        |point: &UtilizationShapePoint| (point.utilization, point.score * (MAX_SCORE / MAX_CONFIGURED_SCORE));
    Ok(points.iter().map(scaled).collect())
}

impl PreFilter for Fit {
    fn pre_filter<'c>(&'c self, cycle: &Cycle<'c>) -> PreFilterResult<'c> {
        let request = &cycle.pod.requests.exact;
        let devices = resources_with_device_class(cycle.pod, &cycle.state.objects);
        PreFilterResult::Filter(Box::new(FnFilter(move |node: &NodeInfo| self.fits(request, &devices, node))))
    }
}

impl Fit {
    /// Returns the insufficient resources. Resources in `devices` that the node does not provide are skipped:
    /// DRA allocates devices for them.
    fn fits(&self, request: &Resources, devices: &[ExtendedResource], node: &NodeInfo) -> Status {
        let mut insufficient = InsufficientResources::default();
        let (has, used) = (&node.allocatable, &node.requested);
        if node.pods.len() as i64 + 1 > has.pods {
            insufficient.add("Too many pods", false);
        }
        if request.is_zero() {
            return insufficient.into_status();
        }
        let is_insufficient =
            |request: i64, has: i64, used: i64| request > 0 && request > has.saturating_sub(used);
        if is_insufficient(request.milli_cpu, has.milli_cpu, used.milli_cpu) {
            insufficient.add("Insufficient cpu", request.milli_cpu > has.milli_cpu);
        }
        if is_insufficient(request.memory, has.memory, used.memory) {
            insufficient.add("Insufficient memory", request.memory > has.memory);
        }
        if is_insufficient(request.ephemeral_storage, has.ephemeral_storage, used.ephemeral_storage) {
            insufficient
                .add("Insufficient ephemeral-storage", request.ephemeral_storage > has.ephemeral_storage);
        }
        for (name, amount) in &request.scalar {
            if self.ignores(name) {
                continue;
            }
            let (has, used) = (has.scalar(name), used.scalar(name));
            if has == 0 && devices.iter().any(|(backed, _)| backed == name) {
                continue;
            }
            if is_insufficient(*amount, has, used) {
                insufficient.add(format!("Insufficient {name}"), *amount > has);
            }
        }
        insufficient.into_status()
    }

    fn ignores(&self, name: &str) -> bool {
        let group = name.split('/').next().unwrap_or_default();
        is_extended(name)
            && (self.ignored.iter().any(|known| known == name)
                || self.ignored_groups.iter().any(|known| known == group))
    }

    fn score_resource(&self, requested: i64, capacity: i64) -> i64 {
        match self.strategy_type {
            ScoringStrategyType::LeastAllocated if requested > capacity => 0,
            ScoringStrategyType::LeastAllocated => share(capacity - requested, capacity),
            ScoringStrategyType::MostAllocated => share(requested.min(capacity), capacity),
            ScoringStrategyType::RequestedToCapacityRatio if requested > capacity => {
                broken_linear(&self.shape, 100)
            }
            ScoringStrategyType::RequestedToCapacityRatio => {
                broken_linear(&self.shape, share(requested, capacity))
            }
        }
    }
}

/// Percentage of `whole`. Falls back to 128-bit arithmetic on overflow.
fn share(part: i64, whole: i64) -> i64 {
    part.checked_mul(MAX_SCORE)
        .map_or_else(|| (i128::from(part) * 100 / i128::from(whole)) as i64, |p| p / whole)
}

/// Interpolates linearly between the points of a shape (upstream's `BuildBrokenLinearFunction`).
fn broken_linear(shape: &[(i64, i64)], at: i64) -> i64 {
    let Some(next) = shape.iter().position(|(x, _)| at <= *x) else {
        return shape.last().map_or(0, |(_, y)| *y);
    };
    if next == 0 {
        return shape[0].1;
    }
    let ((x0, y0), (x1, y1)) = (shape[next - 1], shape[next]);
    y0 + (y1 - y0) * (at - x0) / (x1 - x0)
}

#[derive(Default)]
struct InsufficientResources {
    reasons: Vec<Cow<'static, str>>,
    /// A request exceeds the node's allocatable amount, so preemption cannot help.
    exceeds_allocatable: bool,
}

impl InsufficientResources {
    fn add(&mut self, reason: impl Into<Cow<'static, str>>, exceeds_allocatable: bool) {
        self.reasons.push(reason.into());
        self.exceeds_allocatable |= exceeds_allocatable;
    }

    fn into_status(self) -> Status {
        let code = match (self.reasons.is_empty(), self.exceeds_allocatable) {
            (true, _) => Code::Success,
            (false, false) => Code::Unschedulable,
            (false, true) => Code::UnschedulableAndUnresolvable,
        };
        Status { code, reasons: self.reasons, plugin: "" }
    }
}

/// The amount of a resource that a pod counts for in scores.
fn scoring_request(pod: &PodInfo, name: &ResourceName) -> i64 {
    match name {
        ResourceName::Cpu => pod.requests.scoring[0],
        ResourceName::Memory => pod.requests.scoring[1],
        other => pod.requests.exact.get(other),
    }
}

impl PreScore for Fit {
    fn pre_score<'c>(&'c self, cycle: &Cycle<'c>, _: &[NodeId]) -> PreScoreResult<'c> {
        let requests =
            self.resources.iter().map(|(name, weight)| (name, *weight, scoring_request(cycle.pod, name)));
        // Extended resources that the pod does not request are left out of the score.
        let is_included = |(name, _, amount): &(&ResourceName, i64, i64)| {
            *amount != 0 || !matches!(name, ResourceName::Scalar(name) if is_scalar(name))
        };
        PreScoreResult::Score(Box::new(AllocationScore {
            fit: self,
            requests: requests.filter(is_included).collect(),
        }))
    }
}

struct AllocationScore<'c> {
    fit: &'c Fit,
    /// Resource, weight and the pod's request.
    requests: Vec<(&'c ResourceName, i64, i64)>,
}

impl Score for AllocationScore<'_> {
    fn score(&self, node: &NodeInfo) -> i64 {
        let (mut sum, mut weights) = (0, 0);
        for (name, weight, request) in &self.requests {
            let capacity = node.allocatable.get(name);
            if capacity == 0 {
                continue;
            }
            let used = match name {
                ResourceName::Cpu => node.nonzero[0],
                ResourceName::Memory => node.nonzero[1],
                other => node.requested.get(other),
            };
            let rate = self.fit.score_resource(used.saturating_add(*request), capacity);
            if self.fit.strategy_type == ScoringStrategyType::RequestedToCapacityRatio && rate <= 0 {
                continue;
            }
            sum += rate * weight;
            weights += weight;
        }
        match (weights, self.fit.strategy_type) {
            (0, _) => 0,
            (_, ScoringStrategyType::RequestedToCapacityRatio) => {
                (sum as f64 / weights as f64).round() as i64
            }
            _ => sum / weights,
        }
    }
}

impl Requeue for Fit {
    fn is_schedulable_after_change(&self, pod: &PodInfo, change: &ClusterEvent<'_>, state: &State) -> bool {
        let request = &pod.requests.exact;
        match change {
            ClusterEvent::Node(pair) => {
                let Some(new) = pair.new else { return false };
                let empty = NodeInfo {
                    pods: Vec::new(),
                    requested: Resources::default(),
                    allocatable: new.allocatable.clone(),
                    ..NodeInfo::named(new.id, new.name.clone())
                };
                if !self.fits(request, &resources_with_device_class(pod, &state.objects), &empty).is_success()
                {
                    return false;
                }
                pair.old.is_none_or(|old| {
                    has_more_requested_resources(request, &old.allocatable, &new.allocatable)
                })
            }
            ClusterEvent::Pod(pair) => match (pair.old, pair.new) {
                (Some(old), None) => old.node_name.is_some() || old.nominated.is_some(),
                (Some(old), Some(new)) if new.uid == pod.uid => is_resource_scale_down(request, old, new),
                (Some(old), Some(new)) => {
                    new.node_name.is_some() && is_resource_scale_down(request, old, new)
                }
                _ => false,
            },
            // The class may back an extended resource that the pod requests.
            ClusterEvent::DeviceClass(pair) => {
                pair.new.is_some() && !resources_with_device_class(pod, &state.objects).is_empty()
            }
            _ => false,
        }
    }
}

/// Whether the node has more of a resource that the pod requests.
fn has_more_requested_resources(request: &Resources, old: &Resources, new: &Resources) -> bool {
    new.pods > old.pods
        || (request.milli_cpu > 0 && new.milli_cpu > old.milli_cpu)
        || (request.memory > 0 && new.memory > old.memory)
        || (request.ephemeral_storage > 0 && new.ephemeral_storage > old.ephemeral_storage)
        || request.scalar.iter().any(|(name, amount)| *amount > 0 && new.scalar(name) > old.scalar(name))
}

/// Whether the updated pod uses less of a resource that the unscheduled pod requests.
fn is_resource_scale_down(request: &Resources, old: &PodInfo, new: &PodInfo) -> bool {
    let (old, new) = (&old.requests.exact, &new.requests.exact);
    (request.milli_cpu > 0 && old.milli_cpu > new.milli_cpu)
        || (request.memory > 0 && old.memory > new.memory)
        || (request.ephemeral_storage > 0 && old.ephemeral_storage > new.ephemeral_storage)
        || request.scalar.iter().any(|(name, amount)| *amount > 0 && old.scalar(name) > new.scalar(name))
}
