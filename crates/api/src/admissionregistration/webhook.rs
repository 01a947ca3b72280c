//! Validation of the webhook list of a mutating or validating configuration.

use std::collections::HashSet;

use serde_json::Value;

use super::policy::validate_match_conditions;
use super::{client_config, rule};
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::meta::{self, SelectorOptions};
use crate::names;

pub(super) const FAILURE_POLICIES: [&str; 2] = ["Fail", "Ignore"];
pub(super) const MATCH_POLICIES: [&str; 2] = ["Equivalent", "Exact"];
pub(super) const REINVOCATION_POLICIES: [&str; 2] = ["IfNeeded", "Never"];
const SIDE_EFFECTS: [&str; 2] = ["None", "NoneOnDryRun"];
const REVIEW_VERSIONS: [&str; 2] = ["v1", "v1beta1"];

pub(super) fn validate_webhooks(configuration: &Value, mutating: bool, errors: &mut ErrorList) {
    let mut seen = HashSet::new();
    for (i, hook) in configuration.items("webhooks").iter().enumerate() {
        let path = Path::new("webhooks").index(i);
        webhook(hook, mutating, &path, errors);
        review_versions(hook.at("admissionReviewVersions"), &path.child("admissionReviewVersions"), errors);
        let name = hook.text("name");
        if !name.is_empty() && !seen.insert(name) {
            errors.duplicate(&path.child("name"), name);
        }
    }
}

fn webhook(hook: &Value, mutating: bool, path: &Path, errors: &mut ErrorList) {
    names::fully_qualified_name(hook.text("name"), &path.child("name"), errors);
    for (i, item) in hook.items("rules").iter().enumerate() {
        rule::validate_rule(item, &path.child("rules").index(i), errors);
    }
    optional_one_of(hook, "failurePolicy", &FAILURE_POLICIES, path, errors);
    optional_one_of(hook, "matchPolicy", &MATCH_POLICIES, path, errors);
    if hook.has("sideEffects") {
        optional_one_of(hook, "sideEffects", &SIDE_EFFECTS, path, errors);
    } else {
        let detail = format!("must specify one of {}", SIDE_EFFECTS.join(", "));
        errors.required(&path.child("sideEffects"), &detail);
    }
    if let Some(timeout) = hook.int("timeoutSeconds").filter(|timeout| !(1..=30).contains(timeout)) {
        let message = "the timeout value must be between 1 and 30 seconds";
        errors.invalid(&path.child("timeoutSeconds"), timeout, message);
    }
    for field in ["namespaceSelector", "objectSelector"] {
        meta::validate_label_selector(hook.at(field), &path.child(field), SelectorOptions::default(), errors);
    }
    if mutating {
        optional_one_of(hook, "reinvocationPolicy", &REINVOCATION_POLICIES, path, errors);
    }
    client_config::validate_client_config(hook.at("clientConfig"), &path.child("clientConfig"), errors);
    validate_match_conditions(hook.items("matchConditions"), false, &path.child("matchConditions"), errors);
}

/// Validates an optional enum field.
pub(super) fn optional_one_of(
    obj: &Value,
    field: &str,
    values: &[&str],
    path: &Path,
    errors: &mut ErrorList,
) {
    if let Some(value) = obj.at(field).as_str().filter(|value| !values.contains(value)) {
        errors.not_supported(&path.child(field), value, values);
    }
}

fn review_versions(versions: &Value, path: &Path, errors: &mut ErrorList) {
    let list = versions.as_array().map_or(&[][..], Vec::as_slice);
    if list.is_empty() {
        errors.required(path, &format!("must specify one of {}", REVIEW_VERSIONS.join(", ")));
        return;
    }
    let mut seen = HashSet::new();
    for (i, version) in list.iter().enumerate() {
        let name = version.as_str().unwrap_or("");
        if !seen.insert(name) {
            errors.invalid(&path.index(i), name, "duplicate version");
            continue;
        }
        errors.invalid_each(&path.index(i), name, names::dns1035_label(name));
    }
    if !list.iter().any(|version| REVIEW_VERSIONS.iter().any(|known| version == known)) {
        let message = format!("must include at least one of {}", REVIEW_VERSIONS.join(", "));
        errors.invalid(path, versions.clone(), &message);
    }
}
