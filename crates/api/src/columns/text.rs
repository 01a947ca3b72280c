//! Text shared by the cells of several kinds.

use jiff::Timestamp;
use serde_json::Value;

use super::row::AgeText;
use crate::json::JsonExt as _;
use crate::selector::LabelSelector;
use crate::time::parse_rfc3339;

/// An age; `<unknown>` without a time.
pub fn since(time: &Value) -> AgeText {
    match timestamp(time) {
        Some(since) => AgeText { since: Some(since), ..AgeText::default() },
        None => "<unknown>".to_owned().into(),
    }
}

pub fn timestamp(time: &Value) -> Option<Timestamp> {
    parse_rfc3339(time.as_str()?)
}

/// Joins strings with commas.
pub fn join<'a>(items: impl Iterator<Item = &'a str>) -> String {
    items.collect::<Vec<_>>().join(",")
}

pub fn strings(list: &[Value]) -> impl Iterator<Item = &str> {
    list.iter().filter_map(Value::as_str)
}

/// A default if the text is empty.
pub fn or_default(text: String, default: &str) -> String {
    if text.is_empty() { default.to_owned() } else { text }
}

/// Joins at most `max` items, and adds how many of the `count` items are left out.
pub fn join_limited(max: usize, items: &[String], count: usize, separator: &str) -> String {
    let rendered = items[..items.len().min(max)].join(separator);
    if count > max { format!("{rendered} + {} more...", count - max) } else { rendered }
}

/// A map of labels as `a=1,b=2`.
pub fn labels(map: &Value) -> String {
    let pairs: Vec<String> =
        map.as_object().into_iter().flatten().map(|(key, value)| pair(key, value)).collect();
    or_default(pairs.join(","), "<none>")
}

/// A LabelSelector as `a=1,!b,c in (x,y)`; `None` if it is invalid.
pub fn selector(selector: &Value) -> Option<String> {
    LabelSelector::from_value(selector).ok().map(|selector| selector.to_string())
}

/// The cell of a LabelSelector.
pub fn selector_cell(value: &Value) -> String {
    selector(value).map_or_else(|| "<error>".to_owned(), |text| or_default(text, "<none>"))
}

/// A field of every container, in order.
pub fn join_field<'a>(containers: &'a Value, field: &'a str) -> String {
    join(containers.as_array().into_iter().flatten().map(|container| container.text(field)))
}

/// The first condition of this type.
pub fn condition<'a>(obj: &'a Value, kind: &str) -> Option<&'a Value> {
    obj.at("status").items("conditions").iter().find(|condition| condition.text("type") == kind)
}

pub fn is_condition_true(obj: &Value, kind: &str) -> bool {
    condition(obj, kind).is_some_and(|condition| condition.text("status") == "True")
}

pub fn is_deleting(obj: &Value) -> bool {
    obj.at("metadata").has("deletionTimestamp")
}

pub fn annotation<'a>(obj: &'a Value, name: &str) -> &'a str {
    obj.path("metadata.annotations").text(name)
}

/// `resource.group`, or `resource` for the core group.
pub fn qualified(name: &str, group: &str) -> String {
    if group.is_empty() { name.to_owned() } else { format!("{name}.{group}") }
}

fn pair(key: &str, value: &Value) -> String {
    format!("{key}={}", value.as_str().unwrap_or(""))
}
