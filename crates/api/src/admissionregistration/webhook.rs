//! A list of webhooks, mutating or validating.

use std::collections::HashSet;

use serde_json::Value;

use super::policy::match_conditions;
use super::{client_config, rule};
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::meta::{self, SelectorOptions};
use crate::names;

pub(super) const FAILURE_POLICIES: [&str; 2] = ["Fail", "Ignore"];
pub(super) const MATCH_POLICIES: [&str; 2] = ["Equivalent", "Exact"];
pub(super) const REINVOCATION_POLICIES: [&str; 2] = ["IfNeeded", "Never"];
const SIDE_EFFECTS: [&str; 2] = ["None", "NoneOnDryRun"];
const REVIEW_VERSIONS: [&str; 2] = ["v1", "v1beta1"];

pub(super) fn webhooks(configuration: &Value, mutating: bool, errors: &mut Errors) {
    let mut seen = HashSet::new();
    for (i, hook) in configuration.items("webhooks").iter().enumerate() {
        let path = Path::new("webhooks").index(i);
        webhook(hook, mutating, &path, errors);
        review_versions(hook.at("admissionReviewVersions"), &path.at("admissionReviewVersions"), errors);
        let name = hook.text("name");
        if !name.is_empty() && !seen.insert(name) {
            errors.duplicate(&path.at("name"), name);
        }
    }
}

fn webhook(hook: &Value, mutating: bool, path: &Path, errors: &mut Errors) {
    names::fully_qualified_name(hook.text("name"), &path.at("name"), errors);
    for (i, item) in hook.items("rules").iter().enumerate() {
        rule::rule(item, &path.at("rules").index(i), errors);
    }
    known(hook, "failurePolicy", &FAILURE_POLICIES, path, errors);
    known(hook, "matchPolicy", &MATCH_POLICIES, path, errors);
    if hook.has("sideEffects") {
        known(hook, "sideEffects", &SIDE_EFFECTS, path, errors);
    } else {
        let why = format!("must specify one of {}", SIDE_EFFECTS.join(", "));
        errors.required(&path.at("sideEffects"), &why);
    }
    if let Some(timeout) = hook.int("timeoutSeconds").filter(|timeout| !(1..=30).contains(timeout)) {
        let message = "the timeout value must be between 1 and 30 seconds";
        errors.invalid(&path.at("timeoutSeconds"), timeout, message);
    }
    for field in ["namespaceSelector", "objectSelector"] {
        meta::label_selector(hook.at(field), &path.at(field), SelectorOptions::default(), errors);
    }
    if mutating {
        known(hook, "reinvocationPolicy", &REINVOCATION_POLICIES, path, errors);
    }
    client_config::endpoint(hook.at("clientConfig"), &path.at("clientConfig"), errors);
    match_conditions(hook.items("matchConditions"), false, &path.at("matchConditions"), errors);
}

/// A field that, where it is given, has one of a few values.
pub(super) fn known(obj: &Value, field: &str, values: &[&str], path: &Path, errors: &mut Errors) {
    if let Some(value) = obj.at(field).as_str().filter(|value| !values.contains(value)) {
        errors.not_supported(&path.at(field), value, values);
    }
}

fn review_versions(versions: &Value, path: &Path, errors: &mut Errors) {
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
