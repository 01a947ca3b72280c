//! The size that one metric asks for, and how that is told.

use std::sync::Arc;

use api::quantity::{Format, Quantity as Amount};
use jiff::Timestamp;
use k8s_openapi::api::autoscaling::v2::{
    ContainerResourceMetricStatus, ExternalMetricStatus, HorizontalPodAutoscalerSpec, MetricSpec,
    MetricStatus, MetricTarget, MetricValueStatus, ObjectMetricStatus, PodsMetricStatus,
    ResourceMetricStatus,
};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::{Reading, Target};
use crate::selector;

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

pub(super) fn milli(quantity: &Quantity) -> i64 {
    Amount::parse(&quantity.0).map_or(0, |amount| amount.milli())
}

fn amount(milli: i64, format: Format) -> Quantity {
    Quantity(Amount::from_milli(milli, format).to_string())
}
