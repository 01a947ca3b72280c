//! Operators on values, and `size`.

use std::cmp::Ordering;
use std::sync::Arc;

use super::{Cx, Native, no_such_overload};
use crate::decl::ListType;
use crate::eval::Evaluated;
use crate::eval::budget::Failure;
use crate::time;
use crate::value::{List, Map, Value, same_element};

pub(super) fn native(name: &str) -> Option<Native> {
    Some(match name {
        "!_" => |_, args| match args {
            [Value::Bool(value)] => Ok(Value::Bool(!value)),
            _ => no_such_overload(),
        },
        "-_" => |_, args| match args {
            [Value::Int(value)] => value.checked_neg().map(Value::Int).ok_or_else(int_overflow),
            [Value::Double(value)] => Ok(Value::Double(-value)),
            _ => no_such_overload(),
        },
        "_==_" => |cx, args| match args {
            [a, b] => cx.equal(a, b).map(Value::Bool),
            _ => no_such_overload(),
        },
        "_!=_" => |cx, args| match args {
            [a, b] => cx.equal(a, b).map(|equal| Value::Bool(!equal)),
            _ => no_such_overload(),
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
            _ => no_such_overload(),
        },
        _ => return None,
    })
}

fn int_overflow() -> Failure {
    Failure::error("integer overflow")
}

fn uint_overflow() -> Failure {
    Failure::error("unsigned integer overflow")
}

fn duration_overflow() -> Failure {
    Failure::error("duration overflow")
}

fn compare<'a>(args: &[Value<'a>], wanted: impl Fn(Ordering) -> bool) -> Evaluated<'a> {
    match args {
        [Value::Double(a), _] if a.is_nan() => Ok(Value::Bool(false)),
        [_, Value::Double(b)] if b.is_nan() => Ok(Value::Bool(false)),
        [a, b] => match a.compare(b) {
            Some(order) => Ok(Value::Bool(wanted(order))),
            None => no_such_overload(),
        },
        _ => no_such_overload(),
    }
}

pub(super) fn add<'a>(cx: &mut Cx, args: &[Value<'a>]) -> Evaluated<'a> {
    match args {
        [Value::Int(a), Value::Int(b)] => a.checked_add(*b).map(Value::Int).ok_or_else(int_overflow),
        [Value::Uint(a), Value::Uint(b)] => a.checked_add(*b).map(Value::Uint).ok_or_else(uint_overflow),
        [Value::Double(a), Value::Double(b)] => Ok(Value::Double(a + b)),
        [Value::String(a), Value::String(b)] => cx.text(format!("{}{}", &**a, &**b)),
        [Value::Bytes(a), Value::Bytes(b)] => {
            cx.meter.bytes(a.len() + b.len())?;
            Ok(Value::Bytes([&**a, &**b].concat().into()))
        }
        [Value::Duration(a), Value::Duration(b)] => {
            a.checked_add(*b).map(Value::Duration).ok_or_else(duration_overflow)
        }
        [Value::Timestamp(time), Value::Duration(by)] | [Value::Duration(by), Value::Timestamp(time)] => {
            moved(*time, *by)
        }
        [Value::List(a), Value::List(b)] => join(cx, a, b),
        _ => no_such_overload(),
    }
}

fn moved<'a>(time: jiff::Timestamp, by: i64) -> Evaluated<'a> {
    time.checked_add(jiff::SignedDuration::from_nanos(by))
        .ok()
        .and_then(time::in_range)
        .map(Value::Timestamp)
        .ok_or_else(|| Failure::error("timestamp overflow"))
}

/// Two lists in one. What a schema calls a set or a map has every element once, the later one replacing the
/// earlier.
fn join<'a>(cx: &mut Cx, a: &List<'a>, b: &List<'a>) -> Evaluated<'a> {
    if b.is_empty() {
        return Ok(Value::List(a.clone()));
    }
    cx.meter.values(a.len() + b.len())?;
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
        cx.meter.steps(work)?;
        match same {
            Some(index) => items[index] = item,
            None => items.push(item),
        }
    }
    Ok(Value::list(items))
}

