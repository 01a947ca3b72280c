//! Computes the replica count and the status entry for one metric.

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

use super::{MetricValues, ScaleTarget};
use crate::selector;

pub(super) struct ReplicaCalculator<'a> {
    pub spec: &'a HorizontalPodAutoscalerSpec,
    pub target: &'a ScaleTarget<'a>,
    pub pods: &'a [Arc<Pod>],
    pub namespace: &'a str,
    pub now: Timestamp,
}

pub(super) struct MetricReplicas {
    pub replicas: i32,
    /// The name of the metric in events and conditions.
    pub metric: String,
    pub status: MetricStatus,
}

/// The error of one metric.
pub(super) struct MetricError {
    pub reason: &'static str,
    /// The message for events and conditions.
    pub message: String,
    /// The error that the sync reports for all metrics.
    pub error: String,
}

pub(super) fn compute_replicas_for_metric(
    calculator: &ReplicaCalculator<'_>,
    metric: &MetricSpec,
    reading: Result<MetricValues, String>,
) -> Result<MetricReplicas, MetricError> {
    match metric.type_.as_str() {
        "Resource" => {
            let source = metric.resource.clone().unwrap_or_default();
            let failed = |message: String| MetricError {
                reason: "FailedGetResourceMetric",
                error: format!("failed to get {} resource metric value: {message}", source.name),
                message,
            };
            let (replicas, current, metric) =
                calculator.resource_metric(&source.name, None, &source.target, reading).map_err(failed)?;
            let resource = Some(ResourceMetricStatus { name: source.name, current });
            let status = MetricStatus { type_: "Resource".to_owned(), resource, ..MetricStatus::default() };
            Ok(MetricReplicas { replicas, metric, status })
        }
        "ContainerResource" => {
            let source = metric.container_resource.clone().unwrap_or_default();
            let failed = |message: String| MetricError {
                reason: "FailedGetContainerResourceMetric",
                error: format!("failed to get {} container metric value: {message}", source.container),
                message,
            };
            let container = Some(source.container.as_str());
            let (replicas, current, metric) = calculator
                .resource_metric(&source.name, container, &source.target, reading)
                .map_err(failed)?;
            let (name, container) = (source.name, source.container);
            let container_resource = Some(ContainerResourceMetricStatus { name, container, current });
            let type_ = "ContainerResource".to_owned();
            Ok(MetricReplicas {
                replicas,
                metric,
                status: MetricStatus { type_, container_resource, ..MetricStatus::default() },
            })
        }
        "Pods" => calculator.pods_metric(metric, reading),
        "Object" => calculator.object_metric(metric, reading),
        "External" => calculator.external_metric(metric, reading),
        other => {
            let message = format!("unknown metric source type {other:?}");
            Err(MetricError { reason: "InvalidMetricSourceType", error: message.clone(), message })
        }
    }
}

