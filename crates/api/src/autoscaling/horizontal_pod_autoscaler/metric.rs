//! The metrics an autoscaler follows: one source each, and a target that suits the source.

use serde_json::Value;

use super::{ApiVersion, reference};
use crate::core::resources;
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::names;
use crate::quantity::Quantity;

/// `spec.metrics[*].type` and the field that goes with it, in the order upstream looks at the fields.
const SOURCES: [(&str, &str); 5] = [
    ("Object", "object"),
    ("External", "external"),
    ("Pods", "pods"),
    ("Resource", "resource"),
    ("ContainerResource", "containerResource"),
];
const TYPES: [&str; 5] = ["ContainerResource", "External", "Object", "Pods", "Resource"];

pub(super) fn metrics(spec: &Value, described: ApiVersion, path: &Path, errors: &mut Errors) {
    let metrics = spec.items("metrics");
    for (i, item) in metrics.iter().enumerate() {
        metric(item, described, &path.index(i), errors);
    }
    let counts_without_pods = |metric: &Value| matches!(metric.text("type"), "Object" | "External");
    if spec.int("minReplicas") == Some(0) && !metrics.iter().any(counts_without_pods) {
        errors.forbidden(
            path,
            "must specify at least one Object or External metric to support scaling to zero replicas",
        );
    }
}

fn metric(metric: &Value, described: ApiVersion, path: &Path, errors: &mut Errors) {
    let kind = metric.text("type");
    if kind.is_empty() {
        errors.required(&path.at("type"), "must specify a metric source type");
    }
    if !TYPES.contains(&kind) {
        errors.not_supported(&path.at("type"), kind, &TYPES);
    }
    let present: Vec<&str> = SOURCES.iter().map(|(_, field)| *field).filter(|f| metric.has(f)).collect();
    if let Some(first) = present.first() {
        source(first, metric.at(first), described, &path.at(first), errors);
    }
    let expected = SOURCES.iter().find(|(name, _)| *name == kind).map(|(_, field)| *field);
    match expected {
        Some(field) if !metric.has(field) => {
            errors.required(&path.at(field), "must populate information for the given metric source");
        }
        Some(_) => {}
        None => errors.not_supported(&path.at("type"), kind, &TYPES),
    }
    if present.len() > 1 {
        for field in present.into_iter().filter(|field| Some(*field) != expected) {
            errors.forbidden(&path.at(field), "must populate the given metric source only");
        }
    }
}

fn source(name: &str, source: &Value, described: ApiVersion, path: &Path, errors: &mut Errors) {
    match name {
        "object" => {
            reference(source.at("describedObject"), described, &path.at("describedObject"), errors);
        }
        "resource" | "containerResource" => resource(name, source, path, errors),
        _ => {}
    }
    if matches!(name, "object" | "external" | "pods") {
        identifier(source.at("metric").text("name"), &path.at("metric.name"), errors);
    }
    let path = path.at("target");
    let goal = source.at("target");
    target(goal, &path, errors);
    let (value, average) = (goal.has("value"), goal.has("averageValue"));
    let utilization = goal.has("averageUtilization");
    match name {
        "object" if !value && !average => {
            errors.required(&path.at("averageValue"), "must set either a target value or averageValue");
        }
        "external" if !value && !average => errors.required(
            &path.at("averageValue"),
            "must set either a target value for metric or a per-pod target",
        ),
        "external" if value && average => errors
            .forbidden(&path.at("value"), "may not set both a target value for metric and a per-pod target"),
        "pods" if !average => {
            errors.required(&path.at("averageValue"), "must specify a positive target averageValue");
        }
        "resource" | "containerResource" if !utilization && !average => errors.required(
            &path.at("averageUtilization"),
            "must set either a target raw value or a target utilization",
        ),
        "resource" | "containerResource" if utilization && average => errors.forbidden(
            &path.at("averageValue"),
            "may not set both a target raw value and a target utilization",
        ),
        _ => {}
    }
}

fn resource(kind: &str, source: &Value, path: &Path, errors: &mut Errors) {
    let of_container = kind == "containerResource";
    let name = source.text("name");
    if name.is_empty() {
        errors.required(&path.at("name"), "must specify a resource name");
    } else if of_container {
        resources::container_name(name, &path.at("name"), errors);
    }
    if of_container {
        let container = source.text("container");
        if container.is_empty() {
            errors.required(&path.at("container"), "must specify a container");
        } else {
            for message in names::dns1123_label(container) {
                errors.invalid(&path.at("container"), container, &message);
            }
        }
    }
}

fn identifier(name: &str, path: &Path, errors: &mut Errors) {
    if name.is_empty() {
        errors.required(path, "must specify a metric name");
    }
    for message in names::path_segment_name(name) {
        errors.invalid(path, name, &message);
    }
}

fn target(target: &Value, path: &Path, errors: &mut Errors) {
    let kind = target.text("type");
    if kind.is_empty() {
        errors.required(&path.at("type"), "must specify a metric target type");
    }
    if !matches!(kind, "Utilization" | "Value" | "AverageValue") {
        errors.invalid(&path.at("type"), kind, "must be either Utilization, Value, or AverageValue");
    }
    for field in ["value", "averageValue"] {
        if let Some(value) = target.at(field).as_str()
            && !Quantity::parse(value).is_ok_and(|quantity| quantity.is_positive())
        {
            errors.invalid(&path.at(field), value, "must be positive");
        }
    }
    if let Some(utilization) = target.int("averageUtilization").filter(|value| *value < 1) {
        errors.invalid(&path.at("averageUtilization"), utilization, "must be greater than 0");
    }
}
