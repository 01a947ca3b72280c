//! Taking away what an applier stopped setting.

use schema::ListKind;
use serde_json::{Map, Value};

use super::fieldset::{PathElement, Set};
use super::typed::{Atom, Fields, Typed, field_set};

/// `merged` without the fields in `last`, the set applied before, that neither the new set nor anyone else
/// owns. `owned` is what all owners together have now.
pub(crate) fn prune(typed: Typed, merged: Value, last: &Set, owned: &Set) -> Value {
    if last.is_empty() {
        return merged;
    }
    let mut named_last = last.clone();
    name_parents(typed, &mut named_last);
    let mut all = field_set(typed, &merged);
    name_parents(typed, &mut all);

    // What others own comes back, with what leads to it.
    let mut keep = field_set(typed, &remove(typed, &merged, &named_last));
    keep.add(owned.clone());
    name_parents(typed, &mut keep);
    let mut gone = all.clone();
    gone.subtract(&keep);
    let pruned = remove(typed, &merged, &gone);

    // And so does what hung on a removed parent but was never the applier's.
    let mut left = field_set(typed, &pruned);
    name_parents(typed, &mut left);
    all.subtract(&left);
    remove(typed, &merged, &all.intersection(&named_last))
}

/// Makes every struct field on the way to a member a member too.
fn name_parents(typed: Typed, set: &mut Set) {
    let atom = typed.atom(&Value::Null);
    for node in set.nodes_mut() {
        match (&atom, &node.element) {
            (Atom::Map(fields), PathElement::Field(name)) => {
                node.member |= fields.declared(name).is_some();
                name_parents(fields.child(name), &mut node.children);
            }
            (Atom::List { item, .. }, PathElement::Key(_)) => name_parents(*item, &mut node.children),
            _ => {}
        }
    }
}

/// The value without the items in `gone`. A container left empty becomes null.
fn remove(typed: Typed, value: &Value, gone: &Set) -> Value {
    match (typed.atom(value), value) {
        (Atom::Scalar(_), _) => value.clone(),
        (Atom::List { item, kind }, Value::Array(items)) if *kind != ListKind::Atomic => {
            let left: Vec<Value> = items
                .iter()
                .filter_map(|value| {
                    let node = item.item_key(kind, value).ok().and_then(|key| gone.get(&key).cloned());
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
                .filter_map(|(name, value)| match gone.field(name) {
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

/// Drops the nulls that removing left behind, and those a config carried; values without a schema keep theirs.
pub(crate) fn drop_nulls(typed: Typed, value: &mut Value) {
    match (typed.atom(value), value) {
        (Atom::Map(fields), Value::Object(object)) => {
            object.retain(|name, value| !value.is_null() || fields.child(name).is_free());
            for (name, value) in object {
                drop_nulls(fields.child(name), value);
            }
        }
        (Atom::List { item, kind }, Value::Array(items)) => {
            if *kind != ListKind::Atomic {
                items.retain(|item| !item.is_null());
            }
            items.iter_mut().for_each(|value| drop_nulls(item, value));
        }
        _ => {}
    }
}

/// Where the schema has since become atomic, owning a part means owning the whole.
pub(crate) fn settle(typed: Typed, set: &mut Set) {
    let atom = typed.atom(&Value::Null);
    for node in set.nodes_mut() {
        let child = match (&atom, &node.element) {
            (Atom::Map(fields), PathElement::Field(name)) => fields.child(name),
            (Atom::List { item, .. }, _) => *item,
            _ => continue,
        };
        if node.children.is_empty() || child.is_free() {
            continue;
        }
        match child.atom(&Value::Null) {
            Atom::List { kind: ListKind::Atomic, .. } | Atom::Map(Fields { atomic: true, .. }) => {
                node.children = Set::default();
                node.member = true;
            }
            _ => settle(child, &mut node.children),
        }
    }
}
