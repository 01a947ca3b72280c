//! Operators, and `size`.

use std::cmp::Ordering;
use std::sync::Arc;

use super::{EvalContext, FunctionOp, overload_error};
use crate::decl::ListType;
use crate::eval::EvalResult;
use crate::eval::budget::EvalError;
use crate::time;
use crate::value::{List, Map, Value, same_element};

pub(super) fn function_op(name: &str) -> Option<FunctionOp> {
    Some(match name {
        "!_" => |_, args| match args {
            [Value::Bool(value)] => Ok(Value::Bool(!value)),
            _ => overload_error(),
        },
        "-_" => |_, args| match args {
            [Value::Int(value)] => value.checked_neg().map(Value::Int).ok_or_else(int_overflow),
            [Value::Double(value)] => Ok(Value::Double(-value)),
            _ => overload_error(),
        },
        "_==_" => |cx, args| match args {
            [a, b] => cx.equal(a, b).map(Value::Bool),
            _ => overload_error(),
        },
        "_!=_" => |cx, args| match args {
            [a, b] => cx.equal(a, b).map(|equal| Value::Bool(!equal)),
            _ => overload_error(),
        },
        "_<_" => |_, args| compare(args, |order| order == Ordering::Less),
        "_<=_" => |_, args| compare(args, |order| order != Ordering::Greater),
        "_>_" => |_, args| compare(args, |order| order == Ordering::Greater),
        "_>=_" => |_, args| compare(args, |order| order != Ordering::Less),
        "_+_" => add,
        "_-_" => subtract,
        "_*_" => multiply,
        "_/_" => divide,
        "_%_" => modulo,
        "_[_]" => index,
        "_[?_]" => optional_index,
        "@in" => contains,
        "size" => |_, args| match args {
            [value @ (Value::String(_) | Value::Bytes(_) | Value::List(_) | Value::Map(_))] => {
                Ok(Value::Int(value.size() as i64))
            }
            _ => overload_error(),
        },
        _ => return None,
    })
}

fn int_overflow() -> EvalError {
    EvalError::new("integer overflow")
}

fn uint_overflow() -> EvalError {
    EvalError::new("unsigned integer overflow")
}

fn duration_overflow() -> EvalError {
    EvalError::new("duration overflow")
}

fn compare<'a>(args: &[Value<'a>], predicate: impl Fn(Ordering) -> bool) -> EvalResult<'a> {
    match args {
        [Value::Double(a), _] if a.is_nan() => Ok(Value::Bool(false)),
        [_, Value::Double(b)] if b.is_nan() => Ok(Value::Bool(false)),
        [a, b] => match a.compare(b) {
            Some(order) => Ok(Value::Bool(predicate(order))),
            None => overload_error(),
        },
        _ => overload_error(),
    }
}

pub(super) fn add<'a>(cx: &mut EvalContext, args: &[Value<'a>]) -> EvalResult<'a> {
    match args {
        [Value::Int(a), Value::Int(b)] => a.checked_add(*b).map(Value::Int).ok_or_else(int_overflow),
        [Value::Uint(a), Value::Uint(b)] => a.checked_add(*b).map(Value::Uint).ok_or_else(uint_overflow),
        [Value::Double(a), Value::Double(b)] => Ok(Value::Double(a + b)),
        [Value::String(a), Value::String(b)] => cx.text(format!("{}{}", &**a, &**b)),
        [Value::Bytes(a), Value::Bytes(b)] => {
            cx.cost_tracker.add_bytes(a.len() + b.len())?;
            Ok(Value::Bytes([&**a, &**b].concat().into()))
        }
        [Value::Duration(a), Value::Duration(b)] => {
            a.checked_add(*b).map(Value::Duration).ok_or_else(duration_overflow)
        }
        [Value::Timestamp(time), Value::Duration(by)] | [Value::Duration(by), Value::Timestamp(time)] => {
            add_to_timestamp(*time, *by)
        }
        [Value::List(a), Value::List(b)] => append_lists(cx, a, b),
        _ => overload_error(),
    }
}

fn add_to_timestamp<'a>(time: jiff::Timestamp, by: i64) -> EvalResult<'a> {
    time.checked_add(jiff::SignedDuration::from_nanos(by))
        .ok()
        .and_then(time::in_range)
        .map(Value::Timestamp)
        .ok_or_else(|| EvalError::new("timestamp overflow"))
}

/// Concatenates lists. In lists of type set or map every element is unique, and a later one replaces an
/// earlier one.
fn append_lists<'a>(cx: &mut EvalContext, a: &List<'a>, b: &List<'a>) -> EvalResult<'a> {
    if b.is_empty() {
        return Ok(Value::List(a.clone()));
    }
    cx.cost_tracker.add_values(a.len() + b.len())?;
    let mut items: Vec<Value<'a>> = a.iter().collect();
    let keys = match a.list_type() {
        ListType::Atomic => {
            items.extend(b.iter());
            return Ok(Value::list(items));
        }
        ListType::Set => None,
        ListType::Map(keys) => Some(keys),
    };
    for item in b.iter() {
        let mut work = 0;
        let same = items.iter().position(|known| match keys {
            Some(keys) => same_element(known, &item, keys, &mut work),
            None => known.equals(&item, &mut work),
        });
        cx.cost_tracker.add_steps(work)?;
        match same {
            Some(index) => items[index] = item,
            None => items.push(item),
        }
    }
    Ok(Value::list(items))
}

