//! Lists in a strategic merge patch: merging by key or as sets, and ordering.
//!
//! Items are looked up in an index by key, so the cost is linear in the length of the list.

use std::collections::{HashMap, HashSet};

use schema::Table;
use serde_json::Value;

use super::{
    Level, MergeResult, Meta, Object, PATCH, SET_ORDER, bad_patch_type, field_name, internal, merge_map,
    no_merge_key, remove_directives, wrong_type,
};
use crate::go;

/// Merges the lists that have a `$setElementOrder` directive and returns their names.
pub(super) fn merge_ordered<'t, 'p>(
    table: &'t Table,
    level: Level<'t>,
    original: &mut Object,
    patch: &'p Object,
) -> MergeResult<HashSet<&'p str>> {
    let mut done = HashSet::new();
    for (key, order) in patch {
        if !key.starts_with(SET_ORDER) {
            continue;
        }
        let order = list(order)?;
        let name = field_name(key, SET_ORDER)?;
        let old = original.get(name).map(list).transpose()?.cloned();
        let new = patch.get(name).map(list).transpose()?;
        let meta = level.list(table, name)?;
        check_order(new.map_or(&[], Vec::as_slice), order, meta.merge_key)?;
        let merged = match (&old, new) {
            (None, None) => continue,
            (Some(old), None) => old.clone(),
            (None, Some(new)) => new.iter().filter_map(remove_directives).collect(),
            (Some(old), Some(new)) => merge_field(table, &meta, old.clone(), new, false)?,
        };
        let old = old.unwrap_or_default();
        let new = new.map_or(&[][..], Vec::as_slice);
        item_type(&old, new)?;
        let server = restore_deleted_items(old, new, meta.merge_key);
        let sorted = in_order(merged, order, &server, meta.merge_key)?;
        original.insert(name.to_owned(), Value::Array(sorted));
        done.insert(name);
    }
    Ok(done)
}

/// The server's order of a list with `$setElementOrder`. As upstream has it, new items are appended to
/// it only as far as deleted items have made room.
fn restore_deleted_items(old: Vec<Value>, new: &[Value], merge_key: &str) -> Vec<Value> {
    let directive = |word: &str| new.iter().any(|item| item.get(PATCH).is_some_and(|found| found == word));
    if !directive("delete") || directive("replace") {
        return old;
    }
    let length = old.len();
    let Ok((mut order, changes)) = directives(old.clone(), new, merge_key) else { return old };
    let mut known: HashSet<String> =
        order.iter().filter_map(|item| item.get(merge_key)).map(Value::to_string).collect();
    let added = changes.into_iter().filter(|item| {
        let key = item.get(merge_key).map(Value::to_string);
        key.is_some_and(|key| known.insert(key))
    });
    order.extend(added);
    order.truncate(length);
    order
}

/// Merges a list field.
pub(super) fn merge_field<'t>(
    table: &'t Table,
    meta: &Meta<'t>,
    old: Vec<Value>,
    new: &[Value],
    deletes: bool,
) -> MergeResult<Vec<Value>> {
    if !meta.strategy.merge && !deletes {
        return Ok(new.to_vec());
    }
    if old.is_empty() && new.is_empty() {
        return Ok(old);
    }
    if item_type(&old, new)? != ItemType::Maps {
        return if deletes { Ok(delete_items(old, new)) } else { union(old, new, meta.merge_key) };
    }
    if meta.merge_key.is_empty() {
        return Err(internal(format!("cannot merge lists without merge key for {}", meta.level.kind())));
    }
    let (server, changes) = directives(old, new, meta.merge_key)?;
    let merged = merge_items(table, meta, server.clone(), &changes)?;
    in_order(merged, &changes, &server, meta.merge_key)
}

#[derive(PartialEq)]
enum ItemType {
    Maps,
    Scalars,
}

/// The common type of the items. Different types and nested lists are errors.
fn item_type(old: &[Value], new: &[Value]) -> MergeResult<ItemType> {
    let mut items = old.iter().chain(new);
    let first = items.next().ok_or_else(|| internal("no elements in any of the given slices"))?;
    if first.is_array() {
        return Err(super::StrategicError::Unprocessable("lists of lists are not supported".to_owned()));
    }
    if items.any(|item| go::type_name(item) != go::type_name(first)) {
        let rendered = [old, new].map(|list| go::print(&Value::from(list.to_vec()))).join(" ");
        return Err(internal(format!("list element types are not identical: [{rendered}]")));
    }
    Ok(if first.is_object() { ItemType::Maps } else { ItemType::Scalars })
}

fn delete_items(old: Vec<Value>, deleted: &[Value]) -> Vec<Value> {
    let deleted: HashSet<String> = deleted.iter().map(Value::to_string).collect();
    old.into_iter().filter(|item| !deleted.contains(&item.to_string())).collect()
}

fn union(old: Vec<Value>, new: &[Value], merge_key: &str) -> MergeResult<Vec<Value>> {
    let mut seen = HashSet::new();
    let both = old.iter().chain(new).filter(|item| seen.insert(item.to_string())).cloned().collect();
    in_order(both, new, &old, merge_key)
}

