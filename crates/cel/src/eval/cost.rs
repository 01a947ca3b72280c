//! The cost of calls, which is charged before they are made. Counterpart: `interpreter/runtimecost.go`
//! in cel-go and `apiserver/pkg/cel/library/cost.go`.

use crate::eval::budget::{CostTracker, EvalError};
use crate::value::{LibraryValue, Value};

pub(crate) const STRING_TRAVERSAL_COST_FACTOR: f64 = 0.1;
pub(crate) const REGEX_STRING_LENGTH_COST_FACTOR: f64 = 0.25;
pub(crate) const LIST_CREATE_BASE_COST: u64 = 10;
pub(crate) const MAP_CREATE_BASE_COST: u64 = 30;
pub(crate) const STRUCT_CREATE_BASE_COST: u64 = 40;
/// The cost of a check by the authorizer. It limits an expression to two checks.
pub(crate) const AUTHORIZER_CHECK_COST: u64 = 350_000;
/// The length of the longest pattern of a named format.
pub(crate) const FORMAT_REGEX_LENGTH: u64 = 128;

pub(crate) fn scaled(size: u64, factor: f64) -> u64 {
    (size as f64 * factor).ceil() as u64
}

/// The cost of matching a string with a regular expression, given their lengths.
fn regex_match_cost(text: u64, pattern: u64) -> u64 {
    let text = ((1.0 + text as f64) * STRING_TRAVERSAL_COST_FACTOR).ceil() as u64;
    text.saturating_mul(scaled(pattern, REGEX_STRING_LENGTH_COST_FACTOR))
}