fn subtract<'a>(_: &mut EvalContext, args: &[Value<'a>]) -> EvalResult<'a> {
    match args {
        [Value::Int(a), Value::Int(b)] => a.checked_sub(*b).map(Value::Int).ok_or_else(int_overflow),
        [Value::Uint(a), Value::Uint(b)] => a.checked_sub(*b).map(Value::Uint).ok_or_else(uint_overflow),
        [Value::Double(a), Value::Double(b)] => Ok(Value::Double(a - b)),
        [Value::Duration(a), Value::Duration(b)] => {
            a.checked_sub(*b).map(Value::Duration).ok_or_else(duration_overflow)
        }
        [Value::Timestamp(time), Value::Duration(by)] => {
            by.checked_neg().map_or_else(|| Err(duration_overflow()), |by| add_to_timestamp(*time, by))
        }
        [Value::Timestamp(a), Value::Timestamp(b)] => {
            let nanos = a.as_nanosecond() - b.as_nanosecond();
            i64::try_from(nanos).map(Value::Duration).map_err(|_| duration_overflow())
        }
        _ => overload_error(),
    }
}

fn multiply<'a>(_: &mut EvalContext, args: &[Value<'a>]) -> EvalResult<'a> {
    match args {
        [Value::Int(a), Value::Int(b)] => a.checked_mul(*b).map(Value::Int).ok_or_else(int_overflow),
        [Value::Uint(a), Value::Uint(b)] => a.checked_mul(*b).map(Value::Uint).ok_or_else(uint_overflow),
        [Value::Double(a), Value::Double(b)] => Ok(Value::Double(a * b)),
        _ => overload_error(),
    }
}

fn divide<'a>(_: &mut EvalContext, args: &[Value<'a>]) -> EvalResult<'a> {
    match args {
        [Value::Int(_), Value::Int(0)] | [Value::Uint(_), Value::Uint(0)] => {
            Err(EvalError::new("division by zero"))
        }
        [Value::Int(a), Value::Int(b)] => a.checked_div(*b).map(Value::Int).ok_or_else(int_overflow),
        [Value::Uint(a), Value::Uint(b)] => Ok(Value::Uint(a / b)),
        [Value::Double(a), Value::Double(b)] => Ok(Value::Double(a / b)),
        _ => overload_error(),
    }
}

fn modulo<'a>(_: &mut EvalContext, args: &[Value<'a>]) -> EvalResult<'a> {
    match args {
        [Value::Int(_), Value::Int(0)] | [Value::Uint(_), Value::Uint(0)] => {
            Err(EvalError::new("modulus by zero"))
        }
        [Value::Int(a), Value::Int(b)] => a.checked_rem(*b).map(Value::Int).ok_or_else(int_overflow),
        [Value::Uint(a), Value::Uint(b)] => Ok(Value::Uint(a % b)),
        _ => overload_error(),
    }
}

fn index<'a>(_: &mut EvalContext, args: &[Value<'a>]) -> EvalResult<'a> {
    match args {
        [Value::Optional(None), _] => Ok(Value::Optional(None)),
        [Value::Optional(Some(inner)), key] => Ok(Value::Optional(find_element(inner, key)?.map(Arc::new))),
        [from, key] => find_element(from, key)?.ok_or_else(|| match (from, key) {
            (Value::List(_), Value::Int(index)) => EvalError::new(format!("index out of bounds: {index}")),
            (_, Value::String(key)) => EvalError::new(format!("no such key: {}", &**key)),
            (_, key) => EvalError::new(format!("no such key: {key:?}")),
        }),
        _ => overload_error(),
    }
}

fn optional_index<'a>(_: &mut EvalContext, args: &[Value<'a>]) -> EvalResult<'a> {
    match args {
        [Value::Optional(None), _] => Ok(Value::Optional(None)),
        [Value::Optional(Some(inner)), key] => Ok(Value::Optional(find_element(inner, key)?.map(Arc::new))),
        [from, key] => Ok(Value::Optional(find_element(from, key)?.map(Arc::new))),
        _ => overload_error(),
    }
}

fn find_element<'a>(from: &Value<'a>, key: &Value<'a>) -> Result<Option<Value<'a>>, EvalError> {
    match (from, key) {
        (Value::List(list), Value::Int(_) | Value::Uint(_) | Value::Double(_)) => {
            let index = match key {
                Value::Int(index) => usize::try_from(*index).ok(),
                Value::Uint(index) => usize::try_from(*index).ok(),
                Value::Double(index) if *index >= 0.0 && *index == index.trunc() => Some(*index as usize),
                _ => None,
            };
            Ok(index.and_then(|index| list.get(index)))
        }
        (Value::List(_), key) => {
            Err(EvalError::new(format!("unsupported index type '{}' in list", key.type_of().name())))
        }
        (Value::Map(map @ Map::Json(..)), Value::String(_)) => Ok(map.get(key)),
        (Value::Map(map), key) => Ok(map.get(key)),
        _ => Err(EvalError::new("no such overload")),
    }
}

pub(super) fn contains<'a>(cx: &mut EvalContext, args: &[Value<'a>]) -> EvalResult<'a> {
    match args {
        [item, Value::List(list)] => {
            for other in list.iter() {
                if cx.equal(item, &other)? {
                    return Ok(Value::Bool(true));
                }
            }
            Ok(Value::Bool(false))
        }
        [key, Value::Map(map)] => Ok(Value::Bool(map.get(key).is_some())),
        _ => overload_error(),
    }
}
