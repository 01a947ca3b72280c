//! HorizontalPodAutoscaler: `autoscaling/v1` has one CPU target, v2 any number of metrics. What v1
//! lacks is kept in annotations.

use serde_json::{Map, Value, json};

use super::{set_non_null, take_field};
use crate::json::JsonExt;

const METRICS: &str = "autoscaling.alpha.kubernetes.io/metrics";
const BEHAVIOR: &str = "autoscaling.alpha.kubernetes.io/behavior";
const CURRENT_METRICS: &str = "autoscaling.alpha.kubernetes.io/current-metrics";
const CONDITIONS: &str = "autoscaling.alpha.kubernetes.io/conditions";
const ANNOTATIONS: &[&str] = &[
    METRICS,
    BEHAVIOR,
    "autoscaling.alpha.kubernetes.io/scale-down-tolerance",
    "autoscaling.alpha.kubernetes.io/scale-up-tolerance",
    CURRENT_METRICS,
    CONDITIONS,
];

/// The field of a metric source, and its fields in v1 (as in the annotation) and v2.
type MetricSource = (&'static str, &'static [(&'static str, &'static str)]);

const SPECS: &[MetricSource] = &[
    (
        "resource",
        &[
            ("name", "name"),
            ("targetAverageUtilization", "target.averageUtilization"),
            ("targetAverageValue", "target.averageValue"),
        ],
    ),
    (
        "containerResource",
        &[
            ("name", "name"),
            ("container", "container"),
            ("targetAverageUtilization", "target.averageUtilization"),
            ("targetAverageValue", "target.averageValue"),
        ],
    ),
    (
        "pods",
        &[
            ("metricName", "metric.name"),
            ("selector", "metric.selector"),
            ("targetAverageValue", "target.averageValue"),
        ],
    ),
    (
        "object",
        &[
            ("metricName", "metric.name"),
            ("selector", "metric.selector"),
            ("target", "describedObject"),
            ("targetValue", "target.value"),
            ("averageValue", "target.averageValue"),
        ],
    ),
    (
        "external",
        &[
            ("metricName", "metric.name"),
            ("metricSelector", "metric.selector"),
            ("targetValue", "target.value"),
            ("targetAverageValue", "target.averageValue"),
        ],
    ),
];

const STATUSES: &[MetricSource] = &[
    (
        "resource",
        &[
            ("name", "name"),
            ("currentAverageUtilization", "current.averageUtilization"),
            ("currentAverageValue", "current.averageValue"),
        ],
    ),
    (
        "containerResource",
        &[
            ("name", "name"),
            ("container", "container"),
            ("currentAverageUtilization", "current.averageUtilization"),
            ("currentAverageValue", "current.averageValue"),
        ],
    ),
    (
        "pods",
        &[
            ("metricName", "metric.name"),
            ("selector", "metric.selector"),
            ("currentAverageValue", "current.averageValue"),
        ],
    ),
    (
        "object",
        &[
            ("metricName", "metric.name"),
            ("selector", "metric.selector"),
            ("target", "describedObject"),
            ("currentValue", "current.value"),
            ("averageValue", "current.averageValue"),
        ],
    ),
    (
        "external",
        &[
            ("metricName", "metric.name"),
            ("metricSelector", "metric.selector"),
            ("currentValue", "current.value"),
            ("currentAverageValue", "current.averageValue"),
        ],
    ),
];

/// The quantities that v1 always encodes.
const REQUIRED_FIELDS: &[(&str, &str)] = &[
    ("pods", "targetAverageValue"),
    ("object", "targetValue"),
    ("resource", "currentAverageValue"),
    ("containerResource", "currentAverageValue"),
    ("pods", "currentAverageValue"),
    ("object", "currentValue"),
    ("external", "currentValue"),
];

