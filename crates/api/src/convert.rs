//! Converts kinds that are served in more than one group or version.
//!
//! Objects are stored in one version and converted in requests and responses. Fields of
//! `autoscaling/v2` that v1 lacks are kept in annotations, as upstream.

mod autoscaler;
mod event;
pub mod scale;

use serde_json::Value;

use crate::json::JsonExt;

/// Converts an object to another group and version. Kinds without a conversion only get another `apiVersion`.
pub fn convert(from: (&str, &str), to: (&str, &str), kind: &str, mut object: Value) -> Value {
    if from == to {
        return object;
    }
    match (from, to, kind) {
        (("autoscaling", "v1"), ("autoscaling", "v2"), "HorizontalPodAutoscaler") => {
            autoscaler::v1_to_v2(&mut object);
        }
        (("autoscaling", "v2"), ("autoscaling", "v1"), "HorizontalPodAutoscaler") => {
            autoscaler::v2_to_v1(&mut object);
        }
        (("events.k8s.io", "v1"), ("", "v1"), "Event") => event::to_core(&mut object),
        (("", "v1"), ("events.k8s.io", "v1"), "Event") => event::from_core(&mut object),
        _ => {
            object.set("apiVersion", api_version(to.0, to.1));
            return object;
        }
    }
    object.set("apiVersion", api_version(to.0, to.1));
    normalize(to, kind, object)
}

/// Normalizes an object as its new type: adds the fields without `omitempty` and drops other empty fields.
fn normalize((group, version): (&str, &str), kind: &str, object: Value) -> Value {
    let table = schema::kubernetes();
    let mut copy = object.clone();
    match table.type_by_kind(group, version, kind).map(|ty| schema::normalize(table, ty, &mut copy)) {
        Some(Ok(_)) => copy,
        _ => object,
    }
}

/// `apps/v1`, or `v1` for the core group.
pub fn api_version(group: &str, version: &str) -> String {
    if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") }
}

/// Removes and returns a field; `null` if it is absent.
fn take_field(object: &mut Value, field: &str) -> Value {
    object.as_object_mut().and_then(|map| map.remove(field)).unwrap_or(Value::Null)
}

/// Sets a field unless the value is `null`.
fn set_non_null(object: &mut Value, field: &str, value: Value) {
    if !value.is_null() {
        object.set(field, value);
    }
}

#[cfg(test)]
mod tests;