pub(crate) fn call_cost(
    function: &str,
    args: &[Value<'_>],
    cost_tracker: &mut CostTracker,
) -> Result<u64, EvalError> {
    let size = |index: usize| args.get(index).map_or(1, Value::size);
    Ok(match (function, args) {
        ("check", _) => AUTHORIZER_CHECK_COST,
        ("fieldSelector" | "labelSelector", [_, selector]) => {
            let length = selector.size();
            LIST_CREATE_BASE_COST
                + scaled(length, STRING_TRAVERSAL_COST_FACTOR)
                + scaled(length, 0.5) * (LIST_CREATE_BASE_COST + STRUCT_CREATE_BASE_COST)
        }
        ("isSorted" | "sum" | "max" | "min" | "indexOf" | "lastIndexOf", [first, ..]) => {
            value_walk_cost(first, cost_tracker, 0)?
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
        ) if matches!(first, Value::String(_)) => scaled(first.size(), STRING_TRAVERSAL_COST_FACTOR),
        ("string", [Value::Bytes(bytes)]) => scaled(bytes.len() as u64, STRING_TRAVERSAL_COST_FACTOR),
        ("ip", [Value::String(_)]) => scaled(size(0), STRING_TRAVERSAL_COST_FACTOR),
        ("ip.isCanonical", [first]) => scaled(first.size(), 2.0 * STRING_TRAVERSAL_COST_FACTOR),
        ("replace" | "split", [first, ..]) => scaled(first.size(), 2.0 * STRING_TRAVERSAL_COST_FACTOR),
        ("join", [Value::List(list), ..]) => {
            cost_tracker.add_steps(list.len() as u64)?;
            let separators = size(1).saturating_mul((list.len() as u64).saturating_sub(1));
            let between = if args.len() > 1 { separators } else { 0 };
            scaled(
                list.iter().map(|item| item.size()).sum::<u64>() + between,
                2.0 * STRING_TRAVERSAL_COST_FACTOR,
            )
        }
        ("find" | "findAll" | "matches", [text, pattern, ..]) => {
            regex_match_cost(text.size(), pattern.size())
        }
        ("containsIP", [_, other]) => {
            let text = if matches!(other, Value::String(_)) {
                scaled(size(1), STRING_TRAVERSAL_COST_FACTOR)
            } else {
                0
            };
            scaled(size(0) * 2, STRING_TRAVERSAL_COST_FACTOR) + text
        }
        ("containsCIDR", [_, other]) => {
            let text = if matches!(other, Value::String(_)) {
                scaled(size(1), STRING_TRAVERSAL_COST_FACTOR)
            } else {
                0
            };
            scaled(size(0) * 2, STRING_TRAVERSAL_COST_FACTOR)
                + scaled(size(0), STRING_TRAVERSAL_COST_FACTOR)
                + 1
                + text
        }
        ("validate", [_, text]) => regex_match_cost(text.size(), FORMAT_REGEX_LENGTH),
        ("_==_" | "_!=_", [Value::Library(_), _]) => 1,
        ("_==_" | "_!=_", [a, b]) => scaled(a.size().min(b.size()), STRING_TRAVERSAL_COST_FACTOR),
        ("_<_" | "_<=_" | "_>_" | "_>=_", [a @ (Value::String(_) | Value::Bytes(_)), b]) => {
            scaled(a.size().min(b.size()), STRING_TRAVERSAL_COST_FACTOR)
        }
        ("_+_", [a @ (Value::String(_) | Value::Bytes(_)), b]) => {
            scaled(a.size() + b.size(), STRING_TRAVERSAL_COST_FACTOR)
        }
        ("@in", [_, Value::List(list)]) => list.len() as u64,
        ("contains", [a, b]) => scaled(a.size(), STRING_TRAVERSAL_COST_FACTOR)
            .saturating_mul(scaled(b.size(), STRING_TRAVERSAL_COST_FACTOR)),
        ("slice", [_, Value::Int(start), Value::Int(end)]) => {
            allocation_cost(1, end.saturating_sub(*start).max(0) as u64)
        }
        ("lists.range", [Value::Int(count)]) => allocation_cost(1, (*count).max(0) as u64),
        ("reverse", [list]) => allocation_cost(1, list.size()),
        ("flatten", [list, rest @ ..]) => {
            let depth = match rest {
                [Value::Int(depth)] => (*depth).max(0) as u64,
                _ => 1,
            };
            allocation_cost(depth, list.size())
        }
        ("distinct" | "sort", [list]) | ("@sortByAssociatedKeys", [_, list]) => list_comparison_cost(list),
        ("sets.contains" | "sets.intersects", [a, b]) => 1 + a.size().saturating_mul(b.size()),
        ("sets.equivalent", [a, b]) => 1 + a.size().saturating_mul(b.size()).saturating_mul(2),
        _ => 1,
    })
}

fn allocation_cost(factor: u64, size: u64) -> u64 {
    size.saturating_mul(factor).saturating_add(1 + LIST_CREATE_BASE_COST)
}

/// The cost of comparing every element of a list with every other.
fn list_comparison_cost(list: &Value<'_>) -> u64 {
    let size = list.size();
    let text = match list {
        Value::List(list) => matches!(list.get(0), Some(Value::String(_) | Value::Bytes(_))),
        _ => false,
    };
    let pairs = size.saturating_mul(size);
    let factor = if text { 2.0 + STRING_TRAVERSAL_COST_FACTOR } else { 2.0 };
    ((pairs as f64 * factor) as u64).saturating_add(1 + LIST_CREATE_BASE_COST)
}

/// The cost of visiting everything in a value once.
fn value_walk_cost(value: &Value<'_>, cost_tracker: &mut CostTracker, depth: u32) -> Result<u64, EvalError> {
    cost_tracker.add_steps(1)?;
    Ok(match value {
        Value::String(text) => (text.len() as f64 * STRING_TRAVERSAL_COST_FACTOR) as u64,
        Value::Bytes(bytes) => (bytes.len() as f64 * STRING_TRAVERSAL_COST_FACTOR) as u64,
        _ if depth > 100 => 1,
        Value::List(list) => list.iter().try_fold(0u64, |sum, item| {
            Ok(sum.saturating_add(value_walk_cost(&item, cost_tracker, depth + 1)?))
        })?,
        Value::Map(map) => map.entries().iter().try_fold(0u64, |sum, (key, value)| {
            let entry = value_walk_cost(key, cost_tracker, depth + 1)?
                + value_walk_cost(value, cost_tracker, depth + 1)?;
            Ok(sum.saturating_add(entry))
        })?,
        Value::Library(LibraryValue::Quantity(_)) => 1,
        _ => 1,
    })
}
