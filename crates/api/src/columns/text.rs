//! Words that several kinds' cells share.

use jiff::Timestamp;
use serde_json::Value;

use super::row::AgeText;
use crate::json::JsonExt as _;
use crate::selector::LabelSelector;
use crate::time::parse_rfc3339;

/// How long ago, or `<unknown>` for no time at all.
pub fn since(time: &Value) -> AgeText {
    match timestamp(time) {
        Some(since) => AgeText { since: Some(since), ..AgeText::default() },
        None => "<unknown>".to_owned().into(),
    }
}

pub fn timestamp(time: &Value) -> Option<Timestamp> {
    parse_rfc3339(time.as_str()?)
}

/// Strings joined by commas.
pub fn join<'a>(items: impl Iterator<Item = &'a str>) -> String {
    items.collect::<Vec<_>>().join(",")
}

pub fn strings(list: &[Value]) -> impl Iterator<Item = &str> {
    list.iter().filter_map(Value::as_str)
}

/// Text, or these words where it is empty.
pub fn or_default(text: String, default: &str) -> String {
    if text.is_empty() { default.to_owned() } else { text }
}

/// At most `max` items, then how many more there are of `count`.
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

/// A LabelSelector as `a=1,!b,c in (x,y)`; `None` where it makes no sense.
pub fn selector(selector: &Value) -> Option<String> {
    LabelSelector::from_value(selector).ok().map(|selector| selector.to_string())
}

/// A LabelSelector in a cell of its own.
pub fn selector_cell(value: &Value) -> String {
    selector(value).map_or_else(|| "<error>".to_owned(), |text| or_default(text, "<none>"))
}

/// One field of every container, in order.
pub fn join_field<'a>(containers: &'a Value, field: &'a str) -> String {
    join(containers.as_array().into_iter().flatten().map(|container| container.text(field)))
}

/// The object's condition of this type, the first if there are several.
pub fn condition<'a>(obj: &'a Value, kind: &str) -> Option<&'a Value> {
    obj.at("status").items("conditions").iter().find(|condition| condition.text("type") == kind)
}

pub fn is_true(obj: &Value, kind: &str) -> bool {
    condition(obj, kind).is_some_and(|condition| condition.text("status") == "True")
}

pub fn is_deleting(obj: &Value) -> bool {
    obj.at("metadata").has("deletionTimestamp")
}

pub fn annotation<'a>(obj: &'a Value, name: &str) -> &'a str {
    obj.path("metadata.annotations").text(name)
}

/// `resource.group`, without the dot for the core group.
pub fn qualified(name: &str, group: &str) -> String {
    if group.is_empty() { name.to_owned() } else { format!("{name}.{group}") }
}

fn pair(key: &str, value: &Value) -> String {
    format!("{key}={}", value.as_str().unwrap_or(""))
}
