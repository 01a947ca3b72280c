//! Removes the fields that a manager no longer applies.

use schema::ListType;
use serde_json::{Map, Value};

use super::field_set::{PathElement, Set};
use super::typed::{Atom, Fields, Typed, field_set};

/// Returns `merged` without the fields in `last`, the manager's previous set, that are not in `owned`,
/// the current sets of all managers.
pub(crate) fn prune(typed: Typed, merged: Value, last: &Set, owned: &Set) -> Value {
    if last.is_empty() {
        return merged;
    }
    let mut named_last = last.clone();
    ensure_named_fields_are_members(typed, &mut named_last);
    let mut all = field_set(typed, &merged);
    ensure_named_fields_are_members(typed, &mut all);

    // Fields that other managers own are kept, with the path to them.
    let mut keep = field_set(typed, &remove(typed, &merged, &named_last));
    keep.add(owned.clone());
    ensure_named_fields_are_members(typed, &mut keep);
    let mut to_remove = all.clone();
    to_remove.subtract(&keep);
    let pruned = remove(typed, &merged, &to_remove);

    // Fields below a removed parent that the manager did not own are kept, too.
    let mut left = field_set(typed, &pruned);
    ensure_named_fields_are_members(typed, &mut left);
    all.subtract(&left);
    remove(typed, &merged, &all.intersection(&named_last))
}

/// Makes struct fields members if anything below them is in the set.
fn ensure_named_fields_are_members(typed: Typed, set: &mut Set) {
    let atom = typed.atom(&Value::Null);
    for node in set.nodes_mut() {
        match (&atom, &node.element) {
            (Atom::Map(fields), PathElement::Field(name)) => {
                node.member |= fields.declared(name).is_some();
                ensure_named_fields_are_members(fields.child(name), &mut node.children);
            }
            (Atom::List { item, .. }, PathElement::Key(_)) => {
                ensure_named_fields_are_members(*item, &mut node.children)
            }
            _ => {}
        }
    }
}

/// Returns the value without the items in `to_remove`. A container that becomes empty is replaced by
/// null.
fn remove(typed: Typed, value: &Value, to_remove: &Set) -> Value {
    match (typed.atom(value), value) {
        (Atom::Scalar(_), _) => value.clone(),
        (Atom::List { item, kind }, Value::Array(items)) if *kind != ListType::Atomic => {
            let left: Vec<Value> = items
                .iter()
                .filter_map(|value| {
                    let node = item.item_key(kind, value).ok().and_then(|key| to_remove.get(&key).cloned());
                    match node {
                        Some(node) if node.member => None,
                        Some(node) => Some(remove(item, value, &node.children)),
                        None => Some(value.clone()),
                    }
                })
                .collect();
            if left.is_empty() { Value::Null } else { Value::Array(left) }
        }
        (Atom::Map(fields @ Fields { atomic: false, .. }), Value::Object(object)) => {
            let left: Map<String, Value> = object
                .iter()
                .filter_map(|(name, value)| match to_remove.field(name) {
                    Some(node) if node.member => None,
                    Some(node) => Some((name.clone(), remove(fields.child(name), value, &node.children))),
                    None => Some((name.clone(), value.clone())),
                })
                .collect();
            if left.is_empty() { Value::Null } else { Value::Object(left) }
        }
        _ => Value::Null,
    }
}

/// Removes nulls left by removed items and nulls from the configuration. Values without a schema keep
/// their nulls.
pub(crate) fn remove_null_values(typed: Typed, value: &mut Value) {
    match (typed.atom(value), value) {
        (Atom::Map(fields), Value::Object(object)) => {
            object.retain(|name, value| !value.is_null() || fields.child(name).is_deduced());
            for (name, value) in object {
                remove_null_values(fields.child(name), value);
            }
        }
        (Atom::List { item, kind }, Value::Array(items)) => {
            if *kind != ListType::Atomic {
                items.retain(|item| !item.is_null());
            }
            items.iter_mut().for_each(|value| remove_null_values(item, value));
        }
        _ => {}
    }
}

/// Adapts a set to the schema: where a type has become atomic, a manager of a part owns the whole
/// value.
pub(crate) fn reconcile_field_set_with_schema(typed: Typed, set: &mut Set) {
    let atom = typed.atom(&Value::Null);
    for node in set.nodes_mut() {
        let child = match (&atom, &node.element) {
            (Atom::Map(fields), PathElement::Field(name)) => fields.child(name),
            (Atom::List { item, .. }, _) => *item,
            _ => continue,
        };
        if node.children.is_empty() || child.is_deduced() {
            continue;
        }
        match child.atom(&Value::Null) {
            Atom::List { kind: ListType::Atomic, .. } | Atom::Map(Fields { atomic: true, .. }) => {
                node.children = Set::default();
                node.member = true;
            }
            _ => reconcile_field_set_with_schema(child, &mut node.children),
        }
    }
}
