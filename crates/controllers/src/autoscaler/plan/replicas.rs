//! The size that one metric asks for.

use std::collections::BTreeMap;
use std::sync::Arc;

use api::quantity::{Format, Quantity as Amount};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::autoscaling::v2::{
    ContainerResourceMetricStatus, ExternalMetricStatus, HorizontalPodAutoscalerSpec, MetricSpec,
    MetricStatus, MetricTarget, MetricValueStatus, ObjectMetricStatus, PodsMetricStatus,
    ResourceMetricStatus,
};
use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use reconcile::Object as _;

use super::{Reading, Sample, Target};
use crate::{pod, selector};

/// How long after its start a pod's CPU use may be that of starting (upstream's default of
/// `--horizontal-pod-autoscaler-cpu-initialization-period`).
const CPU_INITIALIZATION: SignedDuration = SignedDuration::from_mins(5);
/// How long after its start a pod that is not ready was never ready (`…-initial-readiness-delay`).
const INITIAL_READINESS: SignedDuration = SignedDuration::from_secs(30);
/// How far the use may be off the target before anything is done (`…-tolerance`).
const TOLERANCE: f64 = 0.1;

pub(super) struct World<'a> {
    pub spec: &'a HorizontalPodAutoscalerSpec,
    pub target: &'a Target<'a>,
    pub pods: &'a [Arc<Pod>],
    pub namespace: &'a str,
    pub now: Timestamp,
}

pub(super) struct Proposal {
    pub replicas: i32,
    /// What to call the metric.
    pub metric: String,
    pub status: MetricStatus,
}

/// Why a metric cannot tell.
pub(super) struct Failure {
    pub reason: &'static str,
    /// To people.
    pub told: String,
    /// To whoever asked for all metrics together.
    pub error: String,
}

pub(super) fn propose(
    world: &World<'_>,
    metric: &MetricSpec,
    reading: Result<Reading, String>,
) -> Result<Proposal, Failure> {
    match metric.type_.as_str() {
        "Resource" => {
            let source = metric.resource.clone().unwrap_or_default();
            let failed = |told: String| Failure {
                reason: "FailedGetResourceMetric",
                error: format!("failed to get {} resource metric value: {told}", source.name),
                told,
            };
            let (replicas, current, metric) =
                world.of_resource(&source.name, None, &source.target, reading).map_err(failed)?;
            let resource = Some(ResourceMetricStatus { name: source.name, current });
            let status = MetricStatus { type_: "Resource".to_owned(), resource, ..MetricStatus::default() };
            Ok(Proposal { replicas, metric, status })
        }
        "ContainerResource" => {
            let source = metric.container_resource.clone().unwrap_or_default();
            let failed = |told: String| Failure {
                reason: "FailedGetContainerResourceMetric",
                error: format!("failed to get {} container metric value: {told}", source.container),
                told,
            };
            let container = Some(source.container.as_str());
            let (replicas, current, metric) =
                world.of_resource(&source.name, container, &source.target, reading).map_err(failed)?;
            let (name, container) = (source.name, source.container);
            let container_resource = Some(ContainerResourceMetricStatus { name, container, current });
            let type_ = "ContainerResource".to_owned();
            Ok(Proposal {
                replicas,
                metric,
                status: MetricStatus { type_, container_resource, ..MetricStatus::default() },
            })
        }
        "Pods" => world.of_pods(metric, reading),
        "Object" => world.of_object(metric, reading),
        "External" => world.of_external(metric, reading),
        other => {
            let told = format!("unknown metric source type {other:?}");
            Err(Failure { reason: "InvalidMetricSourceType", error: told.clone(), told })
        }
    }
}