impl ReplicaCalculator<'_> {
    fn resource_metric(
        &self,
        name: &str,
        container: Option<&str>,
        target: &MetricTarget,
        reading: Result<MetricValues, String>,
    ) -> Result<(i32, MetricValueStatus, String), String> {
        let samples = match reading {
            Ok(MetricValues::Pods(samples)) => Ok(samples),
            Ok(MetricValues::Total(_)) => Err("expected one metric value per pod, got a total".to_owned()),
            Err(error) => Err(format!("unable to get metrics for resource {name}: {error}")),
        };
        let format = if name == "memory" { Format::BinarySI } else { Format::DecimalSI };
        if let Some(target_value) = &target.average_value {
            let message = |error: String| format!("failed to get {name} usage: {error}");
            let (replicas, usage) = self
                .raw_resource_replicas(samples.map_err(message)?, milli(target_value), name)
                .map_err(message)?;
            let current = MetricValueStatus {
                average_value: Some(format_quantity(usage, format)),
                ..MetricValueStatus::default()
            };
            return Ok((replicas, current, format!("{name} resource")));
        }
        let Some(target_value) = target.average_utilization else {
            let message = "invalid resource metric source: neither an average utilization target nor an average \
                        value (usage) target was set";
            return Err(message.to_owned());
        };
        let message = |error: String| format!("failed to get {name} utilization: {error}");
        let (replicas, percent, usage) = self
            .resource_utilization_replicas(samples.map_err(message)?, target_value, name, container)
            .map_err(message)?;
        let current = MetricValueStatus {
            average_utilization: Some(percent),
            average_value: Some(format_quantity(usage, format)),
            value: None,
        };
        let of = if container.is_some() { "container resource" } else { "resource" };
        Ok((replicas, current, format!("{name} {of} utilization (percentage of request)")))
    }

    fn pods_metric(
        &self,
        metric: &MetricSpec,
        reading: Result<MetricValues, String>,
    ) -> Result<MetricReplicas, MetricError> {
        let source = metric.pods.clone().unwrap_or_default();
        let failed = |message: String| MetricError {
            reason: "FailedGetPodsMetric",
            error: format!("failed to get pods metric value: {message}"),
            message,
        };
        let name = source.metric.name.clone();
        let samples = match reading {
            Ok(MetricValues::Pods(samples)) => samples,
            Ok(MetricValues::Total(_)) => {
                return Err(failed("expected one metric value per pod, got a total".to_owned()));
            }
            Err(error) => return Err(failed(format!("unable to get metric {name}: {error}"))),
        };
        let target_value = source.target.average_value.as_ref().map_or(0, milli);
        let (replicas, usage) = self.raw_resource_replicas(samples, target_value, "").map_err(failed)?;
        let average_value = Some(format_quantity(usage, Format::DecimalSI));
        let current = MetricValueStatus { average_value, ..MetricValueStatus::default() };
        let pods = Some(PodsMetricStatus { metric: source.metric, current });
        let status = MetricStatus { type_: "Pods".to_owned(), pods, ..MetricStatus::default() };
        Ok(MetricReplicas { replicas, metric: format!("pods metric {name}"), status })
    }

    fn object_metric(
        &self,
        metric: &MetricSpec,
        reading: Result<MetricValues, String>,
    ) -> Result<MetricReplicas, MetricError> {
        let source = metric.object.clone().unwrap_or_default();
        let name = source.metric.name.clone();
        let failed = |message: String, error: String| MetricError {
            reason: "FailedGetObjectMetric",
            error: format!("failed to get object metric value: {error}"),
            message,
        };
        let (value, average) = (source.target.value.as_ref(), source.target.average_value.as_ref());
        let value = value.filter(|_| source.target.type_ == "Value");
        let average = average.filter(|_| source.target.type_ == "AverageValue");
        let object = &source.described_object;
        // The word order is upstream's.
        let describe_error = |error: String| {
            let (kind, namespace) = (&object.kind, self.namespace);
            format!("unable to get metric {name}: {kind} on {namespace} {}/{error}", object.name)
        };
        let total = total_value(reading).map_err(describe_error);
        let (replicas, current, metric_name) = if let Some(target_value) = value {
            let failed = |message: String| failed(message.clone(), message);
            let (replicas, usage) =
                total.and_then(|total| self.total_replicas(total, milli(target_value))).map_err(failed)?;
            (replicas, total_status(usage), format!("{} metric {name}", object.kind))
        } else if let Some(target_value) = average {
            let failed = |message: String| {
                failed(message.clone(), format!("failed to get {name} object metric: {message}"))
            };
            let (replicas, usage) = self.total_per_pod_replicas(total.map_err(failed)?, milli(target_value));
            let selector = selector::format_selector(source.metric.selector.as_ref());
            (replicas, average_status(usage), format!("external metric {name}({selector})"))
        } else {
            let message =
                "invalid object metric source: neither a value target nor an average value target was set";
            return Err(failed(message.to_owned(), message.to_owned()));
        };
        let (metric, described_object) = (source.metric, source.described_object);
        let object = Some(ObjectMetricStatus { metric, described_object, current });
        let status = MetricStatus { type_: "Object".to_owned(), object, ..MetricStatus::default() };
        Ok(MetricReplicas { replicas, metric: metric_name, status })
    }

    fn external_metric(
        &self,
        metric: &MetricSpec,
        reading: Result<MetricValues, String>,
    ) -> Result<MetricReplicas, MetricError> {
        let source = metric.external.clone().unwrap_or_default();
        let name = source.metric.name.clone();
        let selector = selector::format_selector(source.metric.selector.as_ref());
        let failed = |message: String, error: String| MetricError {
            reason: "FailedGetExternalMetric",
            error: format!("failed to get {name} external metric value: {error}"),
            message,
        };
        let describe_error = |error: String| {
            format!("unable to get external metric {}/{name}/{selector}: {error}", self.namespace)
        };
        let total = total_value(reading).map_err(describe_error);
        let (replicas, current) = if let Some(target_value) = &source.target.average_value {
            let failed = |message: String| {
                failed(message.clone(), format!("failed to get {name} external metric: {message}"))
            };
            let (replicas, usage) = self.total_per_pod_replicas(total.map_err(failed)?, milli(target_value));
            (replicas, average_status(usage))
        } else if let Some(target_value) = &source.target.value {
            let failed = |message: String| {
                failed(message.clone(), format!("failed to get external metric {name}: {message}"))
            };
            let (replicas, usage) =
                total.and_then(|total| self.total_replicas(total, milli(target_value))).map_err(failed)?;
            (replicas, total_status(usage))
        } else {
            let message =
                "invalid external metric source: neither a value target nor an average value target was set";
            return Err(failed(message.to_owned(), message.to_owned()));
        };
        let external = Some(ExternalMetricStatus { metric: source.metric, current });
        let status = MetricStatus { type_: "External".to_owned(), external, ..MetricStatus::default() };
        Ok(MetricReplicas { replicas, metric: format!("external metric {name}({selector})"), status })
    }
}

fn total_value(reading: Result<MetricValues, String>) -> Result<i64, String> {
    match reading? {
        MetricValues::Total(total) => Ok(total),
        MetricValues::Pods(_) => Err("expected a total, got one metric value per pod".to_owned()),
    }
}

fn total_status(usage: i64) -> MetricValueStatus {
    MetricValueStatus {
        value: Some(format_quantity(usage, Format::DecimalSI)),
        ..MetricValueStatus::default()
    }
}

fn average_status(usage: i64) -> MetricValueStatus {
    MetricValueStatus {
        average_value: Some(format_quantity(usage, Format::DecimalSI)),
        ..MetricValueStatus::default()
    }
}

pub(super) fn milli(quantity: &Quantity) -> i64 {
    Amount::parse(&quantity.0).map_or(0, |amount| amount.milli())
}

fn format_quantity(milli: i64, format: Format) -> Quantity {
    Quantity(Amount::from_milli(milli, format).to_string())
}
