//! What a call costs, known before it is made.

use crate::eval::budget::{Failure, Meter};
use crate::value::{Library, Value};

pub(crate) const TEXT: f64 = 0.1;
pub(crate) const REGEX: f64 = 0.25;
pub(crate) const LIST: u64 = 10;
pub(crate) const MAP: u64 = 30;
pub(crate) const STRUCT: u64 = 40;
/// A question to the authorizer: two of them fit into an expression.
pub(crate) const AUTHORIZATION: u64 = 350_000;
/// How long the longest pattern behind a named format is.
pub(crate) const FORMAT_REGEX: u64 = 128;

pub(crate) fn scaled(size: u64, factor: f64) -> u64 {
    (size as f64 * factor).ceil() as u64
}

/// Of applying a pattern of one length to a text of another.
fn matching(text: u64, pattern: u64) -> u64 {
    let text = ((1.0 + text as f64) * TEXT).ceil() as u64;
    text.saturating_mul(scaled(pattern, REGEX))
}

pub(crate) fn call(function: &str, args: &[Value<'_>], meter: &mut Meter) -> Result<u64, Failure> {
    let size = |index: usize| args.get(index).map_or(1, Value::size);
    Ok(match (function, args) {
        ("check", _) => AUTHORIZATION,
        ("fieldSelector" | "labelSelector", [_, selector]) => {
            let length = selector.size();
            LIST + scaled(length, TEXT) + scaled(length, 0.5) * (LIST + STRUCT)
        }
        ("isSorted" | "sum" | "max" | "min" | "indexOf" | "lastIndexOf", [first, ..]) => {
            traversal(first, meter, 0)?
        }
        (
            "url"
            | "lowerAscii"
            | "upperAscii"
            | "substring"
            | "trim"
            | "jsonpatch.escapeKey"
            | "cidr"
            | "isIP"
            | "isCIDR"
            | "quantity"
            | "isQuantity"
            | "semver"
            | "isSemver"
            | "startsWith"
            | "endsWith"
            | "bytes"
            | "strings.quote"
            | "format",
            [first, ..],
        ) if matches!(first, Value::String(_)) => scaled(first.size(), TEXT),
        ("string", [Value::Bytes(bytes)]) => scaled(bytes.len() as u64, TEXT),
        ("ip", [Value::String(_)]) => scaled(size(0), TEXT),
        ("ip.isCanonical", [first]) => scaled(first.size(), 2.0 * TEXT),
        ("replace" | "split", [first, ..]) => scaled(first.size(), 2.0 * TEXT),
        ("join", [Value::List(list), ..]) => {
            meter.steps(list.len() as u64)?;
            let separators = size(1).saturating_mul((list.len() as u64).saturating_sub(1));
            let between = if args.len() > 1 { separators } else { 0 };
            scaled(list.iter().map(|item| item.size()).sum::<u64>() + between, 2.0 * TEXT)
        }
        ("find" | "findAll" | "matches", [text, pattern, ..]) => matching(text.size(), pattern.size()),
        ("containsIP", [_, other]) => {
            let text = if matches!(other, Value::String(_)) { scaled(size(1), TEXT) } else { 0 };
            scaled(size(0) * 2, TEXT) + text
        }
        ("containsCIDR", [_, other]) => {
            let text = if matches!(other, Value::String(_)) { scaled(size(1), TEXT) } else { 0 };
            scaled(size(0) * 2, TEXT) + scaled(size(0), TEXT) + 1 + text
        }
        ("validate", [_, text]) => matching(text.size(), FORMAT_REGEX),
        ("_==_" | "_!=_", [Value::Library(_), _]) => 1,
        ("_==_" | "_!=_", [a, b]) => scaled(a.size().min(b.size()), TEXT),
        ("_<_" | "_<=_" | "_>_" | "_>=_", [a @ (Value::String(_) | Value::Bytes(_)), b]) => {
            scaled(a.size().min(b.size()), TEXT)
        }
        ("_+_", [a @ (Value::String(_) | Value::Bytes(_)), b]) => scaled(a.size() + b.size(), TEXT),
        ("@in", [_, Value::List(list)]) => list.len() as u64,
        ("contains", [a, b]) => scaled(a.size(), TEXT).saturating_mul(scaled(b.size(), TEXT)),
        ("slice", [_, Value::Int(start), Value::Int(end)]) => {
            allocating(1, end.saturating_sub(*start).max(0) as u64)
        }
        ("lists.range", [Value::Int(count)]) => allocating(1, (*count).max(0) as u64),
        ("reverse", [list]) => allocating(1, list.size()),
        ("flatten", [list, rest @ ..]) => {
            let depth = match rest {
                [Value::Int(depth)] => (*depth).max(0) as u64,
                _ => 1,
            };
            allocating(depth, list.size())
        }
        ("distinct" | "sort", [list]) | ("@sortByAssociatedKeys", [_, list]) => comparing(list),
        ("sets.contains" | "sets.intersects", [a, b]) => 1 + a.size().saturating_mul(b.size()),
        ("sets.equivalent", [a, b]) => 1 + a.size().saturating_mul(b.size()).saturating_mul(2),
        _ => 1,
    })
}

fn allocating(factor: u64, size: u64) -> u64 {
    size.saturating_mul(factor).saturating_add(1 + LIST)
}

/// Of comparing every element with every other.
fn comparing(list: &Value<'_>) -> u64 {
    let size = list.size();
    let text = match list {
        Value::List(list) => matches!(list.get(0), Some(Value::String(_) | Value::Bytes(_))),
        _ => false,
    };
    let pairs = size.saturating_mul(size);
    let factor = if text { 2.0 + TEXT } else { 2.0 };
    ((pairs as f64 * factor) as u64).saturating_add(1 + LIST)
}

/// Of looking at everything in a value once.
fn traversal(value: &Value<'_>, meter: &mut Meter, depth: u32) -> Result<u64, Failure> {
    meter.steps(1)?;
    Ok(match value {
        Value::String(text) => (text.len() as f64 * TEXT) as u64,
        Value::Bytes(bytes) => (bytes.len() as f64 * TEXT) as u64,
        _ if depth > 100 => 1,
        Value::List(list) => list
            .iter()
            .try_fold(0u64, |sum, item| Ok(sum.saturating_add(traversal(&item, meter, depth + 1)?)))?,
        Value::Map(map) => map.entries().iter().try_fold(0u64, |sum, (key, value)| {
            let entry = traversal(key, meter, depth + 1)? + traversal(value, meter, depth + 1)?;
            Ok(sum.saturating_add(entry))
        })?,
        Value::Library(Library::Quantity(_)) => 1,
        _ => 1,
    })
}
