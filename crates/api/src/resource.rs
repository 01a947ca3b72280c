//! The kinds of the `resource.k8s.io` group (dynamic resource allocation) and their common validation.

mod claim;
mod device;
pub mod device_class;
pub mod resource_claim;
pub mod resource_claim_template;
pub mod resource_slice;

use std::collections::HashSet;

use serde_json::Value;

use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::{meta, names};

const MAX_DRIVER_BYTES: usize = 63;
const MAX_POOL_BYTES: usize = 253;
const MAX_ID_BYTES: usize = 32;
const MAX_SELECTORS: usize = 32;
const MAX_CONFIGS: usize = 32;
const MAX_REQUESTS: usize = 32;
const MAX_EXPRESSION_BYTES: usize = 10 * 1024;
const MAX_PARAMETERS_BYTES: usize = 10 * 1024;
const MAX_BINDING_CONDITIONS: usize = 4;
const TAINT_EFFECTS: [&str; 3] = ["NoExecute", "NoSchedule", "None"];

/// Validates the length of a list and, if it is within the limit, its items.
fn validate_list(
    list: &[Value],
    max: usize,
    path: &Path,
    errors: &mut ErrorList,
    mut check: impl FnMut(&Value, &Path, &mut ErrorList),
) -> bool {
    if list.len() > max {
        errors.too_many(path, list.len(), max);
        return false;
    }
    for (i, item) in list.iter().enumerate() {
        check(item, &path.index(i), errors);
    }
    true
}

/// Like [`validate_list`], with items that must be unique by `key`.
fn validate_unique_list(
    list: &[Value],
    max: usize,
    path: &Path,
    errors: &mut ErrorList,
    check: impl FnMut(&Value, &Path, &mut ErrorList),
    key: impl Fn(&Value) -> String,
) {
    if !validate_list(list, max, path, errors, check) {
        return;
    }
    let mut seen = HashSet::new();
    for (i, item) in list.iter().enumerate() {
        let key = key(item);
        if seen.contains(&key) {
            errors.duplicate(&path.index(i), key);
        } else {
            seen.insert(key);
        }
    }
}

fn string_value(value: &Value) -> String {
    value.as_str().unwrap_or("").to_owned()
}

fn validate_label(value: &str, path: &Path, errors: &mut ErrorList) {
    errors.invalid_each(path, value, names::dns1123_label(value));
}

/// Validates a driver name: a DNS subdomain, in any case.
fn validate_driver(name: &str, path: &Path, errors: &mut ErrorList) {
    if name.is_empty() {
        errors.required(path, "");
        return;
    }
    if name.len() > MAX_DRIVER_BYTES {
        errors.too_long(path, MAX_DRIVER_BYTES);
    }
    errors.invalid_each(path, name, names::dns1123_subdomain(&name.to_lowercase()));
}

/// Validates a pool name: DNS subdomains separated by slashes.
fn validate_pool(name: &str, path: &Path, errors: &mut ErrorList) {
    if name.is_empty() {
        errors.required(path, "");
        return;
    }
    if name.len() > MAX_POOL_BYTES {
        errors.too_long(path, MAX_POOL_BYTES);
    }
    for part in name.split('/') {
        errors.invalid_each(path, part, names::dns1123_subdomain(part));
    }
}

/// Validates `attribute` or `example.com/attribute`.
fn validate_qualified_name(name: &str, path: &Path, errors: &mut ErrorList) {
    let parts: Vec<&str> = name.split('/').collect();
    match parts.as_slice() {
        [id] => validate_identifier(id, path, errors),
        [domain, id] => {
            if domain.is_empty() {
                errors.invalid(path, "", "the domain must not be empty");
            } else {
                validate_driver(domain, path, errors);
            }
            if id.is_empty() {
                errors.invalid(path, "", "the name must not be empty");
            } else {
                validate_identifier(id, path, errors);
            }
        }
        // Upstream accepts more than one slash, and stored objects may contain such names.
        _ => {}
    }
}

fn validate_fully_qualified_name(name: &str, path: &Path, errors: &mut ErrorList) {
    validate_qualified_name(name, path, errors);
    if !name.contains('/') {
        let message = "a fully qualified name must be a domain and a name separated by a slash";
        errors.invalid(path, name, message);
    }
}

