//! `RuleWithOperations`: the operations, groups, versions and resources that a webhook or policy matches.

use std::collections::HashSet;

use serde_json::Value;

use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::names;

const OPERATIONS: [&str; 5] = ["*", "CONNECT", "CREATE", "DELETE", "UPDATE"];
const SCOPES: [&str; 3] = ["*", "Cluster", "Namespaced"];

/// Validates a `RuleWithOperations`.
pub(super) fn validate_rule(rule: &Value, path: &Path, errors: &mut ErrorList) {
    list(rule, "operations", "operations", path, errors);
    for (i, operation) in rule.items("operations").iter().enumerate() {
        let name = operation.as_str().unwrap_or("");
        if !OPERATIONS.contains(&name) {
            errors.not_supported(&path.child("operations").index(i), name, &OPERATIONS);
        }
    }
    list(rule, "apiGroups", "API groups", path, errors);
    list(rule, "apiVersions", "API versions", path, errors);
    for (i, version) in rule.items("apiVersions").iter().enumerate() {
        if version == "" {
            errors.required(&path.child("apiVersions").index(i), "");
        }
    }
    resources(rule.at("resources"), &path.child("resources"), errors);
    if let Some(scope) = rule.at("scope").as_str().filter(|scope| !SCOPES.contains(scope)) {
        errors.not_supported(&path.child("scope"), scope, &SCOPES);
    }
}

/// Validates a required list, in which `*` must be the only item.
fn list(rule: &Value, field: &str, others: &str, path: &Path, errors: &mut ErrorList) {
    let items = rule.items(field);
    if items.is_empty() {
        errors.required(&path.child(field), "");
    }
    if items.len() > 1 && items.iter().any(|item| item == "*") {
        let message = format!("if '*' is present, must not specify other {others}");
        errors.invalid(&path.child(field), rule.at(field).clone(), &message);
    }
}

fn resources(resources: &Value, path: &Path, errors: &mut ErrorList) {
    let list = resources.as_array().map_or(&[][..], Vec::as_slice);
    if list.is_empty() {
        errors.required(path, "");
    }
    let (mut wildcard_subresources, mut wildcard_resources) = (HashSet::new(), HashSet::new());
    // Upstream keeps only the last resource without a subresource here; this does the same.
    let mut has_resource_without_subresource = false;
    for (i, resource) in list.iter().enumerate() {
        let name = resource.as_str().unwrap_or("");
        if name.is_empty() {
            errors.required(&path.index(i), "");
            continue;
        }
        let Some((resource, sub)) = name.split_once('/') else {
            has_resource_without_subresource = name != "*";
            continue;
        };
        if wildcard_subresources.contains(resource) {
            let message = format!("if '{resource}/*' is present, must not specify {name}");
            errors.invalid(&path.index(i), name, &message);
        }
        if wildcard_resources.contains(sub) {
            let message = format!("if '*/{sub}' is present, must not specify {name}");
            errors.invalid(&path.index(i), name, &message);
        }
        if sub == "*" {
            wildcard_subresources.insert(resource);
        }
        if resource == "*" {
            wildcard_resources.insert(sub);
        }
    }
    if list.len() > 1 && list.iter().any(|resource| resource == "*/*") {
        let message = "if '*/*' is present, must not specify other resources";
        errors.invalid(path, resources.clone(), message);
    }
    if has_resource_without_subresource && list.iter().any(|resource| resource == "*") {
        let message = "if '*' is present, must not specify other resources without subresources";
        errors.invalid(path, resources.clone(), message);
    }
}

/// Validates a `NamedRuleWithOperations`.
pub(super) fn validate_named_rule(named: &Value, path: &Path, errors: &mut ErrorList) {
    let mut seen = HashSet::new();
    for (i, item) in named.items("resourceNames").iter().enumerate() {
        let (name, path) = (item.as_str().unwrap_or(""), path.child("resourceNames").index(i));
        errors.invalid_each(&path, name, names::path_segment_name(name));
        if !seen.insert(name) {
            errors.duplicate(&path, name);
        }
    }
    validate_rule(named, path, errors);
}
