//! Helpers for the validation of pods and workloads.

use std::net::IpAddr;

use serde_json::Value;

use crate::field::{ErrorList, ErrorType, Path};
use crate::json::JsonExt;
use crate::{meta, names};

pub(crate) const NEGATIVE_MESSAGE: &str = "must be greater than or equal to 0";
pub(crate) const NOT_POSITIVE_MESSAGE: &str = "must be greater than 0";
pub(crate) const IMMUTABLE: &str = "field is immutable";

/// Reports each message of a name check as an error of `value`.
pub(crate) fn validate_name(
    e: &mut ErrorList,
    path: &Path,
    value: &str,
    check: impl Fn(&str) -> Vec<String>,
) {
    e.invalid_each(path, value, check(value));
}

pub(crate) fn validate_label(e: &mut ErrorList, path: &Path, value: &str) {
    validate_name(e, path, value, names::dns1123_label);
}

pub(crate) fn validate_subdomain(e: &mut ErrorList, path: &Path, value: &str) {
    validate_name(e, path, value, names::dns1123_subdomain);
}

/// A required string field.
pub(crate) fn required(e: &mut ErrorList, obj: &Value, path: &Path, field: &str) {
    if obj.text(field).is_empty() {
        e.required(&path.child(field), "");
    }
}

/// An optional integer field that must not be negative.
pub(crate) fn non_negative(e: &mut ErrorList, obj: &Value, path: &Path, field: &str) {
    if let Some(value) = obj.int(field)
        && value < 0
    {
        e.invalid(&path.child(field), value, NEGATIVE_MESSAGE);
    }
}

/// An optional enum field. `allowed` is printed in this order.
pub(crate) fn optional_one_of(e: &mut ErrorList, obj: &Value, path: &Path, field: &str, allowed: &[&str]) {
    if let Some(value) = obj.at(field).as_str()
        && !allowed.contains(&value)
    {
        e.not_supported(&path.child(field), value, allowed);
    }
}

/// A required enum field.
pub(crate) fn required_one_of(e: &mut ErrorList, obj: &Value, path: &Path, field: &str, allowed: &[&str]) {
    match obj.text(field) {
        "" => e.required(&path.child(field), ""),
        _ => optional_one_of(e, obj, path, field, allowed),
    }
}

pub(crate) fn validate_range(e: &mut ErrorList, path: &Path, value: i64, low: i64, high: i64) {
    e.invalid_each(path, value, names::in_range(value, low, high));
}

/// An optional user or group ID.
pub(crate) fn validate_id(e: &mut ErrorList, obj: &Value, path: &Path, field: &str) {
    if let Some(value) = obj.int(field) {
        validate_range(e, &path.child(field), value, 0, i64::from(i32::MAX));
    }
}

/// An optional file mode.
pub(crate) fn validate_file_mode(e: &mut ErrorList, obj: &Value, path: &Path, field: &str) {
    if let Some(mode) = obj.int(field)
        && !(0..=0o777).contains(&mode)
    {
        e.invalid(&path.child(field), mode, "must be a number between 0 and 0777 (octal), both inclusive");
    }
}

/// Reports an invalid value with a printed form that is not plain JSON.
pub(crate) fn invalid_as(e: &mut ErrorList, path: &Path, rendered: &str, detail: &str) {
    e.push(ErrorType::Invalid, path, format!("Invalid value: {rendered}: {detail}"));
}

/// Validates that a field does not change.
pub(crate) fn validate_immutable(e: &mut ErrorList, path: &Path, new: &Value, old: &Value) {
    if !meta::semantic_equal(new, old) {
        invalid_as(e, path, &render_value(new), IMMUTABLE);
    }
}

/// Renders a value for an error. A label selector has upstream's field order; other values are plain JSON.
pub(crate) fn render_value(value: &Value) -> String {
    if value.has("matchLabels") || value.has("matchExpressions") {
        render_selector(value)
    } else {
        value.to_string()
    }
}

