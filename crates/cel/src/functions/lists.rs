//! The lists and sets libraries.

use std::cmp::Ordering;
use std::sync::Arc;

use super::{EvalContext, FunctionOp, contains, operators, overload_error, strings};
use crate::eval::EvalResult;
use crate::eval::budget::EvalError;
use crate::value::{Key, List, Map, Value};

pub(super) fn function_op(name: &str) -> Option<FunctionOp> {
    Some(match name {
        "isSorted" => is_sorted,
        "sum" => sum,
        "max" => |_, args| min_or_max(args, "max", Ordering::Greater),
        "min" => |_, args| min_or_max(args, "min", Ordering::Less),
        "indexOf" => |cx, args| index_of(cx, args, false),
        "lastIndexOf" => |cx, args| index_of(cx, args, true),
        "slice" => slice,
        "flatten" => |cx, args| match args {
            [Value::List(list)] => flatten(cx, list, 1),
            [Value::List(_), Value::Int(depth)] if *depth < 0 => {
                Err(EvalError::new("level must be non-negative"))
            }
            [Value::List(list), Value::Int(depth)] => flatten(cx, list, *depth),
            _ => overload_error(),
        },
        "sort" => |cx, args| match args {
            [Value::List(list)] => sort(cx, list, list),
            _ => overload_error(),
        },
        "@sortByAssociatedKeys" => |cx, args| match args {
            [Value::List(list), Value::List(keys)] => sort(cx, list, keys),
            _ => overload_error(),
        },
        "lists.range" => |cx, args| match args {
            [Value::Int(count)] => {
                cx.cost_tracker.add_values((*count).max(0) as usize)?;
                Ok(Value::list((0..*count).map(Value::Int).collect()))
            }
            _ => overload_error(),
        },
        "reverse" => |cx, args| match args {
            [Value::List(list)] => {
                cx.cost_tracker.add_values(list.len())?;
                let mut items: Vec<Value<'_>> = list.iter().collect();
                items.reverse();
                Ok(Value::list(items))
            }
            _ => overload_error(),
        },
        "distinct" => distinct,
        "sets.contains" => |cx, args| match args {
            [Value::List(list), Value::List(part)] => contains_all(cx, list, part).map(Value::Bool),
            _ => overload_error(),
        },
        "sets.equivalent" => |cx, args| match args {
            [Value::List(a), Value::List(b)] => {
                Ok(Value::Bool(contains_all(cx, a, b)? && contains_all(cx, b, a)?))
            }
            _ => overload_error(),
        },
        "sets.intersects" => |cx, args| match args {
            [Value::List(a), b @ Value::List(_)] => {
                for item in a.iter() {
                    if contains(cx, &item, b)?.as_bool() == Some(true) {
                        return Ok(Value::Bool(true));
                    }
                }
                Ok(Value::Bool(false))
            }
            _ => overload_error(),
        },
        "cel.@mapInsert" => insert,
        _ => return None,
    })
}

fn is_sorted<'a>(_: &mut EvalContext, args: &[Value<'a>]) -> EvalResult<'a> {
    let [Value::List(list)] = args else { return overload_error() };
    let mut before: Option<Value<'a>> = None;
    for item in list.iter() {
        if before.as_ref().is_some_and(|before| before.compare(&item) == Some(Ordering::Greater)) {
            return Ok(Value::Bool(false));
        }
        before = Some(item);
    }
    Ok(Value::Bool(true))
}

fn sum<'a>(cx: &mut EvalContext, args: &[Value<'a>]) -> EvalResult<'a> {
    let [Value::List(list)] = args else { return overload_error() };
    let mut total = match list.get(0) {
        None | Some(Value::Int(_)) => Value::Int(0),
        Some(Value::Uint(_)) => Value::Uint(0),
        Some(Value::Double(_)) => Value::Double(0.0),
        Some(Value::Duration(_)) => Value::Duration(0),
        _ => return overload_error(),
    };
    for item in list.iter() {
        total = operators::add(cx, &[total, item])?;
    }
    Ok(total)
}

fn min_or_max<'a>(args: &[Value<'a>], name: &str, ordering: Ordering) -> EvalResult<'a> {
    let [Value::List(list)] = args else { return overload_error() };
    let mut best: Option<Value<'a>> = None;
    for item in list.iter() {
        match best.as_ref().map(|best| item.compare(best)) {
            None => best = Some(item),
            Some(Some(order)) if order == ordering => best = Some(item),
            Some(Some(_)) => {}
            Some(None) => return overload_error(),
        }
    }
    best.ok_or_else(|| EvalError::new(format!("{name} called on empty list")))
}

fn index_of<'a>(cx: &mut EvalContext, args: &[Value<'a>], last: bool) -> EvalResult<'a> {
    let (list, item) = match args {
        [Value::String(text), Value::String(part)] => {
            return strings::index_of(text, part, None, last).map(Value::Int);
        }
        [Value::String(text), Value::String(part), Value::Int(offset)] => {
            return strings::index_of(text, part, Some(*offset), last).map(Value::Int);
        }
        [Value::List(list), item] => (list, item),
        _ => return overload_error(),
    };
    let mut found = -1;
    for (index, other) in list.iter().enumerate() {
        if cx.equal(&other, item)? {
            found = index as i64;
            if !last {
                break;
            }
        }
    }
    Ok(Value::Int(found))
}