fn subtract<'a>(_: &mut Cx, args: &[Value<'a>]) -> Evaluated<'a> {
    match args {
        [Value::Int(a), Value::Int(b)] => a.checked_sub(*b).map(Value::Int).ok_or_else(int_overflow),
        [Value::Uint(a), Value::Uint(b)] => a.checked_sub(*b).map(Value::Uint).ok_or_else(uint_overflow),
        [Value::Double(a), Value::Double(b)] => Ok(Value::Double(a - b)),
        [Value::Duration(a), Value::Duration(b)] => {
            a.checked_sub(*b).map(Value::Duration).ok_or_else(duration_overflow)
        }
        [Value::Timestamp(time), Value::Duration(by)] => {
            by.checked_neg().map_or_else(|| Err(duration_overflow()), |by| moved(*time, by))
        }
        [Value::Timestamp(a), Value::Timestamp(b)] => {
            let nanos = a.as_nanosecond() - b.as_nanosecond();
            i64::try_from(nanos).map(Value::Duration).map_err(|_| duration_overflow())
        }
        _ => no_such_overload(),
    }
}

fn multiply<'a>(_: &mut Cx, args: &[Value<'a>]) -> Evaluated<'a> {
    match args {
        [Value::Int(a), Value::Int(b)] => a.checked_mul(*b).map(Value::Int).ok_or_else(int_overflow),
        [Value::Uint(a), Value::Uint(b)] => a.checked_mul(*b).map(Value::Uint).ok_or_else(uint_overflow),
        [Value::Double(a), Value::Double(b)] => Ok(Value::Double(a * b)),
        _ => no_such_overload(),
    }
}

fn divide<'a>(_: &mut Cx, args: &[Value<'a>]) -> Evaluated<'a> {
    match args {
        [Value::Int(_), Value::Int(0)] | [Value::Uint(_), Value::Uint(0)] => {
            Err(Failure::error("division by zero"))
        }
        [Value::Int(a), Value::Int(b)] => a.checked_div(*b).map(Value::Int).ok_or_else(int_overflow),
        [Value::Uint(a), Value::Uint(b)] => Ok(Value::Uint(a / b)),
        [Value::Double(a), Value::Double(b)] => Ok(Value::Double(a / b)),
        _ => no_such_overload(),
    }
}

fn modulo<'a>(_: &mut Cx, args: &[Value<'a>]) -> Evaluated<'a> {
    match args {
        [Value::Int(_), Value::Int(0)] | [Value::Uint(_), Value::Uint(0)] => {
            Err(Failure::error("modulus by zero"))
        }
        [Value::Int(a), Value::Int(b)] => a.checked_rem(*b).map(Value::Int).ok_or_else(int_overflow),
        [Value::Uint(a), Value::Uint(b)] => Ok(Value::Uint(a % b)),
        _ => no_such_overload(),
    }
}

fn index<'a>(_: &mut Cx, args: &[Value<'a>]) -> Evaluated<'a> {
    match args {
        [Value::Optional(None), _] => Ok(Value::Optional(None)),
        [Value::Optional(Some(inner)), key] => Ok(Value::Optional(at(inner, key)?.map(Arc::new))),
        [from, key] => at(from, key)?.ok_or_else(|| match (from, key) {
            (Value::List(_), Value::Int(index)) => Failure::error(format!("index out of bounds: {index}")),
            (_, Value::String(key)) => Failure::error(format!("no such key: {}", &**key)),
            (_, key) => Failure::error(format!("no such key: {key:?}")),
        }),
        _ => no_such_overload(),
    }
}

fn optional_index<'a>(_: &mut Cx, args: &[Value<'a>]) -> Evaluated<'a> {
    match args {
        [Value::Optional(None), _] => Ok(Value::Optional(None)),
        [Value::Optional(Some(inner)), key] => Ok(Value::Optional(at(inner, key)?.map(Arc::new))),
        [from, key] => Ok(Value::Optional(at(from, key)?.map(Arc::new))),
        _ => no_such_overload(),
    }
}

fn at<'a>(from: &Value<'a>, key: &Value<'a>) -> Result<Option<Value<'a>>, Failure> {
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
            Err(Failure::error(format!("unsupported index type '{}' in list", key.type_of().name())))
        }
        (Value::Map(map @ Map::Json(..)), Value::String(_)) => Ok(map.get(key)),
        (Value::Map(map), key) => Ok(map.get(key)),
        _ => Err(Failure::error("no such overload")),
    }
}

pub(super) fn contains<'a>(cx: &mut Cx, args: &[Value<'a>]) -> Evaluated<'a> {
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
        _ => no_such_overload(),
    }
}
