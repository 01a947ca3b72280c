//! Small rules that several kinds share, with upstream's words.

use std::collections::HashSet;
use std::hash::Hash;

use serde_json::Value;

use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::names;

/// One complaint for each message a name rule has about the value.
pub(crate) fn validate_name(value: &str, rule: fn(&str) -> Vec<String>, path: &Path, errors: &mut ErrorList) {
    errors.invalid_each(path, value, rule(value));
}

/// A name that must be there and keep a rule.
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

/// A word out of a list, required. `supported` is in the order upstream prints.
pub(crate) fn one_of(value: &str, supported: &[&str], path: &Path, errors: &mut ErrorList) {
    if value.is_empty() {
        errors.required(path, "");
    } else if !supported.contains(&value) {
        errors.not_supported(path, value, supported);
    }
}

/// A word out of a list, if there is one.
pub(crate) fn one_of_if_set(value: &Value, supported: &[&str], path: &Path, errors: &mut ErrorList) {
    if let Some(value) = value.as_str()
        && !supported.contains(&value)
    {
        errors.not_supported(path, value, supported);
    }
}

pub(crate) fn port_number(port: i64, path: &Path, errors: &mut ErrorList) {
    errors.invalid_each(path, port, names::port_number(port));
}

/// A port by number or by name.
pub(crate) fn port_number_or_name(port: &Value, path: &Path, errors: &mut ErrorList) {
    match port {
        Value::String(port) => validate_name(port, names::port_name, path, errors),
        port => port_number(port.as_i64().unwrap_or(0), path, errors),
    }
}

/// Absent, or present without content.
pub(crate) fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

/// For each key, whether it came before. Lists are as long as clients like, so this is not done pairwise.
pub(crate) fn find_duplicates<K: Eq + Hash>(keys: impl Iterator<Item = K>) -> Vec<bool> {
    let mut seen = HashSet::new();
    keys.map(|key| !seen.insert(key)).collect()
}

/// The annotations of an object.
pub(crate) fn annotations(obj: &Value) -> &Value {
    obj.at("metadata").at("annotations")
}
