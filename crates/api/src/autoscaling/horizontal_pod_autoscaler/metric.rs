//! Validates the metrics of an autoscaler: one source each, and a target type that the source supports.

use serde_json::Value;

use super::{ApiVersionCheck, validate_reference};
use crate::core::resources;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::names;
use crate::quantity::Quantity;

/// The values of `spec.metrics[*].type` with their fields, in upstream's order.
const SOURCES: [(&str, &str); 5] = [
    ("Object", "object"),
    ("External", "external"),
    ("Pods", "pods"),
    ("Resource", "resource"),
    ("ContainerResource", "containerResource"),
];
const TYPES: [&str; 5] = ["ContainerResource", "External", "Object", "Pods", "Resource"];

pub(super) fn validate_metrics(
    spec: &Value,
    described: ApiVersionCheck,
    path: &Path,
    errors: &mut ErrorList,
) {
    let metrics = spec.items("metrics");
    for (i, item) in metrics.iter().enumerate() {
        validate_metric(item, described, &path.index(i), errors);
    }
    let counts_without_pods = |metric: &Value| matches!(metric.text("type"), "Object" | "External");
    if spec.int("minReplicas") == Some(0) && !metrics.iter().any(counts_without_pods) {
        errors.forbidden(
            path,
            "must specify at least one Object or External metric to support scaling to zero replicas",
        );
    }
}

fn validate_metric(metric: &Value, described: ApiVersionCheck, path: &Path, errors: &mut ErrorList) {
    let kind = metric.text("type");
    if kind.is_empty() {
        errors.required(&path.child("type"), "must specify a metric source type");
    }
    if !TYPES.contains(&kind) {
        errors.not_supported(&path.child("type"), kind, &TYPES);
    }
    let present: Vec<&str> = SOURCES.iter().map(|(_, field)| *field).filter(|f| metric.has(f)).collect();
    if let Some(first) = present.first() {
        validate_source(first, metric.at(first), described, &path.child(first), errors);
    }
    let expected = SOURCES.iter().find(|(name, _)| *name == kind).map(|(_, field)| *field);
    match expected {
        Some(field) if !metric.has(field) => {
            errors.required(&path.child(field), "must populate information for the given metric source");
        }
        Some(_) => {}
        None => errors.not_supported(&path.child("type"), kind, &TYPES),
    }
    if present.len() > 1 {
        for field in present.into_iter().filter(|field| Some(*field) != expected) {
            errors.forbidden(&path.child(field), "must populate the given metric source only");
        }
    }
}

fn validate_source(
    name: &str,
    source: &Value,
    described: ApiVersionCheck,
    path: &Path,
    errors: &mut ErrorList,
) {
    match name {
        "object" => {
            validate_reference(
                source.at("describedObject"),
                described,
                &path.child("describedObject"),
                errors,
            );
        }
        "resource" | "containerResource" => resource(name, source, path, errors),
        _ => {}
    }
    if matches!(name, "object" | "external" | "pods") {
        identifier(source.at("metric").text("name"), &path.child("metric.name"), errors);
    }
    let path = path.child("target");
    let metric_target = source.at("target");
    validate_target(metric_target, &path, errors);
    let (value, average) = (metric_target.has("value"), metric_target.has("averageValue"));
    let utilization = metric_target.has("averageUtilization");
    match name {
        "object" if !value && !average => {
            errors.required(&path.child("averageValue"), "must set either a target value or averageValue");
        }
        "external" if !value && !average => errors.required(
            &path.child("averageValue"),
            "must set either a target value for metric or a per-pod target",
        ),
        "external" if value && average => errors.forbidden(
            &path.child("value"),
            "may not set both a target value for metric and a per-pod target",
        ),
        "pods" if !average => {
            errors.required(&path.child("averageValue"), "must specify a positive target averageValue");
        }
        "resource" | "containerResource" if !utilization && !average => errors.required(
            &path.child("averageUtilization"),
            "must set either a target raw value or a target utilization",
        ),
        "resource" | "containerResource" if utilization && average => errors.forbidden(
            &path.child("averageValue"),
            "may not set both a target raw value and a target utilization",
        ),
        _ => {}
    }
}

fn resource(kind: &str, source: &Value, path: &Path, errors: &mut ErrorList) {
    let of_container = kind == "containerResource";
    let name = source.text("name");
    if name.is_empty() {
        errors.required(&path.child("name"), "must specify a resource name");
    } else if of_container {
        resources::validate_container_resource_name(name, &path.child("name"), errors);
    }
    if of_container {
        let container = source.text("container");
        if container.is_empty() {
            errors.required(&path.child("container"), "must specify a container");
        } else {
            for message in names::dns1123_label(container) {
                errors.invalid(&path.child("container"), container, &message);
            }
        }
    }
}

fn identifier(name: &str, path: &Path, errors: &mut ErrorList) {
    if name.is_empty() {
        errors.required(path, "must specify a metric name");
    }
    for message in names::path_segment_name(name) {
        errors.invalid(path, name, &message);
    }
}

fn validate_target(target: &Value, path: &Path, errors: &mut ErrorList) {
    let kind = target.text("type");
    if kind.is_empty() {
        errors.required(&path.child("type"), "must specify a metric target type");
    }
    if !matches!(kind, "Utilization" | "Value" | "AverageValue") {
        errors.invalid(&path.child("type"), kind, "must be either Utilization, Value, or AverageValue");
    }
    for field in ["value", "averageValue"] {
        if let Some(value) = target.at(field).as_str()
            && !Quantity::parse(value).is_ok_and(|quantity| quantity.is_positive())
        {
            errors.invalid(&path.child(field), value, "must be positive");
        }
    }
    if let Some(utilization) = target.int("averageUtilization").filter(|value| *value < 1) {
        errors.invalid(&path.child("averageUtilization"), utilization, "must be greater than 0");
    }
}
