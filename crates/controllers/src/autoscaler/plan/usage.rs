//! Replica calculator: computes replica counts from usage and targets.
//!
//! Upstream: `pkg/controller/podautoscaler/replica_calculator.go`.

use std::collections::BTreeMap;
use std::sync::Arc;

use api::quantity::Quantity as Amount;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use reconcile::Object as _;

use super::PodMetric;
use super::replicas::{ReplicaCalculator, milli};
use crate::pod;

/// How long after a pod's start its CPU usage may be caused by initialization (upstream's default of
/// `--horizontal-pod-autoscaler-cpu-initialization-period`).
const CPU_INITIALIZATION_PERIOD: SignedDuration = SignedDuration::from_mins(5);
/// A pod that became unready within this time after its start counts as never ready
/// (`--horizontal-pod-autoscaler-initial-readiness-delay`).
const INITIAL_READINESS_DELAY: SignedDuration = SignedDuration::from_secs(30);
/// The deviation from the target ratio that does not lead to scaling
/// (`--horizontal-pod-autoscaler-tolerance`).
const DEFAULT_TOLERANCE: f64 = 0.1;

impl ReplicaCalculator<'_> {
    /// For a total that is compared with the target directly (target type `Value`).
    pub fn total_replicas(&self, total: i64, target_value: i64) -> Result<(i32, i64), String> {
        let (ratio, current) = (total as f64 / target_value as f64, self.target.replicas);
        if current != 0 && self.tolerates(ratio) {
            return Ok((current, total));
        }
        if current == 0 {
            return Ok((ratio.ceil() as i32, total));
        }
        if self.pods.is_empty() {
            let reason = "no pods returned by selector while calculating replica count";
            return Err(format!("unable to calculate ready pods: {reason}"));
        }
        let is_ready = |pod: &&Arc<Pod>| pod::phase(pod) == "Running" && pod::is_ready(pod);
        let ready = self.pods.iter().filter(is_ready).count();
        Ok(((ratio * ready as f64).ceil() as i32, total))
    }

    /// For a total that is divided by the number of pods (target type `AverageValue`).
    pub fn total_per_pod_replicas(&self, total: i64, target_value: i64) -> (i32, i64) {
        let running = self.target.running;
        let ratio = total as f64 / (target_value as f64 * f64::from(running));
        let replicas = match self.tolerates(ratio) {
            true => running,
            false => (total as f64 / target_value as f64).ceil() as i32,
        };
        (replicas, (total as f64 / f64::from(running)).ceil() as i64)
    }

    /// For values per pod. Returns the replica count and the average usage.
    pub fn raw_resource_replicas(
        &self,
        samples: BTreeMap<String, PodMetric>,
        target_value: i64,
        resource: &str,
    ) -> Result<(i32, i64), String> {
        let groups = self.group_pods(samples, resource)?;
        let usage_of = |values: &BTreeMap<String, i64>| {
            let total: i128 = values.values().map(|value| i128::from(*value)).sum();
            let usage = total / values.len().max(1) as i128;
            (usage as f64 / target_value as f64, i64::try_from(usage).unwrap_or(i64::MAX))
        };
        let (ratio, usage) = usage_of(&groups.values);
        let replicas =
            self.replicas_for_usage_ratio(&groups, ratio, |_| target_value, |values| Ok(usage_of(values).0))?;
        Ok((replicas, usage))
    }

    /// For utilization of requests. Returns the replica count, the utilization in percent and the average
    /// usage.
    pub fn resource_utilization_replicas(
        &self,
        samples: BTreeMap<String, PodMetric>,
        target_value: i32,
        resource: &str,
        container: Option<&str>,
    ) -> Result<(i32, i32, i64), String> {
        let groups = self.group_pods(samples, resource)?;
        let requests: BTreeMap<&str, i64> = self
            .pods
            .iter()
            .map(|pod| resource_request(pod, resource, container).map(|request| (pod.name(), request)))
            .collect::<Result<_, String>>()?;
        let share_of = |values: &BTreeMap<String, i64>| {
            let (mut used, mut requested, mut count) = (0_i128, 0_i128, 0_i128);
            for (name, value) in values {
                if let Some(request) = requests.get(name.as_str()) {
                    used += i128::from(*value);
                    requested += i128::from(*request);
                    count += 1;
                }
            }
            if requested == 0 {
                return Err("no metrics returned matched known pods".to_owned());
            }
            let percent = i32::try_from(used * 100 / requested).unwrap_or(i32::MAX);
            let average = i64::try_from(used / count).unwrap_or(i64::MAX);
            Ok((f64::from(percent) / f64::from(target_value), percent, average))
        };
        let (ratio, percent, average) = share_of(&groups.values)?;
        // When scaling down, pods without metrics count as using their full request, or the target if it is
        // higher.
        let all = i128::from(target_value.max(100));
        let fallback = |name: &str| {
            let request = requests.get(name).copied().unwrap_or(0);
            i64::try_from(i128::from(request) * all / 100).unwrap_or(i64::MAX)
        };
        let compute_ratio = |values: &BTreeMap<String, i64>| share_of(values).map(|(ratio, ..)| ratio);
        let replicas = self.replicas_for_usage_ratio(&groups, ratio, fallback, compute_ratio)?;
        Ok((replicas, percent, average))
    }

    /// The replica count for a ratio of usage to target. Pods that are unready or have no metrics are added
    /// with conservative values, which dampen the change and never reverse its direction.
    fn replicas_for_usage_ratio(
        &self,
        groups: &PodGroups,
        ratio: f64,
        fallback: impl Fn(&str) -> i64,
        compute_ratio: impl Fn(&BTreeMap<String, i64>) -> Result<f64, String>,
    ) -> Result<i32, String> {
        let current = self.target.replicas;
        let grow_over_unready = !groups.unready.is_empty() && ratio > 1.0;
        if !grow_over_unready && groups.missing.is_empty() {
            if self.tolerates(ratio) {
                return Ok(current);
            }
            return Ok((ratio * groups.ready as f64).ceil() as i32);
        }
        let mut values = groups.values.clone();
        for name in &groups.missing {
            if ratio < 1.0 {
                values.insert(name.clone(), fallback(name));
            } else if ratio > 1.0 {
                values.insert(name.clone(), 0);
            }
        }
        if grow_over_unready {
            values.extend(groups.unready.iter().map(|name| (name.clone(), 0)));
        }
        let new_usage_ratio = compute_ratio(&values)?;
        let direction_changed =
            (ratio < 1.0 && new_usage_ratio > 1.0) || (ratio > 1.0 && new_usage_ratio < 1.0);
        if self.tolerates(new_usage_ratio) || direction_changed {
            return Ok(current);
        }
        let replicas = (new_usage_ratio * values.len() as f64).ceil() as i32;
        let direction_changed =
            (new_usage_ratio < 1.0 && replicas > current) || (new_usage_ratio > 1.0 && replicas < current);
        Ok(if direction_changed { current } else { replicas })
    }

    fn tolerates(&self, ratio: f64) -> bool {
        let behavior = self.spec.behavior.as_ref();
        let tolerance = |quantity: Option<&Quantity>| {
            let amount = quantity.and_then(|quantity| Amount::parse(&quantity.0).ok());
            amount.map_or(DEFAULT_TOLERANCE, |amount| amount.to_f64())
        };
        let down = behavior.and_then(|behavior| behavior.scale_down.as_ref()?.tolerance.as_ref());
        let up = behavior.and_then(|behavior| behavior.scale_up.as_ref()?.tolerance.as_ref());
        (1.0 - tolerance(down)..=1.0 + tolerance(up)).contains(&ratio)
    }

    fn group_pods(&self, samples: BTreeMap<String, PodMetric>, resource: &str) -> Result<PodGroups, String> {
        if self.pods.is_empty() {
            return Err("no pods returned by selector while calculating replica count".to_owned());
        }
        let values = samples.iter().map(|(name, sample)| (name.clone(), sample.value)).collect();
        let mut groups = PodGroups { values, ..PodGroups::default() };
        for pod in self.pods {
            let name = pod.name();
            if pod.is_deleting() || pod::phase(pod) == "Failed" {
                groups.values.remove(name);
            } else if pod::phase(pod) == "Pending" {
                groups.values.remove(name);
                groups.unready.push(name.to_owned());
            } else {
                match samples.get(name) {
                    None => groups.missing.push(name.to_owned()),
                    Some(sample) if resource == "cpu" && self.is_starting(pod, sample) => {
                        groups.values.remove(name);
                        groups.unready.push(name.to_owned());
                    }
                    Some(_) => groups.ready += 1,
                }
            }
        }
        match groups.values.is_empty() {
            true => Err("did not receive metrics for targeted pods (pods might be unready)".to_owned()),
            false => Ok(groups),
        }
    }

    /// Whether a pod's CPU usage is ignored because the pod is still initializing.
    fn is_starting(&self, pod: &Pod, sample: &PodMetric) -> bool {
        let started = pod.status.as_ref().and_then(|status| status.start_time.as_ref());
        let (Some(started), Some(ready)) = (started, pod::condition(pod, "Ready")) else { return true };
        let changed = ready.last_transition_time.as_ref().map_or(Timestamp::UNIX_EPOCH, |time| time.0);
        let later = |time: Timestamp, pause| time.checked_add(pause).unwrap_or(Timestamp::MAX);
        let is_unready = ready.status == "False";
        if later(started.0, CPU_INITIALIZATION_PERIOD) > self.now {
            is_unready || sample.at < later(changed, sample.window)
        } else {
            is_unready && later(started.0, INITIAL_READINESS_DELAY) > changed
        }
    }
}