impl World<'_> {
    fn of_resource(
        &self,
        name: &str,
        container: Option<&str>,
        target: &MetricTarget,
        reading: Result<Reading, String>,
    ) -> Result<(i32, MetricValueStatus, String), String> {
        let samples = match reading {
            Ok(Reading::Pods(samples)) => Ok(samples),
            Ok(Reading::Total(_)) => Err("the metric is not of pods".to_owned()),
            Err(error) => Err(format!("unable to get metrics for resource {name}: {error}")),
        };
        let format = if name == "memory" { Format::BinarySI } else { Format::DecimalSI };
        if let Some(wanted) = &target.average_value {
            let told = |error: String| format!("failed to get {name} usage: {error}");
            let (replicas, usage) = self.plain(samples.map_err(told)?, milli(wanted), name).map_err(told)?;
            let current = MetricValueStatus {
                average_value: Some(amount(usage, format)),
                ..MetricValueStatus::default()
            };
            return Ok((replicas, current, format!("{name} resource")));
        }
        let Some(wanted) = target.average_utilization else {
            let told = "invalid resource metric source: neither an average utilization target nor an average \
                        value (usage) target was set";
            return Err(told.to_owned());
        };
        let told = |error: String| format!("failed to get {name} utilization: {error}");
        let (replicas, percent, usage) =
            self.utilization(samples.map_err(told)?, wanted, name, container).map_err(told)?;
        let current = MetricValueStatus {
            average_utilization: Some(percent),
            average_value: Some(amount(usage, format)),
            value: None,
        };
        let of = if container.is_some() { "container resource" } else { "resource" };
        Ok((replicas, current, format!("{name} {of} utilization (percentage of request)")))
    }

    fn of_pods(&self, metric: &MetricSpec, reading: Result<Reading, String>) -> Result<Proposal, Failure> {
        let source = metric.pods.clone().unwrap_or_default();
        let failed = |told: String| Failure {
            reason: "FailedGetPodsMetric",
            error: format!("failed to get pods metric value: {told}"),
            told,
        };
        let name = source.metric.name.clone();
        let samples = match reading {
            Ok(Reading::Pods(samples)) => samples,
            Ok(Reading::Total(_)) => return Err(failed("the metric is not of pods".to_owned())),
            Err(error) => return Err(failed(format!("unable to get metric {name}: {error}"))),
        };
        let wanted = source.target.average_value.as_ref().map_or(0, milli);
        let (replicas, usage) = self.plain(samples, wanted, "").map_err(failed)?;
        let average_value = Some(amount(usage, Format::DecimalSI));
        let current = MetricValueStatus { average_value, ..MetricValueStatus::default() };
        let pods = Some(PodsMetricStatus { metric: source.metric, current });
        let status = MetricStatus { type_: "Pods".to_owned(), pods, ..MetricStatus::default() };
        Ok(Proposal { replicas, metric: format!("pods metric {name}"), status })
    }

    fn of_object(&self, metric: &MetricSpec, reading: Result<Reading, String>) -> Result<Proposal, Failure> {
        let source = metric.object.clone().unwrap_or_default();
        let name = source.metric.name.clone();
        let failed = |told: String, error: String| Failure {
            reason: "FailedGetObjectMetric",
            error: format!("failed to get object metric value: {error}"),
            told,
        };
        let (value, average) = (source.target.value.as_ref(), source.target.average_value.as_ref());
        let value = value.filter(|_| source.target.type_ == "Value");
        let average = average.filter(|_| source.target.type_ == "AverageValue");
        let object = &source.described_object;
        // Upstream's message has these in this order.
        let unread = |error: String| {
            let (kind, namespace) = (&object.kind, self.namespace);
            format!("unable to get metric {name}: {kind} on {namespace} {}/{error}", object.name)
        };
        let total = total(reading).map_err(unread);
        let (replicas, current, called) = if let Some(wanted) = value {
            let failed = |told: String| failed(told.clone(), told);
            let (replicas, usage) =
                total.and_then(|total| self.of_total(total, milli(wanted))).map_err(failed)?;
            (replicas, whole(usage), format!("{} metric {name}", object.kind))
        } else if let Some(wanted) = average {
            let failed =
                |told: String| failed(told.clone(), format!("failed to get {name} object metric: {told}"));
            let (replicas, usage) = self.of_total_per_pod(total.map_err(failed)?, milli(wanted));
            let selector = selector::shown(source.metric.selector.as_ref());
            (replicas, each(usage), format!("external metric {name}({selector})"))
        } else {
            let told =
                "invalid object metric source: neither a value target nor an average value target was set";
            return Err(failed(told.to_owned(), told.to_owned()));
        };
        let (metric, described_object) = (source.metric, source.described_object);
        let object = Some(ObjectMetricStatus { metric, described_object, current });
        let status = MetricStatus { type_: "Object".to_owned(), object, ..MetricStatus::default() };
        Ok(Proposal { replicas, metric: called, status })
    }

    fn of_external(
        &self,
        metric: &MetricSpec,
        reading: Result<Reading, String>,
    ) -> Result<Proposal, Failure> {
        let source = metric.external.clone().unwrap_or_default();
        let name = source.metric.name.clone();
        let selector = selector::shown(source.metric.selector.as_ref());
        let failed = |told: String, error: String| Failure {
            reason: "FailedGetExternalMetric",
            error: format!("failed to get {name} external metric value: {error}"),
            told,
        };
        let unread = |error: String| {
            format!("unable to get external metric {}/{name}/{selector}: {error}", self.namespace)
        };
        let total = total(reading).map_err(unread);
        let (replicas, current) = if let Some(wanted) = &source.target.average_value {
            let failed =
                |told: String| failed(told.clone(), format!("failed to get {name} external metric: {told}"));
            let (replicas, usage) = self.of_total_per_pod(total.map_err(failed)?, milli(wanted));
            (replicas, each(usage))
        } else if let Some(wanted) = &source.target.value {
            let failed =
                |told: String| failed(told.clone(), format!("failed to get external metric {name}: {told}"));
            let (replicas, usage) =
                total.and_then(|total| self.of_total(total, milli(wanted))).map_err(failed)?;
            (replicas, whole(usage))
        } else {
            let told =
                "invalid external metric source: neither a value target nor an average value target was set";
            return Err(failed(told.to_owned(), told.to_owned()));
        };
        let external = Some(ExternalMetricStatus { metric: source.metric, current });
        let status = MetricStatus { type_: "External".to_owned(), external, ..MetricStatus::default() };
        Ok(Proposal { replicas, metric: format!("external metric {name}({selector})"), status })
    }

    /// For a total that shrinks as there are more pods.
    fn of_total(&self, total: i64, wanted: i64) -> Result<(i32, i64), String> {
        let (ratio, current) = (total as f64 / wanted as f64, self.target.replicas);
        if current != 0 && self.tolerates(ratio) {
            return Ok((current, total));
        }
        if current == 0 {
            return Ok((ratio.ceil() as i32, total));
        }
        if self.pods.is_empty() {
            let why = "no pods returned by selector while calculating replica count";
            return Err(format!("unable to calculate ready pods: {why}"));
        }
        let is_ready = |pod: &&Arc<Pod>| pod::phase(pod) == "Running" && pod::is_ready(pod);
        let ready = self.pods.iter().filter(is_ready).count();
        Ok(((ratio * ready as f64).ceil() as i32, total))
    }

    /// For a total of which each pod takes a share.
    fn of_total_per_pod(&self, total: i64, wanted: i64) -> (i32, i64) {
        let running = self.target.running;
        let ratio = total as f64 / (wanted as f64 * f64::from(running));
        let replicas = match self.tolerates(ratio) {
            true => running,
            false => (total as f64 / wanted as f64).ceil() as i32,
        };
        (replicas, (total as f64 / f64::from(running)).ceil() as i64)
    }

    /// For amounts per pod: the size, and what a pod uses on average.
    fn plain(
        &self,
        samples: BTreeMap<String, Sample>,
        wanted: i64,
        resource: &str,
    ) -> Result<(i32, i64), String> {
        let groups = self.group(samples, resource)?;
        let usage_of = |values: &BTreeMap<String, i64>| {
            let total: i128 = values.values().map(|value| i128::from(*value)).sum();
            let usage = total / values.len().max(1) as i128;
            (usage as f64 / wanted as f64, i64::try_from(usage).unwrap_or(i64::MAX))
        };
        let (ratio, usage) = usage_of(&groups.values);
        let replicas = self.weigh(&groups, ratio, |_| wanted, |values| Ok(usage_of(values).0))?;
        Ok((replicas, usage))
    }

    /// For shares of what pods request: the size, the share in percent, and what a pod uses on average.
    fn utilization(
        &self,
        samples: BTreeMap<String, Sample>,
        wanted: i32,
        resource: &str,
        container: Option<&str>,
    ) -> Result<(i32, i32, i64), String> {
        let groups = self.group(samples, resource)?;
        let requests: BTreeMap<&str, i64> = self
            .pods
            .iter()
            .map(|pod| request(pod, resource, container).map(|request| (pod.name(), request)))
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
            Ok((f64::from(percent) / f64::from(wanted), percent, average))
        };
        let (ratio, percent, average) = share_of(&groups.values)?;
        // Pods that tell nothing are taken to use all they request before any pod is taken away.
        let all = i128::from(wanted.max(100));
        let fallback = |name: &str| {
            let request = requests.get(name).copied().unwrap_or(0);
            i64::try_from(i128::from(request) * all / 100).unwrap_or(i64::MAX)
        };
        let again = |values: &BTreeMap<String, i64>| share_of(values).map(|(ratio, ..)| ratio);
        let replicas = self.weigh(&groups, ratio, fallback, again)?;
        Ok((replicas, percent, average))
    }

    /// The size by the ratio of use to target. Pods that tell nothing, or not yet, count so that they damp the
    /// change and never turn it round.
    fn weigh(
        &self,
        groups: &Groups,
        ratio: f64,
        fallback: impl Fn(&str) -> i64,
        again: impl Fn(&BTreeMap<String, i64>) -> Result<f64, String>,
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
        let damped = again(&values)?;
        let turned = (ratio < 1.0 && damped > 1.0) || (ratio > 1.0 && damped < 1.0);
        if self.tolerates(damped) || turned {
            return Ok(current);
        }
        let replicas = (damped * values.len() as f64).ceil() as i32;
        let turned = (damped < 1.0 && replicas > current) || (damped > 1.0 && replicas < current);
        Ok(if turned { current } else { replicas })
    }

    fn tolerates(&self, ratio: f64) -> bool {
        let behavior = self.spec.behavior.as_ref();
        let tolerance = |quantity: Option<&Quantity>| {
            let amount = quantity.and_then(|quantity| Amount::parse(&quantity.0).ok());
            amount.map_or(TOLERANCE, |amount| amount.to_f64())
        };
        let down = behavior.and_then(|behavior| behavior.scale_down.as_ref()?.tolerance.as_ref());
        let up = behavior.and_then(|behavior| behavior.scale_up.as_ref()?.tolerance.as_ref());
        (1.0 - tolerance(down)..=1.0 + tolerance(up)).contains(&ratio)
    }

    fn group(&self, samples: BTreeMap<String, Sample>, resource: &str) -> Result<Groups, String> {
        if self.pods.is_empty() {
            return Err("no pods returned by selector while calculating replica count".to_owned());
        }
        let values = samples.iter().map(|(name, sample)| (name.clone(), sample.value)).collect();
        let mut groups = Groups { values, ..Groups::default() };
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

    /// What a pod uses while it starts says nothing about its load.
    fn is_starting(&self, pod: &Pod, sample: &Sample) -> bool {
        let started = pod.status.as_ref().and_then(|status| status.start_time.as_ref());
        let (Some(started), Some(ready)) = (started, pod::condition(pod, "Ready")) else { return true };
        let changed = ready.last_transition_time.as_ref().map_or(Timestamp::UNIX_EPOCH, |time| time.0);
        let later = |time: Timestamp, pause| time.checked_add(pause).unwrap_or(Timestamp::MAX);
        let is_unready = ready.status == "False";
        if later(started.0, CPU_INITIALIZATION) > self.now {
            is_unready || sample.at < later(changed, sample.window)
        } else {
            is_unready && later(started.0, INITIAL_READINESS) > changed
        }
    }
}

