//! Validation shared by workloads: selectors, rollouts and status counts.

use serde_json::Value;

use crate::core::pod::rules::{invalid_as, non_negative, render_value};
use crate::core::pod::template::{name_warning, validate_long_running, validate_pod_template_spec};
use crate::core::pod::{drop_disabled_fields, warnings};
use crate::field::{ErrorList, ErrorType, Path};
use crate::intstr::IntOrString;
use crate::json::JsonExt;
use crate::meta::{self, SelectorOptions, semantic_equal};
use crate::names;
use crate::selector::LabelSelector;

const MISMATCH: &str = "`selector` does not match template `labels`";

/// Validates a required selector that must not be empty. `kind` is the workload's name in the message.
pub(crate) fn validate_selector(spec: &Value, path: &Path, kind: &str, e: &mut ErrorList) {
    let (selector, at) = (spec.at("selector"), path.child("selector"));
    if selector.is_null() {
        return e.required(&at, "");
    }
    meta::validate_label_selector(selector, &at, SelectorOptions::default(), e);
    if is_empty(selector) {
        invalid_as(e, &at, "{}", &format!("empty selector is invalid for {kind}"));
    }
}

pub(crate) fn is_empty(selector: &Value) -> bool {
    selector.entries("matchLabels").next().is_none() && selector.items("matchExpressions").is_empty()
}

/// Validates that the selector matches the labels of the template. `invalid` is the message for an
/// invalid selector; the template is not checked then. Returns whether the selector is valid.
pub(crate) fn validate_selector_matches_template(
    spec: &Value,
    path: &Path,
    invalid: &str,
    e: &mut ErrorList,
) -> bool {
    let selector = spec.at("selector");
    let Ok(parsed) = LabelSelector::from_value(selector) else {
        let message = if invalid.is_empty() { String::new() } else { format!(": {invalid}") };
        e.push(
            ErrorType::Invalid,
            &path.child("selector"),
            format!("Invalid value: {}{message}", render_value(selector)),
        );
        return false;
    };
    if !selector.is_null() && !is_empty(selector) {
        validate_template_labels(&parsed, spec, path, e);
    }
    true
}

pub(crate) fn validate_template_labels(
    selector: &LabelSelector,
    spec: &Value,
    path: &Path,
    e: &mut ErrorList,
) {
    let labels = spec.path("template.metadata.labels");
    if !selector.matches_labels(labels) {
        invalid_as(e, &path.child("template.metadata.labels"), &labels.to_string(), MISMATCH);
    }
}

/// Validates the template of a Deployment, ReplicaSet or ReplicationController.
pub(crate) fn validate_template(spec: &Value, path: &Path, kind: &str, e: &mut ErrorList) {
    validate_pod_template_spec(spec.at("template"), &path.child("template"), e);
    validate_long_running(spec.at("template"), &path.child("template"), kind, e);
}

/// Drops fields of disabled features from the pod template at `path`.
pub(crate) fn prepare_template(object: &mut Value, path: &[&str]) {
    let spec = path.iter().try_fold(object, |value, name| value.get_mut(name));
    if let Some(spec) = spec.and_then(|template| template.get_mut("spec")) {
        drop_disabled_fields(spec);
    }
}

/// Validates a non-negative number or a percentage.
pub(crate) fn validate_count_or_percent(rollout: &Value, path: &Path, field: &str, e: &mut ErrorList) {
    match IntOrString::from_value(rollout.at(field)) {
        Some(IntOrString::Text(text)) => e.invalid_each(&path.child(field), text, names::percent(text)),
        _ => non_negative(e, rollout, path, field),
    }
}

/// The number, the number before a percent sign, or 0.
pub(crate) fn int_value(rollout: &Value, field: &str) -> i64 {
    match IntOrString::from_value(rollout.at(field)) {
        Some(value) => parse_percent(value).unwrap_or_else(|| value.int_value()),
        None => 0,
    }
}