fn validate_identifier(id: &str, path: &Path, errors: &mut ErrorList) {
    if id.len() > MAX_ID_BYTES {
        errors.too_long(path, MAX_ID_BYTES);
    }
    errors.invalid_each(path, id, names::c_identifier(id));
}

/// A UUID in canonical form.
fn validate_uid(value: &str, path: &Path, errors: &mut ErrorList) {
    let dash = |i: usize| matches!(i, 8 | 13 | 18 | 23);
    let is_canonical = |text: &str| {
        text.len() == 36
            && text.bytes().enumerate().all(|(i, byte)| match byte {
                b'-' => dash(i),
                _ => byte.is_ascii_hexdigit() && !dash(i),
            })
    };
    let bare = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let in_braces = value.strip_prefix('{').and_then(|rest| rest.strip_suffix('}'));
    let after_urn = value.to_ascii_lowercase().strip_prefix("urn:uuid:").map(str::to_owned);
    let is_valid = match value.len() {
        32 => bare(value),
        36 => is_canonical(value),
        38 => in_braces.is_some_and(is_canonical),
        45 => after_urn.as_deref().is_some_and(is_canonical),
        length => {
            let message = format!("error validating uid: invalid UUID length: {length}");
            return errors.invalid(path, value, &message);
        }
    };
    if !is_valid {
        errors.invalid(path, value, "error validating uid: invalid UUID format");
    } else if value.len() != 36 || value != value.to_ascii_lowercase() {
        let message = "uid must be in RFC 4122 normalized form, `xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx` with lowercase hexadecimal characters";
        errors.invalid(path, value, message);
    }
}

fn validate_selectors(list: &[Value], path: &Path, errors: &mut ErrorList) {
    validate_list(list, MAX_SELECTORS, path, errors, |selector, path, errors| {
        let path = path.child("cel");
        if !selector.has("cel") {
            errors.required(&path, "");
        } else if selector.at("cel").text("expression").len() > MAX_EXPRESSION_BYTES {
            errors.too_long(&path.child("expression"), MAX_EXPRESSION_BYTES);
        }
    });
}

/// Validates a driver configuration, whose parameters are opaque.
fn validate_configuration(config: &Value, path: &Path, errors: &mut ErrorList) {
    let (opaque, path) = (config.at("opaque"), path.child("opaque"));
    if opaque.is_null() {
        errors.required(&path, "");
        return;
    }
    validate_driver(opaque.text("driver"), &path.child("driver"), errors);
    validate_raw_object(opaque.at("parameters"), MAX_PARAMETERS_BYTES, &path.child("parameters"), errors);
}

fn validate_raw_object(value: &Value, max: usize, path: &Path, errors: &mut ErrorList) {
    if value.is_null() {
        errors.required(path, "");
    } else if value.to_string().len() > max {
        errors.too_long(path, max);
    } else if !value.is_object() {
        errors.invalid(path, "<value omitted>", "must be a valid JSON object");
    }
}

/// Validates the conditions for binding a device: those that must become true, and those that must not.
fn validate_binding_conditions(of: &Value, path: &Path, errors: &mut ErrorList) {
    let fields = ["bindingConditions", "bindingFailureConditions"];
    let [conditions, failures] = fields.map(|field| of.items(field));
    for (field, list) in [(fields[0], conditions), (fields[1], failures)] {
        validate_list(list, MAX_BINDING_CONDITIONS, &path.child(field), errors, |item, path, errors| {
            meta::validate_label_name(item.as_str().unwrap_or(""), path, errors);
        });
    }
    let all: HashSet<&str> = conditions.iter().filter_map(Value::as_str).collect();
    for (field, list) in [(fields[0], conditions), (fields[1], failures)] {
        let mut seen = HashSet::new();
        for (i, item) in list.iter().enumerate() {
            let (name, path) = (item.as_str().unwrap_or(""), path.child(field).index(i));
            if !seen.insert(name) {
                errors.duplicate(&path, name);
            }
            if field == fields[1] && all.contains(name) {
                let message = "bindingFailureConditions must not overlap with bindingConditions";
                errors.invalid(&path, name, message);
            }
        }
    }
    for (missing, used) in [(0, 1), (1, 0)] {
        if of.items(fields[missing]).is_empty() && !of.items(fields[used]).is_empty() {
            let message = format!("{} are required to use {}", fields[missing], fields[used]);
            errors.invalid(&path.child(fields[missing]), of.at(fields[missing]).clone(), &message);
        }
    }
}