/// The target's pods by what can be said of them.
#[derive(Default)]
struct Groups {
    /// What pods use whose word counts.
    values: BTreeMap<String, i64>,
    ready: usize,
    unready: Vec<String>,
    missing: Vec<String>,
}

/// What a pod, or one container of it, requests.
fn request(pod: &Pod, resource: &str, container: Option<&str>) -> Result<i64, String> {
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
    let wanted = |other: &&Container| container.is_none_or(|wanted| wanted == other.name);
    let (mut total, mut found) = (0_i64, false);
    for container in containers.filter(wanted) {
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

fn total(reading: Result<Reading, String>) -> Result<i64, String> {
    match reading? {
        Reading::Total(total) => Ok(total),
        Reading::Pods(_) => Err("the metric is of pods".to_owned()),
    }
}

fn whole(usage: i64) -> MetricValueStatus {
    MetricValueStatus { value: Some(amount(usage, Format::DecimalSI)), ..MetricValueStatus::default() }
}

fn each(usage: i64) -> MetricValueStatus {
    MetricValueStatus {
        average_value: Some(amount(usage, Format::DecimalSI)),
        ..MetricValueStatus::default()
    }
}

fn milli(quantity: &Quantity) -> i64 {
    Amount::parse(&quantity.0).map_or(0, |amount| amount.milli())
}

fn amount(milli: i64, format: Format) -> Quantity {
    Quantity(Amount::from_milli(milli, format).to_string())
}