fn parse_percent(value: IntOrString<'_>) -> Option<i64> {
    match value {
        IntOrString::Text(text) if names::percent(text).is_empty() => value.percent(),
        _ => None,
    }
}

pub(crate) fn validate_max_100_percent(rollout: &Value, path: &Path, field: &str, e: &mut ErrorList) {
    let percent = IntOrString::from_value(rollout.at(field)).and_then(parse_percent);
    if percent.is_some_and(|percent| percent > 100) {
        e.invalid(&path.child(field), rollout.at(field).clone(), "must not be greater than 100%");
    }
}

/// A number as upstream prints it in a struct: absent means zero.
pub(crate) fn render_number(value: &Value) -> String {
    if value.is_null() { "0".to_owned() } else { value.to_string() }
}

/// Reports an unsupported struct, which upstream prints with Go field names.
pub(crate) fn unsupported(e: &mut ErrorList, path: &Path, rendered: &str, supported: &str) {
    e.push(
        ErrorType::NotSupported,
        path,
        format!("Unsupported value: {rendered}: supported values: {supported}"),
    );
}

/// Validates status counts: none is negative, and no part is larger than its whole. `parts` are rows of
/// part, whole and message.
pub(crate) fn validate_counts(
    status: &Value,
    fields: &[&str],
    parts: &[(&str, &str, &str)],
    e: &mut ErrorList,
) {
    let path = Path::new("status");
    for field in fields {
        non_negative(e, status, &path, field);
    }
    for (part, whole, message) in parts {
        let number = |field| status.int(field).unwrap_or(0);
        if number(part) > number(whole) {
            e.invalid(&path.child(part), number(part), message);
        }
    }
}

/// Validates the status of a ReplicaSet or of a ReplicationController (which has no terminating replicas).
pub(crate) fn validate_replica_status(status: &Value, e: &mut ErrorList) {
    const COUNTS: &[&str] = &[
        "replicas",
        "fullyLabeledReplicas",
        "readyReplicas",
        "availableReplicas",
        "observedGeneration",
        "terminatingReplicas",
    ];
    const PARTS: &[(&str, &str, &str)] = &[
        ("fullyLabeledReplicas", "replicas", "cannot be greater than status.replicas"),
        ("readyReplicas", "replicas", "cannot be greater than status.replicas"),
        ("availableReplicas", "replicas", "cannot be greater than status.replicas"),
        ("availableReplicas", "readyReplicas", "cannot be greater than readyReplicas"),
    ];
    validate_counts(status, COUNTS, PARTS, e);
}

/// `status.replicas` is a selectable field of ReplicaSets and ReplicationControllers.
pub(crate) fn selectable_replicas(obj: &Value) -> Vec<(&'static str, String)> {
    vec![("status.replicas", obj.at("status").int("replicas").unwrap_or(0).to_string())]
}

/// `status.collisionCount` must not decrease.
pub(crate) fn validate_collision_count(new: &Value, old: &Value, e: &mut ErrorList) {
    let count = |object: &Value| object.at("status").int("collisionCount");
    if let Some(old) = count(old)
        && count(new).is_none_or(|new| new < old)
    {
        e.invalid(&Path::new("status.collisionCount"), count(new).unwrap_or(0), "cannot be decremented");
    }
}

/// Warnings about the pod template of a new object or one whose spec changed.
pub(crate) fn template_warnings(new: &Value, old: Option<&Value>) -> Vec<String> {
    if old.is_some_and(|old| semantic_equal(old.at("spec"), new.at("spec"))) {
        return Vec::new();
    }
    warnings::for_template(new.path("spec.template"), &Path::new("spec.template"))
}

/// Template warnings, and one for a new object whose name is not a valid host name of its pods.
pub(crate) fn name_and_template_warnings(new: &Value, old: Option<&Value>) -> Vec<String> {
    let name = if old.is_none() { name_warning(new, "Pod names and hostnames") } else { None };
    name.into_iter().chain(template_warnings(new, old)).collect()
}