fn slice<'a>(cx: &mut EvalContext, args: &[Value<'a>]) -> EvalResult<'a> {
    let [Value::List(list), Value::Int(start), Value::Int(end)] = args else { return overload_error() };
    let wrong = |words: String| Err(EvalError::new(format!("cannot slice({start}, {end}), {words}")));
    if *start < 0 || *end < 0 {
        return wrong("negative indexes not supported".to_owned());
    }
    if start > end {
        return wrong("start index must be less than or equal to end index".to_owned());
    }
    if (list.len() as i64) < *end {
        return wrong(format!("list is length {}", list.len()));
    }
    cx.cost_tracker.add_values((end - start) as usize)?;
    Ok(Value::list((*start..*end).filter_map(|index| list.get(index as usize)).collect()))
}

fn flatten<'a>(cx: &mut EvalContext, list: &List<'a>, depth: i64) -> EvalResult<'a> {
    let mut items: Vec<Value<'a>> = list.iter().collect();
    // One level per iteration. There cannot be more levels than values, so a large depth costs nothing.
    for _ in 0..depth {
        cx.cost_tracker.add_values(items.len())?;
        if !items.iter().any(|item| matches!(item, Value::List(_))) {
            break;
        }
        let mut flat = Vec::with_capacity(items.len());
        for item in items {
            match item {
                Value::List(inner) => {
                    cx.cost_tracker.add_values(inner.len())?;
                    flat.extend(inner.iter());
                }
                other => flat.push(other),
            }
        }
        items = flat;
    }
    Ok(Value::list(items))
}

fn sort<'a>(cx: &mut EvalContext, list: &List<'a>, keys: &List<'a>) -> EvalResult<'a> {
    if list.len() != keys.len() {
        return Err(EvalError::new(format!(
            "@sortByAssociatedKeys() expected a list of the same size as the associated keys list, but got {} and {} elements respectively",
            list.len(),
            keys.len()
        )));
    }
    cx.cost_tracker.add_values(list.len() * 2)?;
    let mut pairs: Vec<(Value<'a>, Value<'a>)> = keys.iter().zip(list.iter()).collect();
    let mut comparable = true;
    let mut same_type = true;
    if let Some((first, _)) = pairs.first().cloned() {
        comparable = first.compare(&first).is_some() || matches!(first, Value::Double(_));
        same_type = pairs.iter().all(|(key, _)| key.type_of() == first.type_of());
    }
    if !comparable {
        return Err(EvalError::new("list elements must be comparable"));
    }
    if !same_type {
        return Err(EvalError::new("list elements must have the same type"));
    }
    pairs.sort_by(|(a, _), (b, _)| match (a, b) {
        (Value::Double(a), Value::Double(b)) => a.total_cmp(b),
        _ => a.compare(b).unwrap_or(Ordering::Equal),
    });
    Ok(Value::list(pairs.into_iter().map(|(_, item)| item).collect()))
}

fn distinct<'a>(cx: &mut EvalContext, args: &[Value<'a>]) -> EvalResult<'a> {
    let [Value::List(list)] = args else { return overload_error() };
    cx.cost_tracker.add_values(list.len())?;
    let mut items: Vec<Value<'a>> = Vec::new();
    for item in list.iter() {
        let mut known = false;
        for other in &items {
            if cx.equal(other, &item)? {
                known = true;
                break;
            }
        }
        if !known {
            items.push(item);
        }
    }
    Ok(Value::list(items))
}

fn contains_all<'a>(cx: &mut EvalContext, list: &List<'a>, part: &List<'a>) -> Result<bool, EvalError> {
    let list = Value::List(list.clone());
    for item in part.iter() {
        if contains(cx, &item, &list)?.as_bool() != Some(true) {
            return Ok(false);
        }
    }
    Ok(true)
}

fn insert<'a>(cx: &mut EvalContext, args: &[Value<'a>]) -> EvalResult<'a> {
    let (Value::Map(map), more) = (match args {
        [map, Value::Map(more)] => (map, more.entries()),
        [map, key, value] => (map, vec![(key.clone(), value.clone())]),
        _ => return overload_error(),
    }) else {
        return overload_error();
    };
    cx.cost_tracker.add_values((map.len() + more.len()) * 2)?;
    let mut entries = match map {
        Map::Shared(entries) => entries.as_ref().clone(),
        other => {
            other.entries().iter().filter_map(|(key, value)| Some((Key::of(key)?, value.clone()))).collect()
        }
    };
    for (key, value) in more {
        let Some(map_key) = Key::of(&key) else { return overload_error() };
        if entries.insert(map_key, value).is_some() {
            return Err(EvalError::new(format!("insert failed: key {key:?} already exists")));
        }
    }
    Ok(Value::Map(Map::Shared(Arc::new(entries))))
}
