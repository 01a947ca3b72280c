//! Whether a policy or binding applies to a request, and in which version it sees the object.

use api::Resource;
use serde_json::Value;

use super::config::{MatchResources, NamedRule};
use crate::admission::Request;
use crate::admission::webhooks::{equivalent_rows, in_namespace, matches_selector};
use crate::server::Server;

/// The row of the version that the policy sees; `None` if it does not apply.
pub fn matched(
    server: &Server,
    match_resources: &MatchResources,
    request: &Request<'_>,
    object: &Value,
) -> Result<Option<&'static Resource>, String> {
    let namespace = in_namespace(server, &match_resources.namespaces, request, object);
    if matches!(namespace, Ok(false)) || !matches_selector(&match_resources.objects, request, object) {
        return Ok(None);
    }
    if matching_row(server, &match_resources.excluded, match_resources.exact, request).is_some() {
        return Ok(None);
    }
    let row = match match_resources.rules.is_empty() {
        true => Some(request.requested_row),
        false => matching_row(server, &match_resources.rules, match_resources.exact, request),
    };
    // A missing namespace is an error only if the rules match.
    match (row, namespace) {
        (Some(_), Err(status)) => Err(status.message),
        (row, _) => Ok(row),
    }
}

fn matching_row(
    server: &Server,
    rules: &[NamedRule],
    exact: bool,
    request: &Request<'_>,
) -> Option<&'static Resource> {
    let matches = |named: &NamedRule, row: &Resource| {
        named.rule.matches(request, row)
            && (named.names.is_empty() || named.names.contains(&request.review_name))
    };
    if rules.iter().any(|rule| matches(rule, request.requested_row)) {
        return Some(request.requested_row);
    }
    if exact || rules.is_empty() {
        return None;
    }
    let rows = equivalent_rows(server, request);
    rules.iter().find_map(|rule| rows.iter().find(|row| matches(rule, row)).copied())
}