pub(super) fn v2_to_v1(hpa: &mut Value) {
    drop_annotations(hpa);
    if let Some(spec) = hpa.get_mut("spec").filter(|spec| spec.is_object()) {
        let metrics = take_field(spec, "metrics");
        let behavior = take_field(spec, "behavior");
        let metrics: Vec<Value> = metrics.as_array().cloned().unwrap_or_default();
        if let Some(cpu) = metrics.iter().find(|metric| is_cpu_utilization(metric)) {
            spec.set(
                "targetCPUUtilizationPercentage",
                cpu.path("resource.target.averageUtilization").clone(),
            );
        }
        let others: Vec<Value> = metrics
            .iter()
            .filter(|metric| !is_cpu_utilization(metric))
            .map(|metric| metric_to_v1(metric, SPECS))
            .collect();
        if !others.is_empty() {
            annotate(hpa, METRICS, &others.into());
        }
        if behavior.is_object() {
            annotate(hpa, BEHAVIOR, &change_case(behavior, upper));
        }
    }
    if let Some(status) = hpa.get_mut("status").filter(|status| status.is_object()) {
        let metrics = take_field(status, "currentMetrics");
        let conditions = take_field(status, "conditions");
        let metrics: Vec<Value> = metrics.as_array().cloned().unwrap_or_default();
        for metric in &metrics {
            let utilization = metric.path("resource.current.averageUtilization");
            if is_cpu(metric) && !utilization.is_null() {
                status.set("currentCPUUtilizationPercentage", utilization.clone());
            }
        }
        if !metrics.is_empty() {
            let metrics: Vec<Value> = metrics.iter().map(|metric| metric_to_v1(metric, STATUSES)).collect();
            annotate(hpa, CURRENT_METRICS, &metrics.into());
        }
        if conditions.as_array().is_some_and(|conditions| !conditions.is_empty()) {
            annotate(hpa, CONDITIONS, &conditions);
        }
    }
}

pub(super) fn v1_to_v2(hpa: &mut Value) {
    let metrics = parse_annotation_list(hpa, METRICS, "MetricSpec", metric_spec_to_v2);
    let current =
        parse_annotation_list(hpa, CURRENT_METRICS, "MetricStatus", |metric| metric_to_v2(metric, STATUSES));
    let conditions = parse_annotation_list(hpa, CONDITIONS, "HorizontalPodAutoscalerCondition", Value::clone);
    let behavior = parse_annotation(hpa, BEHAVIOR)
        .filter(|behavior| behavior.as_object().is_some_and(|map| !map.is_empty()))
        .and_then(|behavior| decode_checked("HorizontalPodAutoscalerBehavior", change_case(behavior, lower)));
    drop_annotations(hpa);

    hpa.object_mut("spec");
    let spec = &mut hpa["spec"];
    let mut all = metrics.unwrap_or_default();
    let cpu = take_field(spec, "targetCPUUtilizationPercentage");
    if !cpu.is_null() || all.is_empty() {
        let percent = if cpu.is_null() { json!(80) } else { cpu };
        all.push(json!({
            "type": "Resource",
            "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": percent}},
        }));
    }
    spec.set("metrics", all);
    if let Some(behavior) = behavior {
        spec.set("behavior", behavior);
    }

    let cpu = hpa.get_mut("status").map(|status| take_field(status, "currentCPUUtilizationPercentage"));
    let current = match (current, cpu.filter(|cpu| !cpu.is_null())) {
        (Some(current), _) => current,
        (None, Some(percent)) => {
            vec![
                json!({"type": "Resource", "resource": {"name": "cpu", "current": {"averageUtilization": percent}}}),
            ]
        }
        (None, None) => Vec::new(),
    };
    for (field, list) in [("currentMetrics", current), ("conditions", conditions.unwrap_or_default())] {
        if !list.is_empty() {
            hpa.object_mut("status").insert(field.to_owned(), list.into());
        }
    }
}

fn is_cpu(metric: &Value) -> bool {
    metric.text("type") == "Resource" && metric.at("resource").text("name") == "cpu"
}

fn is_cpu_utilization(metric: &Value) -> bool {
    is_cpu(metric) && !metric.path("resource.target.averageUtilization").is_null()
}

/// Converts a v2 metric to v1.
fn metric_to_v1(metric: &Value, sources: &[MetricSource]) -> Value {
    let mut out = json!({"type": metric.text("type")});
    for (source, fields) in sources.iter().filter(|(source, _)| metric.has(source)) {
        let mut converted = json!({});
        for (v1, v2) in *fields {
            set_non_null(&mut converted, v1, metric.at(source).path(v2).clone());
        }
        for (v1, _) in *fields {
            if REQUIRED_FIELDS.contains(&(source, v1)) {
                converted.set_default(v1, "0");
            }
        }
        out.set(source, converted);
    }
    out
}

