//! Whether a webhook is called for a request, and in which version.

use api::json::JsonExt as _;
use api::selector::LabelSelector;
use api::{Resource, Status};
use serde_json::Value;

use super::config::{Hook, Rule};
use super::metrics::WebhookMetrics;
use super::{conversion, review};
use crate::admission::{Cluster as _, Operation, Request};
use crate::registry::stored_as;
use crate::server::Server;

/// The row of the version the webhook gets; `None` if it does not match.
pub fn matching_row(
    server: &Server,
    hook: &Hook,
    request: &Request<'_>,
    object: &Value,
    metrics: &WebhookMetrics,
    step: &'static str,
) -> Result<Option<&'static Resource>, Status> {
    let namespace = in_namespace(server, &hook.namespaces, request, object);
    if matches!(namespace, Ok(false)) || !matches_selector(&hook.objects, request, object) {
        return Ok(None);
    }
    let Some(row) = rule_row(server, hook, request) else { return Ok(None) };
    // A missing namespace is an error only if the rules match.
    namespace?;
    if hook.conditions.is_empty() {
        return Ok(Some(row));
    }
    let versioned_object = conversion::to_versioned(request, row, object);
    match review::conditions_match(server, hook, request, row, &versioned_object) {
        Ok(true) => Ok(Some(row)),
        Ok(false) => {
            metrics.record_excluded(hook, step, request.operation);
            Ok(None)
        }
        Err(reason) => {
            metrics.record_condition_error(hook, step, request.operation);
            match hook.fails_open {
                true => Ok(None),
                false => {
                    let (group, plural) = (request.requested_row.group, request.requested_row.plural);
                    Err(Status::forbidden(group, plural, &request.review_name, &reason))
                }
            }
        }
    }
}

/// Whether the selector matches the namespace of the request. Requests for cluster-scoped objects
/// always match.
pub fn in_namespace(
    server: &Server,
    selector: &LabelSelector,
    request: &Request<'_>,
    object: &Value,
) -> Result<bool, Status> {
    let namespace = namespace(request);
    if selector.is_everything() || namespace.is_empty() && request.row.plural != "namespaces" {
        return Ok(true);
    }
    let is_namespace = request.row.plural == "namespaces" && request.subresource.is_empty();
    if is_namespace && matches!(request.operation, Operation::Create | Operation::Update) {
        return Ok(selector.matches_labels(object.at("metadata").at("labels")));
    }
    match server.get("", "namespaces", "", namespace) {
        Some(found) => Ok(selector.matches(|key| found.label(key))),
        None => Err(Status::not_found("", "namespaces", namespace)),
    }
}

/// The namespace of a request; for a Namespace its own name.
pub fn namespace<'a>(request: &'a Request<'_>) -> &'a str {
    match (request.row.group, request.row.plural) {
        ("", "namespaces") => &request.review_name,
        _ => request.namespace,
    }
}

/// Whether the selector matches the new or the old object.
pub fn matches_selector(selector: &LabelSelector, request: &Request<'_>, object: &Value) -> bool {
    let selected = |object: &Value| {
        object.has("metadata") && selector.matches_labels(object.at("metadata").at("labels"))
    };
    selector.is_everything() || selected(object) || request.old.is_some_and(selected)
}

/// The requested version if a rule matches it, otherwise an equivalent version that a rule matches.
fn rule_row(server: &Server, hook: &Hook, request: &Request<'_>) -> Option<&'static Resource> {
    if hook.rules.iter().any(|rule| rule.matches(request, request.requested_row)) {
        return Some(request.requested_row);
    }
    if hook.exact {
        return None;
    }
    let rows = equivalent_rows(server, request);
    hook.rules.iter().find_map(|rule| rows.iter().find(|row| rule.matches(request, row)).copied())
}

/// The other served versions of the same objects.
pub fn equivalent_rows(server: &Server, request: &Request<'_>) -> Vec<&'static Resource> {
    let equivalent = |row: &&'static Resource| {
        !std::ptr::eq(*row, request.requested_row)
            && same_objects(row, request.row)
            && (request.subresource.is_empty()
                || row.subresources.iter().any(|sub| sub.name == request.subresource))
    };
    server.registry.rows().into_iter().filter(equivalent).collect()
}

/// Whether both rows are versions of the same stored objects.
fn same_objects(row: &'static Resource, stored: &'static Resource) -> bool {
    std::ptr::eq(stored_as(row), stored)
        || row.custom.is_some() && (row.group, row.plural) == (stored.group, stored.plural)
}

impl Rule {
    pub fn matches(&self, request: &Request<'_>, row: &Resource) -> bool {
        let namespaced = !namespace(request).is_empty() && (row.group, row.plural) != ("", "namespaces");
        let scope = match self.scope.as_str() {
            "Namespaced" => namespaced,
            "Cluster" => !namespaced,
            _ => true,
        };
        let listed = |list: &[String], name: &str| list.iter().any(|item| item == "*" || item == name);
        let named = |(resource, subresource): &(String, String)| {
            (resource == "*" || resource == row.plural)
                && (subresource == "*" || subresource == request.subresource)
        };
        scope
            && listed(&self.operations, request.operation.as_str())
            && listed(&self.groups, row.group)
            && listed(&self.versions, row.version)
            && self.resources.iter().any(named)
    }
}
