//! Whether a policy or binding concerns a request, and in which version it is seen.

use api::Resource;
use serde_json::Value;

use super::config::{NamedRule, Scope};
use crate::admission::Request;
use crate::admission::webhooks::{equivalent_rows, in_namespace, selects};
use crate::server::Server;

/// The row in whose version the request is seen; none where it is not concerned.
pub fn matched(
    server: &Server,
    scope: &Scope,
    request: &Request<'_>,
    object: &Value,
) -> Result<Option<&'static Resource>, String> {
    let namespace = in_namespace(server, &scope.namespaces, request, object);
    if matches!(namespace, Ok(false)) || !selects(&scope.objects, request, object) {
        return Ok(None);
    }
    if named(server, &scope.excluded, scope.exact, request).is_some() {
        return Ok(None);
    }
    let row = match scope.rules.is_empty() {
        true => Some(request.asked),
        false => named(server, &scope.rules, scope.exact, request),
    };
    // Only what is concerned otherwise has a namespace to miss.
    match (row, namespace) {
        (Some(_), Err(status)) => Err(status.message),
        (row, _) => Ok(row),
    }
}

fn named(
    server: &Server,
    rules: &[NamedRule],
    exact: bool,
    request: &Request<'_>,
) -> Option<&'static Resource> {
    let matches = |named: &NamedRule, row: &Resource| {
        named.rule.matches(request, row)
            && (named.names.is_empty() || named.names.contains(&request.told_name))
    };
    if rules.iter().any(|rule| matches(rule, request.asked)) {
        return Some(request.asked);
    }
    if exact || rules.is_empty() {
        return None;
    }
    let rows = equivalent_rows(server, request);
    rules.iter().find_map(|rule| rows.iter().find(|row| matches(rule, row)).copied())
}