/// Converts a v1 metric to v2.
fn metric_to_v2(metric: &Value, sources: &[MetricSource]) -> Value {
    let mut out = json!({"type": metric.text("type")});
    for (source, fields) in sources.iter().filter(|(source, _)| metric.has(source)) {
        let mut converted = json!({});
        for (v1, v2) in *fields {
            let value = metric.at(source).at(v1).clone();
            match v2.split_once('.') {
                Some((outer, inner)) if !value.is_null() => {
                    converted.object_mut(outer).insert(inner.to_owned(), value);
                }
                Some(_) => {}
                None => set_non_null(&mut converted, v2, value),
            }
        }
        out.set(source, converted);
    }
    out
}

/// Converts a v1 metric spec. In v2 the target has a type.
fn metric_spec_to_v2(metric: &Value) -> Value {
    let mut out = metric_to_v2(metric, SPECS);
    for (source, _) in SPECS {
        let Some(converted) = out.get_mut(source).filter(|converted| converted.is_object()) else { continue };
        let target = converted.object_mut("target");
        let kind = match *source {
            "resource" | "containerResource" if target.contains_key("averageUtilization") => "Utilization",
            "object" if target.contains_key("averageValue") => {
                if target.get("value").and_then(Value::as_str) == Some("0") {
                    target.remove("value");
                }
                "AverageValue"
            }
            "object" => "Value",
            "external" if target.contains_key("value") => "Value",
            _ => "AverageValue",
        };
        target.insert("type".to_owned(), kind.into());
    }
    out
}

fn parse_annotation(hpa: &Value, name: &str) -> Option<Value> {
    let text = hpa.path("metadata.annotations").at(name).as_str()?;
    serde_json::from_str(text).ok()
}

/// Decodes a list in an annotation and converts its items to v2. As upstream, one malformed item
/// discards the whole list.
fn parse_annotation_list(
    hpa: &Value,
    name: &str,
    ty: &str,
    convert: impl Fn(&Value) -> Value,
) -> Option<Vec<Value>> {
    parse_annotation(hpa, name)?.as_array()?.iter().map(|item| decode_checked(ty, convert(item))).collect()
}

/// Validates and normalizes a value from an annotation, because clients may write anything there.
fn decode_checked(ty: &str, mut value: Value) -> Option<Value> {
    let table = schema::kubernetes();
    let ty = table.type_by_name(&format!("io.k8s.api.autoscaling.v2.{ty}"))?;
    schema::normalize(table, ty, &mut value).ok()?;
    Some(value)
}

fn annotate(hpa: &mut Value, name: &str, value: &Value) {
    hpa.object_mut("metadata");
    hpa["metadata"].object_mut("annotations").insert(name.to_owned(), value.to_string().into());
}

fn drop_annotations(hpa: &mut Value) {
    let Some(meta) = hpa.get_mut("metadata").and_then(Value::as_object_mut) else { return };
    let Some(annotations) = meta.get_mut("annotations").and_then(Value::as_object_mut) else { return };
    annotations.retain(|name, _| !ANNOTATIONS.contains(&name.as_str()));
    if annotations.is_empty() {
        meta.remove("annotations");
    }
}

/// Changes the case of the first letter of every key, because the behavior annotation has Go field names.
fn change_case(value: Value, letter: fn(char) -> char) -> Value {
    match value {
        Value::Object(map) => {
            let key = |key: String| {
                let mut chars = key.chars();
                chars.next().map(|first| format!("{}{}", letter(first), chars.as_str())).unwrap_or_default()
            };
            let map = map.into_iter().filter(|(_, value)| !value.is_null());
            Value::Object(
                map.map(|(name, value)| (key(name), change_case(value, letter))).collect::<Map<_, _>>(),
            )
        }
        Value::Array(list) => list.into_iter().map(|item| change_case(item, letter)).collect(),
        other => other,
    }
}

fn upper(c: char) -> char {
    c.to_ascii_uppercase()
}

fn lower(c: char) -> char {
    c.to_ascii_lowercase()
}
