//! Merges an applied configuration into the live object.

use std::collections::BTreeMap;

use schema::ListType;
use serde_json::{Map, Value};

use super::field_set::PathElement;
use super::typed::{Atom, Fields, Typed};

/// Returns the live value with `config` merged into it.
pub(crate) fn merge(typed: Typed, live: &Value, config: &Value) -> Result<Value, String> {
    // The walk follows the kind of the configured value: without a schema, a value of another kind
    // replaces the live one.
    match typed.atom(config) {
        Atom::Opaque | Atom::Scalar(_) | Atom::List { kind: ListType::Atomic, .. } => Ok(config.clone()),
        Atom::Map(Fields { atomic: true, .. }) => Ok(config.clone()),
        Atom::Map(fields) => match (live.as_object(), config.as_object()) {
            (Some(live), Some(config)) if !live.is_empty() => merge_maps(fields, live, config),
            // A null in place of an object removes nothing.
            (Some(map), None) if !map.is_empty() => Ok(live.clone()),
            _ => Ok(config.clone()),
        },
        Atom::List { item, kind } => match (live.as_array(), config.as_array()) {
            (Some(live), Some(config)) if !live.is_empty() => merge_lists(item, kind, live, config),
            (Some(list), None) if !list.is_empty() => Ok(live.clone()),
            _ => Ok(config.clone()),
        },
    }
}

fn merge_maps(
    fields: Fields,
    live: &Map<String, Value>,
    config: &Map<String, Value>,
) -> Result<Value, String> {
    let mut out = live.clone();
    for (name, value) in config {
        let merged = match live.get(name) {
            Some(old) => merge(fields.child(name), old, value)
                .map_err(|e| format!(".{name}{}{e}", if e.starts_with(['.', '[']) { "" } else { ": " }))?,
            None => value.clone(),
        };
        out.insert(name.clone(), merged);
    }
    Ok(Value::Object(out))
}

fn keys(item: Typed, kind: &ListType, items: &[Value]) -> Result<Vec<PathElement>, String> {
    let indexed = items.iter().enumerate();
    indexed.map(|(at, value)| item.item_key(kind, value).map_err(|e| format!("element {at}: {e}"))).collect()
}

/// Merges lists. Configured items keep their order among themselves, and so do live-only items, which
/// stay in place relative to the items that both lists have.
fn merge_lists(item: Typed, kind: &ListType, live: &[Value], config: &[Value]) -> Result<Value, String> {
    let right = keys(item, kind, config)?;
    let left = keys(item, kind, live)?;
    let mut of_config: BTreeMap<&PathElement, &Value> = BTreeMap::new();
    for (key, value) in right.iter().zip(config) {
        if of_config.insert(key, value).is_some() {
            return Err(format!("duplicate entries for key {key}"));
        }
    }
    let mut of_live: BTreeMap<&PathElement, &Value> = BTreeMap::new();
    for (key, value) in left.iter().zip(live) {
        // Live items with duplicate keys are replaced by the configured one.
        of_live.entry(key).and_modify(|value| *value = &Value::Null).or_insert(value);
    }
    let both = |key: &PathElement| -> Result<Value, String> {
        let config = of_config.get(key).copied().unwrap_or(&Value::Null);
        match of_live.get(key).copied() {
            Some(live) => merge(item, live, config),
            None => Ok(config.clone()),
        }
    };

    let mut out = Vec::with_capacity(live.len().max(config.len()));
    let mut shared = right.iter().filter(|key| of_live.contains_key(*key)).peekable();
    let mut merged_keys = std::collections::BTreeSet::new();
    let (mut l, mut r) = (0, 0);
    while l < left.len() || r < right.len() {
        if let (Some(a), Some(b)) = (left.get(l), right.get(r)) {
            if a == b {
                merged_keys.insert(a);
                out.push(both(a)?);
                (l, r) = (l + 1, r + 1);
                shared.next();
                continue;
            }
            // The item is shared but comes later in the configuration, so it is placed there.
            if of_config.contains_key(a) && shared.peek().is_some_and(|next| *next != a) {
                l += 1;
                continue;
            }
        }
        if let Some(a) = left.get(l) {
            if !of_config.contains_key(a) {
                out.push(live[l].clone());
                l += 1;
                continue;
            }
            if merged_keys.contains(a) {
                l += 1;
            }
        }
        if let Some(b) = right.get(r) {
            merged_keys.insert(b);
            out.push(both(b)?);
            r += 1;
            if shared.peek() == Some(&b) {
                shared.next();
            }
        }
    }
    Ok(Value::Array(out))
}
