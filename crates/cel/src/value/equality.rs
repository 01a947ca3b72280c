//! Equality of values. Numbers are compared by value regardless of type. Lists of type set or map are
//! compared regardless of order.

use std::cmp::Ordering;

use super::{LibraryValue, List, Map, Value, from_json};
use crate::decl::{Decl, ListType};
use crate::eval::budget::MAX_STEPS;
use crate::types::Type;

impl<'a> Value<'a> {
    /// Whether two values are equal. Values of different types are not. `steps` counts the visited
    /// elements.
    pub(crate) fn equals(&self, other: &Value<'a>, steps: &mut u64) -> bool {
        *steps += 1;
        if *steps > MAX_STEPS {
            // The caller sees from `steps` that the limit was exceeded. A small value can contain the
            // same part very often.
            return false;
        }
        match (self, other) {
            (Value::Null, Value::Null) => true,
            (Value::Bool(a), Value::Bool(b)) => a == b,
            (Value::String(a), Value::String(b)) => {
                *steps += a.len().min(b.len()) as u64 / 64;
                a == b
            }
            (Value::Bytes(a), Value::Bytes(b)) => a == b,
            (Value::Duration(a), Value::Duration(b)) => a == b,
            (Value::Timestamp(a), Value::Timestamp(b)) => a == b,
            (Value::List(a), Value::List(b)) => equal_lists(a, b, steps),
            (Value::Map(a), Value::Map(b)) => equal_maps(a, b, steps),
            (Value::Optional(a), Value::Optional(b)) => match (a, b) {
                (None, None) => true,
                (Some(a), Some(b)) => a.equals(b, steps),
                _ => false,
            },
            (Value::Type(a), Value::Type(b)) => a.name() == b.name(),
            (Value::Library(a), Value::Library(b)) => equal_library_values(a, b),
            _ => compare_numbers(self, other) == Some(Ordering::Equal),
        }
    }
}

fn equal_lists<'a>(a: &List<'a>, b: &List<'a>, steps: &mut u64) -> bool {
    if a.len() != b.len() {
        return false;
    }
    match (a.list_type(), b.list_type()) {
        (ListType::Set, _) | (_, ListType::Set) => {
            a.iter().all(|item| b.iter().any(|other| item.equals(&other, steps)))
                && b.iter().all(|item| a.iter().any(|other| item.equals(&other, steps)))
        }
        (ListType::Map(keys), _) | (_, ListType::Map(keys)) => a.iter().all(|item| {
            b.iter().any(|other| same_element(&item, &other, keys, steps) && item.equals(&other, steps))
        }),
        _ => a.iter().zip(b.iter()).all(|(a, b)| a.equals(&b, steps)),
    }
}

/// Whether two elements of a list of type map have the same keys.
pub(crate) fn same_element<'a>(a: &Value<'a>, b: &Value<'a>, keys: &[String], steps: &mut u64) -> bool {
    let (Value::Map(a), Value::Map(b)) = (a, b) else { return false };
    keys.iter().all(|key| {
        let name = crate::escape::escape(key).unwrap_or_default();
        match (a.field(&name), b.field(&name)) {
            (Some(a), Some(b)) => a.equals(&b, steps),
            (None, None) => true,
            _ => false,
        }
    })
}

fn equal_maps<'a>(a: &Map<'a>, b: &Map<'a>, steps: &mut u64) -> bool {
    a.len() == b.len()
        && a.entries()
            .iter()
            .all(|(key, value)| b.property(key).is_some_and(|other| value.equals(&other, steps)))
}

impl<'a> Map<'a> {
    /// Looks up a key by its JSON name instead of the escaped one.
    fn property(&self, key: &Value<'a>) -> Option<Value<'a>> {
        match (self, key) {
            (Map::Json(entries, decl), Value::String(name)) => match &decl.ty {
                Type::Object(object) => {
                    let known = object.fields.values().find(|field| field.property == **name);
                    let decl = known.map_or(Decl::unknown(), |field| &field.decl);
                    entries.get(&**name).map(|value| from_json(value, decl))
                }
                _ => self.get(key),
            },
            _ => self.get(key),
        }
    }
}

fn equal_library_values(a: &LibraryValue<'_>, b: &LibraryValue<'_>) -> bool {
    match (a, b) {
        (LibraryValue::Quantity(a), LibraryValue::Quantity(b)) => a == b,
        (LibraryValue::Version(a), LibraryValue::Version(b)) => a.compare(b) == Ordering::Equal,
        (LibraryValue::Url(a), LibraryValue::Url(b)) => a == b,
        (LibraryValue::Ip(a), LibraryValue::Ip(b)) => a == b,
        (LibraryValue::Cidr(a), LibraryValue::Cidr(b)) => a == b,
        (LibraryValue::Format(a), LibraryValue::Format(b)) => a == b,
        _ => false,
    }
}

pub(super) fn compare_numbers(a: &Value<'_>, b: &Value<'_>) -> Option<Ordering> {
    match (a, b) {
        (Value::Int(a), Value::Int(b)) => Some(a.cmp(b)),
        (Value::Uint(a), Value::Uint(b)) => Some(a.cmp(b)),
        (Value::Double(a), Value::Double(b)) => a.partial_cmp(b),
        (Value::Int(a), Value::Uint(b)) => Some(i128::from(*a).cmp(&i128::from(*b))),
        (Value::Uint(a), Value::Int(b)) => Some(i128::from(*a).cmp(&i128::from(*b))),
        (Value::Double(a), Value::Int(b)) => compare_double_to_integer(*a, i128::from(*b)),
        (Value::Double(a), Value::Uint(b)) => compare_double_to_integer(*a, i128::from(*b)),
        (Value::Int(a), Value::Double(b)) => {
            compare_double_to_integer(*b, i128::from(*a)).map(Ordering::reverse)
        }
        (Value::Uint(a), Value::Double(b)) => {
            compare_double_to_integer(*b, i128::from(*a)).map(Ordering::reverse)
        }
        _ => None,
    }
}

fn compare_double_to_integer(a: f64, b: i128) -> Option<Ordering> {
    if a.is_nan() {
        return None;
    }
    // A double beyond this range is larger or smaller than every 64-bit integer.
    let bounded = a.clamp(-1e30, 1e30);
    let whole = bounded.trunc() as i128;
    Some(whole.cmp(&b).then_with(|| bounded.fract().partial_cmp(&0.0).unwrap_or(Ordering::Equal)))
}
