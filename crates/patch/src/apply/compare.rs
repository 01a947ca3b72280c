//! Compares two values of one type and returns the differing fields.

use schema::ListType;
use serde_json::{Map, Value};

use super::field_set::{PathElement, Set, same};
use super::typed::{Atom, Fields, Typed};

#[derive(Debug, Default)]
pub(crate) struct Comparison {
    pub removed: Set,
    pub modified: Set,
    pub added: Set,
}

impl Comparison {
    pub fn is_empty(&self) -> bool {
        self.removed.is_empty() && self.modified.is_empty() && self.added.is_empty()
    }

    /// Removes the paths in `ignored` with everything below them.
    pub fn without_trees(mut self, ignored: &Set) -> Comparison {
        self.removed.subtract_trees(ignored);
        self.modified.subtract_trees(ignored);
        self.added.subtract_trees(ignored);
        self
    }

    fn attach(&mut self, element: impl Fn() -> PathElement, own: Option<Change>, below: Comparison) {
        let sets = [
            (&mut self.removed, Change::Removed, below.removed),
            (&mut self.modified, Change::Modified, below.modified),
            (&mut self.added, Change::Added, below.added),
        ];
        for (set, change, below) in sets {
            let member = own == Some(change);
            if member || !below.is_empty() {
                set.attach(element(), member, below);
            }
        }
    }
}

pub(crate) fn compare(typed: Typed, old: &Value, new: &Value) -> Comparison {
    let mut found = Comparison::default();
    walk(typed, Some(old), Some(new), &mut found);
    found
}

/// What happened to the value at a path itself, apart from its children.
#[derive(Clone, Copy, PartialEq)]
enum Change {
    Removed,
    Modified,
    Added,
}

fn walk(typed: Typed, old: Option<&Value>, new: Option<&Value>, out: &mut Comparison) -> Option<Change> {
    match (old, new) {
        (None, None) => None,
        (Some(old), Some(new)) if old == new => None,
        (Some(side), None) => {
            visit(typed.atom(side), old, new, out);
            Some(Change::Removed)
        }
        (None, Some(side)) => {
            visit(typed.atom(side), old, new, out);
            Some(Change::Added)
        }
        (Some(left), Some(right)) => {
            let change = visit(typed.atom(right), old, new, out);
            // Without a schema, the two values may be of different kinds and must be walked separately.
            if typed.is_deduced() && left.is_object() != right.is_object() {
                return visit(typed.atom(left), old, new, out).or(change);
            }
            change
        }
    }
}

fn visit(atom: Atom, old: Option<&Value>, new: Option<&Value>, out: &mut Comparison) -> Option<Change> {
    let leaf = || match (old, new) {
        (Some(old), Some(new)) if !same(old, new) => Some(Change::Modified),
        _ => None,
    };
    match atom {
        Atom::Opaque | Atom::Scalar(_) | Atom::List { kind: ListType::Atomic, .. } => leaf(),
        Atom::Map(Fields { atomic: true, .. }) => leaf(),
        Atom::Map(fields) => {
            let [old, new] =
                [old, new].map(|side| side.and_then(Value::as_object).filter(|map| !map.is_empty()));
            if old.is_none() && new.is_none() {
                return leaf();
            }
            compare_maps(fields, old, new, out);
            None
        }
        Atom::List { item, kind } => {
            let [old, new] =
                [old, new].map(|side| side.and_then(Value::as_array).map_or(&[][..], Vec::as_slice));
            if old.is_empty() && new.is_empty() {
                return leaf();
            }
            compare_lists(item, kind, old, new, out)
        }
    }
}

fn compare_maps(
    fields: Fields,
    old: Option<&Map<String, Value>>,
    new: Option<&Map<String, Value>>,
    out: &mut Comparison,
) {
    let mut visit = |name: &String, old: Option<&Value>, new: Option<&Value>| {
        let mut below = Comparison::default();
        let own = walk(fields.child(name), old, new, &mut below);
        out.attach(|| PathElement::Field(name.clone()), own, below);
    };
    let mut left = old.into_iter().flatten().peekable();
    let mut right = new.into_iter().flatten().peekable();
    loop {
        match (left.peek(), right.peek()) {
            (None, None) => return,
            (Some((a, _)), Some((b, _))) if a == b => {
                if let (Some((name, old)), Some((_, new))) = (left.next(), right.next()) {
                    visit(name, Some(old), Some(new));
                }
            }
            (Some((a, _)), b) if b.is_none_or(|(b, _)| a < b) => {
                if let Some((name, old)) = left.next() {
                    visit(name, Some(old), None);
                }
            }
            _ => {
                if let Some((name, new)) = right.next() {
                    visit(name, None, Some(new));
                }
            }
        }
    }
}

/// The items with one key on both sides, usually one each.
struct Item<'v> {
    key: PathElement,
    old: Vec<&'v Value>,
    new: Vec<&'v Value>,
}

fn compare_lists(
    item: Typed,
    kind: &ListType,
    old: &[Value],
    new: &[Value],
    out: &mut Comparison,
) -> Option<Change> {
    let values = old.iter().map(|value| (value, false)).chain(new.iter().map(|value| (value, true)));
    let values_by_key: Result<Vec<_>, String> =
        values.map(|(value, is_new)| Ok((item.item_key(kind, value)?, is_new, value))).collect();
    // If items have no valid keys, the list is compared as a single value.
    let Ok(mut values_by_key) = values_by_key else { return Some(Change::Modified) };
    values_by_key.sort_by(|a, b| a.0.cmp(&b.0));

    let mut groups: Vec<Item> = Vec::new();
    for (key, is_new, value) in values_by_key {
        if groups.last().is_none_or(|group| group.key != key) {
            groups.push(Item { key, old: vec![], new: vec![] });
        }
        if let Some(group) = groups.last_mut() {
            if is_new { &mut group.new } else { &mut group.old }.push(value);
        }
    }
    for Item { key, old, new } in groups {
        let mut below = Comparison::default();
        let own = match (old.as_slice(), new.as_slice()) {
            ([] | [_], [] | [_]) => walk(item, old.first().copied(), new.first().copied(), &mut below),
            ([_, _, ..], [_, _, ..]) => {
                let equal = old.len() == new.len() && old.iter().zip(&new).all(|(a, b)| same(a, b));
                (!equal).then_some(Change::Modified)
            }
            ([_, _, ..], _) => {
                let one = walk(item, None, new.first().copied(), &mut below);
                out.attach(|| key.clone(), one, Comparison::default());
                Some(Change::Removed)
            }
            (_, _) => {
                let one = walk(item, old.first().copied(), None, &mut below);
                out.attach(|| key.clone(), one, Comparison::default());
                Some(Change::Added)
            }
        };
        out.attach(|| key.clone(), own, below);
    }
    None
}