fn render_selector(selector: &Value) -> String {
    let mut parts = Vec::new();
    if selector.entries("matchLabels").next().is_some() {
        parts.push(format!("\"matchLabels\":{}", selector.at("matchLabels")));
    }
    let expressions: Vec<String> = selector
        .items("matchExpressions")
        .iter()
        .map(|one| {
            let fields = ["key", "operator", "values"].into_iter().filter(|f| one.has(f));
            let fields: Vec<String> = fields.map(|f| format!("\"{f}\":{}", one.at(f))).collect();
            format!("{{{}}}", fields.join(","))
        })
        .collect();
    if !expressions.is_empty() {
        parts.push(format!("\"matchExpressions\":[{}]", expressions.join(",")));
    }
    format!("{{{}}}", parts.join(","))
}

/// Warns about an IP address that is not in canonical form.
pub(crate) fn ip_warning(path: &Path, value: &str) -> Option<String> {
    let ip = names::parse_ip(value)?;
    let canonical = match ip {
        IpAddr::V6(v6) => v6.to_ipv4_mapped().map_or(ip, IpAddr::V4).to_string(),
        IpAddr::V4(_) => ip.to_string(),
    };
    match value.parse::<IpAddr>() {
        Ok(IpAddr::V4(_)) => None,
        Ok(IpAddr::V6(v6)) if v6.to_ipv4_mapped().is_none() => (canonical != value).then(|| {
            format!(
                "{path}: IPv6 address \"{value}\" should be in RFC 5952 canonical format (\"{canonical}\")"
            )
        }),
        _ => Some(format!("{path}: non-standard IP address \"{value}\" is invalid: use \"{canonical}\"")),
    }
}

pub(crate) fn validate_no_parent_refs(e: &mut ErrorList, path: &Path, target: &str) {
    if has_parent_refs(target) {
        e.invalid(path, target, "must not contain '..'");
    }
}

pub(crate) fn has_parent_refs(target: &str) -> bool {
    target.split('/').any(|part| part == "..")
}

/// A relative path without `..` elements.
pub(crate) fn validate_relative_path(e: &mut ErrorList, path: &Path, target: &str) {
    if target.starts_with('/') {
        e.invalid(path, target, "must be a relative path");
    }
    validate_no_parent_refs(e, path, target);
}

/// Like [`validate_relative_path`], and not a name that the kubelet's atomic writer uses.
pub(crate) fn validate_non_reserved_path(e: &mut ErrorList, path: &Path, target: &str) {
    validate_relative_path(e, path, target);
    if target.starts_with("..") && !target.starts_with("../") {
        e.invalid(path, target, "must not start with '..'");
    }
}

/// All init, main and ephemeral containers with their paths, in upstream's order.
pub(crate) fn all_containers<'a>(spec: &'a Value, path: &Path) -> Vec<(Path, &'a Value)> {
    let mut found = Vec::new();
    for list in ["initContainers", "containers", "ephemeralContainers"] {
        let at = path.child(list);
        found.extend(spec.items(list).iter().enumerate().map(|(i, container)| (at.index(i), container)));
    }
    found
}

/// Whether an init container is a sidecar.
pub(crate) fn is_sidecar(container: &Value) -> bool {
    container.text("restartPolicy") == "Always"
}

/// Whether the pod uses the user namespace of the node, which is the default.
pub(crate) fn host_users(spec: &Value) -> bool {
    spec.at("hostUsers").as_bool().unwrap_or(true)
}

pub(crate) fn annotation<'a>(meta: &'a Value, key: &str) -> Option<&'a str> {
    meta.at("annotations").get(key).and_then(Value::as_str)
}

pub(crate) const MIRROR_ANNOTATION: &str = "kubernetes.io/config.mirror";

/// A value as upstream prints a struct without JSON tags: all fields in order.
pub(crate) fn render_fields(value: &Value, fields: &[(&str, &str)]) -> String {
    let fields: Vec<String> =
        fields.iter().map(|(go, json)| format!("\"{go}\":{}", value.at(json))).collect();
    format!("{{{}}}", fields.join(","))
}
