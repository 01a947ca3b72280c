//! The cells of nodes, events, quotas and other cluster resources.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use serde_json::Value;

use super::row::AgeText;
use super::text::{condition, join, or_default, since, timestamp};
use crate::json::JsonExt as _;

pub fn node_status(node: &Value) -> String {
    let conditions = node.at("status").items("conditions");
    let ready = conditions.iter().rfind(|condition| condition.text("type") == "Ready");
    let word = match ready.map(|condition| condition.text("status")) {
        None => "Unknown",
        Some("True") => "Ready",
        Some(_) => "NotReady",
    };
    if node.at("spec").flag("unschedulable") { format!("{word},SchedulingDisabled") } else { word.to_owned() }
}

pub fn node_roles(node: &Value) -> String {
    let role = |(key, value): (&'_ str, &'_ Value)| match key.strip_prefix("node-role.kubernetes.io/") {
        Some(role) => role.to_owned(),
        None if key == "kubernetes.io/role" => value.as_str().unwrap_or("").to_owned(),
        None => String::new(),
    };
    let roles: BTreeSet<String> = node.at("metadata").entries("labels").map(role).collect();
    or_default(join(roles.iter().map(String::as_str).filter(|role| !role.is_empty())), "<none>")
}

pub fn internal_ip(node: &Value) -> String {
    address(node, "InternalIP")
}

pub fn external_ip(node: &Value) -> String {
    address(node, "ExternalIP")
}

pub fn kernel(node: &Value) -> String {
    let info = node.path("status.nodeInfo");
    let version = or_default(info.text("kernelVersion").to_owned(), "<unknown>");
    match info.text("architecture") {
        "" => version,
        architecture => format!("{version} ({architecture})"),
    }
}

pub fn event_last_seen(event: &Value) -> AgeText {
    if event.has("series") {
        return since(event.path("series.lastObservedTime"));
    }
    let last = first_field(event, ["lastTimestamp", "deprecatedLastTimestamp"]);
    if timestamp(last).is_some() { since(last) } else { event_first_seen(event) }
}

pub fn event_first_seen(event: &Value) -> AgeText {
    let first = first_field(event, ["firstTimestamp", "deprecatedFirstTimestamp"]);
    since(if timestamp(first).is_some() { first } else { event.at("eventTime") })
}

pub fn event_object(event: &Value) -> String {
    let object = first_field(event, ["involvedObject", "regarding"]);
    let kind = object.text("kind").to_lowercase();
    match object.text("name") {
        "" => kind,
        name => format!("{kind}/{name}"),
    }
}

pub fn event_field_path(event: &Value) -> String {
    first_field(event, ["involvedObject", "regarding"]).text("fieldPath").to_owned()
}

pub fn event_source(event: &Value) -> String {
    let source = first_field(event, ["source", "deprecatedSource"]);
    let reporting_component =
        first_field(event, ["reportingComponent", "reportingController"]).as_str().unwrap_or("");
    let component =
        if source.text("component").is_empty() { reporting_component } else { source.text("component") };
    let host = source.text("host");
    match if host.is_empty() { event.text("reportingInstance") } else { host } {
        "" => component.to_owned(),
        instance => format!("{component}, {instance}"),
    }
}

pub fn event_message(event: &Value) -> String {
    first_field(event, ["message", "note"]).as_str().unwrap_or("").trim().to_owned()
}

/// The number of occurrences. An `events.k8s.io` Event without a series has no count and counts as one.
pub fn event_count(event: &Value) -> i64 {
    let count = match event.at("series") {
        Value::Null => first_field(event, ["count", "deprecatedCount"]).as_i64().filter(|count| *count != 0),
        series => series.int("count").or(Some(0)),
    };
    count.unwrap_or(1)
}

pub fn config_map_entries(map: &Value) -> i64 {
    let entries = map.entries("data").count() + map.entries("binaryData").count();
    i64::try_from(entries).unwrap_or(i64::MAX)
}

pub fn quota_requests(quota: &Value) -> String {
    render_quota(quota, |name| !name.starts_with("limits."))
}

pub fn quota_limits(quota: &Value) -> String {
    render_quota(quota, |name| name.starts_with("limits."))
}

pub fn component_status(component: &Value) -> String {
    match healthy_condition(component).text("status") {
        "" => "Unknown",
        "True" => "Healthy",
        _ => "Unhealthy",
    }
    .to_owned()
}

pub fn component_message(component: &Value) -> String {
    healthy_condition(component).text("message").to_owned()
}

pub fn component_error(component: &Value) -> String {
    healthy_condition(component).text("error").to_owned()
}

pub fn api_service(service: &Value) -> String {
    match service.path("spec.service") {
        Value::Null => "Local".to_owned(),
        service => format!("{}/{}", service.text("namespace"), service.text("name")),
    }
}

pub fn api_service_available(service: &Value) -> String {
    let Some(condition) = condition(service, "Available") else { return "Unknown".to_owned() };
    match (condition.text("status"), condition.text("reason")) {
        (status, reason) if status == "True" || reason.is_empty() => status.to_owned(),
        (status, reason) => format!("{status} ({reason})"),
    }
}

pub fn dangling(flow_schema: &Value) -> String {
    condition(flow_schema, "Dangling").map_or("?", |condition| condition.text("status")).to_owned()
}

/// The creation time as a timestamp instead of an age.
pub fn created_at(obj: &Value) -> String {
    or_default(obj.at("metadata").text("creationTimestamp").to_owned(), "0001-01-01T00:00:00Z")
}

fn address(node: &Value, kind: &str) -> String {
    let addresses = node.at("status").items("addresses");
    let found = addresses.iter().find(|address| address.text("type") == kind);
    found.map_or("<none>", |address| address.text("address")).to_owned()
}

/// Reads a field of an Event by its core or `events.k8s.io` name.
fn first_field<'a>(event: &'a Value, names: [&str; 2]) -> &'a Value {
    let [core, events] = names;
    if event.has(core) { event.at(core) } else { event.at(events) }
}

fn render_quota(quota: &Value, filter: fn(&str) -> bool) -> String {
    let status = quota.at("status");
    let amount = |value: &Value| value.as_str().unwrap_or("0").to_owned();
    let mut text = String::new();
    for (name, hard) in status.entries("hard").filter(|(name, _)| filter(name)) {
        let separator = if text.is_empty() { "" } else { ", " };
        let used = amount(status.at("used").at(name));
        let _ = write!(text, "{separator}{name}: {used}/{}", amount(hard));
    }
    text
}

fn healthy_condition(component: &Value) -> &Value {
    let conditions = component.items("conditions");
    conditions.iter().find(|condition| condition.text("type") == "Healthy").unwrap_or(&Value::Null)
}