/// The target's pods, grouped by how they count.
#[derive(Default)]
struct PodGroups {
    /// Metric values of the pods that count.
    values: BTreeMap<String, i64>,
    ready: usize,
    unready: Vec<String>,
    missing: Vec<String>,
}

/// The resource request of a pod, or of one of its containers.
fn resource_request(pod: &Pod, resource: &str, container: Option<&str>) -> Result<i64, String> {
    let name = pod.name();
    let spec = pod.spec.as_ref();
    let of_pod = spec.and_then(|spec| spec.resources.as_ref()?.requests.as_ref());
    if let (None, Some(requests)) = (container, of_pod.filter(|requests| !requests.is_empty()))
        && let Some(request) = requests.get(resource)
    {
        return Ok(milli(request));
    }
    let init = spec.iter().flat_map(|spec| spec.init_containers.iter().flatten());
    let sidecars = init.filter(|container| container.restart_policy.as_deref() == Some("Always"));
    let containers = spec.iter().flat_map(|spec| spec.containers.iter()).chain(sidecars);
    let selected = |other: &&Container| container.is_none_or(|selected| selected == other.name);
    let (mut total, mut found) = (0_i64, false);
    for container in containers.filter(selected) {
        let requests = container.resources.as_ref().and_then(|resources| resources.requests.as_ref());
        let Some(request) = requests.and_then(|requests| requests.get(resource)) else {
            return Err(format!(
                "missing request for {resource} in container {} of Pod {name}",
                container.name
            ));
        };
        (total, found) = (total.saturating_add(milli(request)), true);
    }
    match container {
        Some(container) if !found => Err(format!("container {container} not found in Pod {name}")),
        _ => Ok(total),
    }
}
