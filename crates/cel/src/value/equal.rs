//! When two values are equal. Numbers are by what they count, not by type; lists that a schema calls a set or a
//! map do not mind their order.

use std::cmp::Ordering;

use super::{Library, List, Map, Value, from_json};
use crate::decl::{Decl, ListType};
use crate::eval::budget::MOST_STEPS;
use crate::types::Type;

impl<'a> Value<'a> {
    /// Whether the two are equal; values of different types are not. `work` counts what had to be looked at.
    pub(crate) fn equals(&self, other: &Value<'a>, work: &mut u64) -> bool {
        *work += 1;
        if *work > MOST_STEPS {
            // The caller sees how much work it was. A value can hold the same part very many times over.
            return false;
        }
        match (self, other) {
            (Value::Null, Value::Null) => true,
            (Value::Bool(a), Value::Bool(b)) => a == b,
            (Value::String(a), Value::String(b)) => {
                *work += a.len().min(b.len()) as u64 / 64;
                a == b
            }
            (Value::Bytes(a), Value::Bytes(b)) => a == b,
            (Value::Duration(a), Value::Duration(b)) => a == b,
            (Value::Timestamp(a), Value::Timestamp(b)) => a == b,
            (Value::List(a), Value::List(b)) => lists(a, b, work),
            (Value::Map(a), Value::Map(b)) => maps(a, b, work),
            (Value::Optional(a), Value::Optional(b)) => match (a, b) {
                (None, None) => true,
                (Some(a), Some(b)) => a.equals(b, work),
                _ => false,
            },
            (Value::Type(a), Value::Type(b)) => a.name() == b.name(),
            (Value::Library(a), Value::Library(b)) => library(a, b),
            _ => compare_numbers(self, other) == Some(Ordering::Equal),
        }
    }
}

fn lists<'a>(a: &List<'a>, b: &List<'a>, work: &mut u64) -> bool {
    if a.len() != b.len() {
        return false;
    }
    match (a.list_type(), b.list_type()) {
        (ListType::Set, _) | (_, ListType::Set) => {
            a.iter().all(|item| b.iter().any(|other| item.equals(&other, work)))
                && b.iter().all(|item| a.iter().any(|other| item.equals(&other, work)))
        }
        (ListType::Map(keys), _) | (_, ListType::Map(keys)) => a.iter().all(|item| {
            b.iter().any(|other| same_element(&item, &other, keys, work) && item.equals(&other, work))
        }),
        _ => a.iter().zip(b.iter()).all(|(a, b)| a.equals(&b, work)),
    }
}

/// Whether two elements of a list of type map are the same element.
pub(crate) fn same_element<'a>(a: &Value<'a>, b: &Value<'a>, keys: &[String], work: &mut u64) -> bool {
    let (Value::Map(a), Value::Map(b)) = (a, b) else { return false };
    keys.iter().all(|key| {
        let name = crate::escape::escape(key).unwrap_or_default();
        match (a.field(&name), b.field(&name)) {
            (Some(a), Some(b)) => a.equals(&b, work),
            (None, None) => true,
            _ => false,
        }
    })
}

fn maps<'a>(a: &Map<'a>, b: &Map<'a>, work: &mut u64) -> bool {
    a.len() == b.len()
        && a.entries()
            .iter()
            .all(|(key, value)| b.property(key).is_some_and(|other| value.equals(&other, work)))
}

impl<'a> Map<'a> {
    /// By the name in JSON, not by the escaped one.
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

fn library(a: &Library<'_>, b: &Library<'_>) -> bool {
    match (a, b) {
        (Library::Quantity(a), Library::Quantity(b)) => a == b,
        (Library::Version(a), Library::Version(b)) => a.compare(b) == Ordering::Equal,
        (Library::Url(a), Library::Url(b)) => a == b,
        (Library::Ip(a), Library::Ip(b)) => a == b,
        (Library::Cidr(a), Library::Cidr(b)) => a == b,
        (Library::Format(a), Library::Format(b)) => a == b,
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
        (Value::Double(a), Value::Int(b)) => double_whole(*a, i128::from(*b)),
        (Value::Double(a), Value::Uint(b)) => double_whole(*a, i128::from(*b)),
        (Value::Int(a), Value::Double(b)) => double_whole(*b, i128::from(*a)).map(Ordering::reverse),
        (Value::Uint(a), Value::Double(b)) => double_whole(*b, i128::from(*a)).map(Ordering::reverse),
        _ => None,
    }
}

fn double_whole(a: f64, b: i128) -> Option<Ordering> {
    if a.is_nan() {
        return None;
    }
    // Far beyond 64 bits the exact value of `a` no longer matters.
    let clamped = a.clamp(-1e30, 1e30);
    let whole = clamped.trunc() as i128;
    Some(whole.cmp(&b).then_with(|| clamped.fract().partial_cmp(&0.0).unwrap_or(Ordering::Equal)))
}
