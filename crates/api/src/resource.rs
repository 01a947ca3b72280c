//! The kinds of the resource group (dynamic resource allocation), and the names and requests they share.

mod claim;
mod device;
pub mod device_class;
pub mod resource_claim;
pub mod resource_claim_template;
pub mod resource_slice;

use std::collections::HashSet;

use serde_json::Value;

use crate::field::{Errors, Path};
use crate::json::Json;
use crate::{meta, names};

const MAX_DRIVER: usize = 63;
const MAX_POOL: usize = 253;
const MAX_ID: usize = 32;
const MAX_SELECTORS: usize = 32;
const MAX_CONFIG: usize = 32;
const MAX_REQUESTS: usize = 32;
const MAX_EXPRESSION: usize = 10 * 1024;
const MAX_PARAMETERS: usize = 10 * 1024;
const MAX_BINDING_CONDITIONS: usize = 4;
const TAINT_EFFECTS: [&str; 3] = ["NoExecute", "NoSchedule", "None"];

/// Checks every item of a list that is not too long; of one that is, says only that.
fn each(
    list: &[Value],
    max: usize,
    path: &Path,
    errors: &mut Errors,
    mut check: impl FnMut(&Value, &Path, &mut Errors),
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

/// The same for a list whose items differ by `key`.
fn each_once(
    list: &[Value],
    max: usize,
    path: &Path,
    errors: &mut Errors,
    check: impl FnMut(&Value, &Path, &mut Errors),
    key: impl Fn(&Value) -> String,
) {
    if !each(list, max, path, errors, check) {
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

fn own_text(value: &Value) -> String {
    value.as_str().unwrap_or("").to_owned()
}

fn label(value: &str, path: &Path, errors: &mut Errors) {
    errors.invalid_each(path, value, names::dns1123_label(value));
}

/// The name of a driver: a subdomain in any case.
fn driver(name: &str, path: &Path, errors: &mut Errors) {
    if name.is_empty() {
        errors.required(path, "");
        return;
    }
    if name.len() > MAX_DRIVER {
        errors.too_long(path, MAX_DRIVER);
    }
    errors.invalid_each(path, name, names::dns1123_subdomain(&name.to_lowercase()));
}

/// The name of a pool: subdomains with slashes between.
fn pool(name: &str, path: &Path, errors: &mut Errors) {
    if name.is_empty() {
        errors.required(path, "");
        return;
    }
    if name.len() > MAX_POOL {
        errors.too_long(path, MAX_POOL);
    }
    for part in name.split('/') {
        errors.invalid_each(path, part, names::dns1123_subdomain(part));
    }
}

/// `attribute` or `example.com/attribute`.
fn qualified(name: &str, path: &Path, errors: &mut Errors) {
    let parts: Vec<&str> = name.split('/').collect();
    match parts.as_slice() {
        [id] => identifier(id, path, errors),
        [domain, id] => {
            if domain.is_empty() {
                errors.invalid(path, "", "the domain must not be empty");
            } else {
                driver(domain, path, errors);
            }
            if id.is_empty() {
                errors.invalid(path, "", "the name must not be empty");
            } else {
                identifier(id, path, errors);
            }
        }
        // Upstream lets these pass, and objects with them may be around.
        _ => {}
    }
}

fn fully_qualified(name: &str, path: &Path, errors: &mut Errors) {
    qualified(name, path, errors);
    if !name.contains('/') {
        let message = "a fully qualified name must be a domain and a name separated by a slash";
        errors.invalid(path, name, message);
    }
}

fn identifier(id: &str, path: &Path, errors: &mut Errors) {
    if id.len() > MAX_ID {
        errors.too_long(path, MAX_ID);
    }
    errors.invalid_each(path, id, names::c_identifier(id));
}

/// A UUID in its one normal form.
fn uid(value: &str, path: &Path, errors: &mut Errors) {
    let dash = |i: usize| matches!(i, 8 | 13 | 18 | 23);
    let dashed = |text: &str| {
        text.len() == 36
            && text.bytes().enumerate().all(|(i, byte)| match byte {
                b'-' => dash(i),
                _ => byte.is_ascii_hexdigit() && !dash(i),
            })
    };
    let bare = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let in_braces = value.strip_prefix('{').and_then(|rest| rest.strip_suffix('}'));
    let after_urn = value.to_ascii_lowercase().strip_prefix("urn:uuid:").map(str::to_owned);
    let well_formed = match value.len() {
        32 => bare(value),
        36 => dashed(value),
        38 => in_braces.is_some_and(dashed),
        45 => after_urn.as_deref().is_some_and(dashed),
        length => {
            let message = format!("error validating uid: invalid UUID length: {length}");
            return errors.invalid(path, value, &message);
        }
    };
    if !well_formed {
        errors.invalid(path, value, "error validating uid: invalid UUID format");
    } else if value.len() != 36 || value != value.to_ascii_lowercase() {
        let message = "uid must be in RFC 4122 normalized form, `xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx` with lowercase hexadecimal characters";
        errors.invalid(path, value, message);
    }
}

fn selectors(list: &[Value], path: &Path, errors: &mut Errors) {
    each(list, MAX_SELECTORS, path, errors, |selector, path, errors| {
        let path = path.at("cel");
        if !selector.has("cel") {
            errors.required(&path, "");
        } else if selector.at("cel").text("expression").len() > MAX_EXPRESSION {
            errors.too_long(&path.at("expression"), MAX_EXPRESSION);
        }
    });
}

/// The settings a driver is handed unread.
fn configuration(config: &Value, path: &Path, errors: &mut Errors) {
    let (opaque, path) = (config.at("opaque"), path.at("opaque"));
    if opaque.is_null() {
        errors.required(&path, "");
        return;
    }
    driver(opaque.text("driver"), &path.at("driver"), errors);
    raw_object(opaque.at("parameters"), MAX_PARAMETERS, &path.at("parameters"), errors);
}

fn raw_object(value: &Value, max: usize, path: &Path, errors: &mut Errors) {
    if value.is_null() {
        errors.required(path, "");
    } else if value.to_string().len() > max {
        errors.too_long(path, max);
    } else if !value.is_object() {
        errors.invalid(path, "<value omitted>", "must be a valid JSON object");
    }
}

/// What must come true before, or must not before, a device is bound.
fn binding_conditions(of: &Value, path: &Path, errors: &mut Errors) {
    let fields = ["bindingConditions", "bindingFailureConditions"];
    let [wanted, failures] = fields.map(|field| of.items(field));
    for (field, list) in [(fields[0], wanted), (fields[1], failures)] {
        each(list, MAX_BINDING_CONDITIONS, &path.at(field), errors, |item, path, errors| {
            meta::label_name(item.as_str().unwrap_or(""), path, errors);
        });
    }
    let all: HashSet<&str> = wanted.iter().filter_map(Value::as_str).collect();
    for (field, list) in [(fields[0], wanted), (fields[1], failures)] {
        let mut seen = HashSet::new();
        for (i, item) in list.iter().enumerate() {
            let (name, path) = (item.as_str().unwrap_or(""), path.at(field).index(i));
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
            errors.invalid(&path.at(fields[missing]), of.at(fields[missing]).clone(), &message);
        }
    }
}