/// Executes the items that are directives. Returns the remaining list and the remaining patch items.
fn directives(mut old: Vec<Value>, new: &[Value], merge_key: &str) -> MergeResult<(Vec<Value>, Vec<Value>)> {
    let mut changes = Vec::new();
    let mut deleted = HashSet::new();
    let mut replace = false;
    for item in new {
        let Some(fields) = item.as_object() else { continue };
        match fields.get(PATCH) {
            None => changes.push(item.clone()),
            Some(Value::String(directive)) if directive == "delete" => {
                deleted.insert(
                    fields.get(merge_key).ok_or_else(|| no_merge_key(fields, merge_key))?.to_string(),
                );
            }
            Some(Value::String(directive)) if directive == "replace" => replace = true,
            Some(Value::String(directive)) if directive == "merge" => {
                return Err(internal("merging lists cannot yet be specified in the patch"));
            }
            Some(other) => return Err(bad_patch_type(other, fields)),
        }
    }
    if replace {
        return Ok((changes, Vec::new()));
    }
    if !deleted.is_empty() {
        old.retain(|item| item.get(merge_key).is_none_or(|key| !deleted.contains(&key.to_string())));
    }
    Ok((old, changes))
}

fn merge_items<'t>(
    table: &'t Table,
    meta: &Meta<'t>,
    mut items: Vec<Value>,
    changes: &[Value],
) -> MergeResult<Vec<Value>> {
    let mut positions = HashMap::new();
    for (position, item) in items.iter().enumerate() {
        if let Some(key) = item.get(meta.merge_key) {
            positions.entry(key.to_string()).or_insert(position);
        }
    }
    for change in changes {
        let Some(fields) = change.as_object() else { continue };
        let key = fields.get(meta.merge_key).ok_or_else(|| no_merge_key(fields, meta.merge_key))?;
        match positions.get(&key.to_string()) {
            Some(&position) => {
                if let Value::Object(old) = items[position].take() {
                    items[position] = Value::Object(merge_map(table, meta.level, old, fields)?);
                }
            }
            None => {
                positions.insert(key.to_string(), items.len());
                items.push(change.clone());
            }
        }
    }
    Ok(items)
}

/// Sorts the items in `order` accordingly and inserts the others at their positions in the server's
/// order.
fn in_order(
    merged: Vec<Value>,
    order: &[Value],
    server: &[Value],
    merge_key: &str,
) -> MergeResult<Vec<Value>> {
    let maps = merged.first().or(order.first()).is_some_and(Value::is_object);
    if maps {
        for item in merged.iter().chain(order).chain(server) {
            let fields = item.as_object().ok_or_else(|| wrong_type("map[string]interface {}", item))?;
            if !fields.contains_key(merge_key) {
                return Err(no_merge_key(fields, merge_key));
            }
        }
    }
    let key =
        |item: &Value| if maps { item.get(merge_key).map(Value::to_string) } else { Some(item.to_string()) };
    let positions_by_key = |list: &[Value]| {
        let mut positions_by_key = HashMap::new();
        for (rank, item) in list.iter().enumerate() {
            positions_by_key.entry(key(item)).or_insert(rank);
        }
        positions_by_key
    };
    let (order, server) = (positions_by_key(order), positions_by_key(server));
    let with_order = merged.into_iter().map(|item| {
        let key = key(&item);
        (order.get(&key).copied(), server.get(&key).copied(), item)
    });
    let (mut named, mut others): (Vec<_>, Vec<_>) = with_order.partition(|(rank, ..)| rank.is_some());
    named.sort_by_key(|(rank, ..)| *rank);
    others.sort_by_key(|(_, rank, _)| rank.unwrap_or(usize::MAX));

    let mut named = named.into_iter().peekable();
    let mut others = others.into_iter().peekable();
    let mut sorted = Vec::new();
    while let (Some((_, right, _)), Some((_, left, _))) = (named.peek(), others.peek()) {
        let other_first = matches!((left, right), (Some(left), Some(right)) if left < right);
        sorted.extend(if other_first { others.next() } else { named.next() }.map(|(_, _, item)| item));
    }
    sorted.extend(named.chain(others).map(|(_, _, item)| item));
    Ok(sorted)
}

/// Checks that the patch's items are in the order of `$setElementOrder` and a subset of it.
fn check_order(new: &[Value], order: &[Value], merge_key: &str) -> MergeResult<()> {
    if new.is_empty() || order.is_empty() {
        return Ok(());
    }
    let mut left = new.iter().filter(|item| item.get(PATCH).is_none()).peekable();
    let mut ordered_items = order.iter();
    while let Some(item) = left.peek() {
        let Some(ordered_item) = ordered_items.next() else {
            let [new, order] = [new, order].map(|list| go::print(&Value::from(list.to_vec())));
            return Err(internal(format!(
                "The order in patch list:\n{new}\n doesn't match {SET_ORDER} list:\n{order}\n"
            )));
        };
        if key_of(item, merge_key)? == key_of(ordered_item, merge_key)? {
            left.next();
        }
    }
    Ok(())
}

fn key_of<'v>(item: &'v Value, merge_key: &str) -> MergeResult<&'v Value> {
    if merge_key.is_empty() {
        return Ok(item);
    }
    let fields = item.as_object().ok_or_else(|| wrong_type("map[string]interface {}", item))?;
    fields.get(merge_key).ok_or_else(|| no_merge_key(fields, merge_key))
}

fn list(value: &Value) -> MergeResult<&Vec<Value>> {
    match value {
        Value::Array(items) => Ok(items),
        other => Err(wrong_type("[]interface {}", other)),
    }
}
