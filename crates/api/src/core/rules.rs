//! Validation helpers of several kinds, with upstream's messages.

use std::collections::HashSet;
use std::hash::Hash;

use serde_json::Value;

use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::names;

/// Reports each message of a name rule as an error.
pub(crate) fn validate_name(value: &str, rule: fn(&str) -> Vec<String>, path: &Path, errors: &mut ErrorList) {
    errors.invalid_each(path, value, rule(value));
}

/// Validates a required name.
pub(crate) fn validate_required_name(
    value: &str,
    rule: fn(&str) -> Vec<String>,
    path: &Path,
    errors: &mut ErrorList,
) {
    if value.is_empty() {
        errors.required(path, "");
    } else {
        validate_name(value, rule, path, errors);
    }
}

/// A required enum value. `supported` is printed in this order.
pub(crate) fn required_one_of(value: &str, supported: &[&str], path: &Path, errors: &mut ErrorList) {
    if value.is_empty() {
        errors.required(path, "");
    } else if !supported.contains(&value) {
        errors.not_supported(path, value, supported);
    }
}

/// An optional enum value.
pub(crate) fn optional_one_of(value: &Value, supported: &[&str], path: &Path, errors: &mut ErrorList) {
    if let Some(value) = value.as_str()
        && !supported.contains(&value)
    {
        errors.not_supported(path, value, supported);
    }
}

pub(crate) fn validate_port_number(port: i64, path: &Path, errors: &mut ErrorList) {
    errors.invalid_each(path, port, names::port_number(port));
}

/// A port number or port name.
pub(crate) fn validate_port_number_or_name(port: &Value, path: &Path, errors: &mut ErrorList) {
    match port {
        Value::String(port) => validate_name(port, names::port_name, path, errors),
        port => validate_port_number(port.as_i64().unwrap_or(0), path, errors),
    }
}

/// Whether a value is absent or empty.
pub(crate) fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

/// Whether each key is a duplicate of an earlier one. Takes linear time, because clients control the
/// length of lists.
pub(crate) fn find_duplicates<K: Eq + Hash>(keys: impl Iterator<Item = K>) -> Vec<bool> {
    let mut seen = HashSet::new();
    keys.map(|key| !seen.insert(key)).collect()
}

pub(crate) fn annotations(obj: &Value) -> &Value {
    obj.at("metadata").at("annotations")
}
