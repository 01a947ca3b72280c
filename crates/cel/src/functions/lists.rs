//! Lists and sets.

use std::cmp::Ordering;
use std::sync::Arc;

use super::{Cx, Native, contains, no_such_overload, operators, strings};
use crate::eval::Evaluated;
use crate::eval::budget::Failure;
use crate::value::{Key, List, Map, Value};

pub(super) fn native(name: &str) -> Option<Native> {
    Some(match name {
        "isSorted" => is_sorted,
        "sum" => sum,
        "max" => |_, args| extreme(args, "max", Ordering::Greater),
        "min" => |_, args| extreme(args, "min", Ordering::Less),
        "indexOf" => |cx, args| index_of(cx, args, false),
        "lastIndexOf" => |cx, args| index_of(cx, args, true),
        "slice" => slice,
        "flatten" => |cx, args| match args {
            [Value::List(list)] => flatten(cx, list, 1),
            [Value::List(_), Value::Int(depth)] if *depth < 0 => {
                Err(Failure::error("level must be non-negative"))
            }
            [Value::List(list), Value::Int(depth)] => flatten(cx, list, *depth),
            _ => no_such_overload(),
        },
        "sort" => |cx, args| match args {
            [Value::List(list)] => sort(cx, list, list),
            _ => no_such_overload(),
        },
        "@sortByAssociatedKeys" => |cx, args| match args {
            [Value::List(list), Value::List(keys)] => sort(cx, list, keys),
            _ => no_such_overload(),
        },
        "lists.range" => |cx, args| match args {
            [Value::Int(count)] => {
                cx.meter.values((*count).max(0) as usize)?;
                Ok(Value::list((0..*count).map(Value::Int).collect()))
            }
            _ => no_such_overload(),
        },
        "reverse" => |cx, args| match args {
            [Value::List(list)] => {
                cx.meter.values(list.len())?;
                let mut items: Vec<Value<'_>> = list.iter().collect();
                items.reverse();
                Ok(Value::list(items))
            }
            _ => no_such_overload(),
        },
        "distinct" => distinct,
        "sets.contains" => |cx, args| match args {
            [Value::List(list), Value::List(part)] => contains_all(cx, list, part).map(Value::Bool),
            _ => no_such_overload(),
        },
        "sets.equivalent" => |cx, args| match args {
            [Value::List(a), Value::List(b)] => {
                Ok(Value::Bool(contains_all(cx, a, b)? && contains_all(cx, b, a)?))
            }
            _ => no_such_overload(),
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
            _ => no_such_overload(),
        },
        "cel.@mapInsert" => insert,
        _ => return None,
    })
}

fn is_sorted<'a>(_: &mut Cx, args: &[Value<'a>]) -> Evaluated<'a> {
    let [Value::List(list)] = args else { return no_such_overload() };
    let mut before: Option<Value<'a>> = None;
    for item in list.iter() {
        if before.as_ref().is_some_and(|before| before.compare(&item) == Some(Ordering::Greater)) {
            return Ok(Value::Bool(false));
        }
        before = Some(item);
    }
    Ok(Value::Bool(true))
}

fn sum<'a>(cx: &mut Cx, args: &[Value<'a>]) -> Evaluated<'a> {
    let [Value::List(list)] = args else { return no_such_overload() };
    let mut total = match list.get(0) {
        None | Some(Value::Int(_)) => Value::Int(0),
        Some(Value::Uint(_)) => Value::Uint(0),
        Some(Value::Double(_)) => Value::Double(0.0),
        Some(Value::Duration(_)) => Value::Duration(0),
        _ => return no_such_overload(),
    };
    for item in list.iter() {
        total = operators::add(cx, &[total, item])?;
    }
    Ok(total)
}

fn extreme<'a>(args: &[Value<'a>], name: &str, wanted: Ordering) -> Evaluated<'a> {
    let [Value::List(list)] = args else { return no_such_overload() };
    let mut best: Option<Value<'a>> = None;
    for item in list.iter() {
        match best.as_ref().map(|best| item.compare(best)) {
            None => best = Some(item),
            Some(Some(order)) if order == wanted => best = Some(item),
            Some(Some(_)) => {}
            Some(None) => return no_such_overload(),
        }
    }
    best.ok_or_else(|| Failure::error(format!("{name} called on empty list")))
}

fn index_of<'a>(cx: &mut Cx, args: &[Value<'a>], last: bool) -> Evaluated<'a> {
    let (list, item) = match args {
        [Value::String(text), Value::String(part)] => {
            return strings::index_of(text, part, None, last).map(Value::Int);
        }
        [Value::String(text), Value::String(part), Value::Int(offset)] => {
            return strings::index_of(text, part, Some(*offset), last).map(Value::Int);
        }
        [Value::List(list), item] => (list, item),
        _ => return no_such_overload(),
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

fn slice<'a>(cx: &mut Cx, args: &[Value<'a>]) -> Evaluated<'a> {
    let [Value::List(list), Value::Int(start), Value::Int(end)] = args else { return no_such_overload() };
    let wrong = |words: String| Err(Failure::error(format!("cannot slice({start}, {end}), {words}")));
    if *start < 0 || *end < 0 {
        return wrong("negative indexes not supported".to_owned());
    }
    if start > end {
        return wrong("start index must be less than or equal to end index".to_owned());
    }
    if (list.len() as i64) < *end {
        return wrong(format!("list is length {}", list.len()));
    }
    cx.meter.values((end - start) as usize)?;
    Ok(Value::list((*start..*end).filter_map(|index| list.get(index as usize)).collect()))
}

fn flatten<'a>(cx: &mut Cx, list: &List<'a>, depth: i64) -> Evaluated<'a> {
    let mut items: Vec<Value<'a>> = list.iter().collect();
    // A level at a time: there are no more levels than values, whatever depth is asked for.
    for _ in 0..depth {
        cx.meter.values(items.len())?;
        if !items.iter().any(|item| matches!(item, Value::List(_))) {
            break;
        }
        let mut flat = Vec::with_capacity(items.len());
        for item in items {
            match item {
                Value::List(inner) => {
                    cx.meter.values(inner.len())?;
                    flat.extend(inner.iter());
                }
                other => flat.push(other),
            }
        }
        items = flat;
    }
    Ok(Value::list(items))
}

fn sort<'a>(cx: &mut Cx, list: &List<'a>, keys: &List<'a>) -> Evaluated<'a> {
    if list.len() != keys.len() {
        return Err(Failure::error(format!(
            "@sortByAssociatedKeys() expected a list of the same size as the associated keys list, but got {} and {} elements respectively",
            list.len(),
            keys.len()
        )));
    }
    cx.meter.values(list.len() * 2)?;
    let mut pairs: Vec<(Value<'a>, Value<'a>)> = keys.iter().zip(list.iter()).collect();
    let mut comparable = true;
    let mut same_type = true;
    if let Some((first, _)) = pairs.first().cloned() {
        comparable = first.compare(&first).is_some() || matches!(first, Value::Double(_));
        same_type = pairs.iter().all(|(key, _)| key.type_of() == first.type_of());
    }
    if !comparable {
        return Err(Failure::error("list elements must be comparable"));
    }
    if !same_type {
        return Err(Failure::error("list elements must have the same type"));
    }
    pairs.sort_by(|(a, _), (b, _)| match (a, b) {
        (Value::Double(a), Value::Double(b)) => a.total_cmp(b),
        _ => a.compare(b).unwrap_or(Ordering::Equal),
    });
    Ok(Value::list(pairs.into_iter().map(|(_, item)| item).collect()))
}

fn distinct<'a>(cx: &mut Cx, args: &[Value<'a>]) -> Evaluated<'a> {
    let [Value::List(list)] = args else { return no_such_overload() };
    cx.meter.values(list.len())?;
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

fn contains_all<'a>(cx: &mut Cx, list: &List<'a>, part: &List<'a>) -> Result<bool, Failure> {
    let list = Value::List(list.clone());
    for item in part.iter() {
        if contains(cx, &item, &list)?.as_bool() != Some(true) {
            return Ok(false);
        }
    }
    Ok(true)
}

fn insert<'a>(cx: &mut Cx, args: &[Value<'a>]) -> Evaluated<'a> {
    let (Value::Map(map), more) = (match args {
        [map, Value::Map(more)] => (map, more.entries()),
        [map, key, value] => (map, vec![(key.clone(), value.clone())]),
        _ => return no_such_overload(),
    }) else {
        return no_such_overload();
    };
    cx.meter.values((map.len() + more.len()) * 2)?;
    let mut entries = match map {
        Map::Shared(entries) => entries.as_ref().clone(),
        other => {
            other.entries().iter().filter_map(|(key, value)| Some((Key::of(key)?, value.clone()))).collect()
        }
    };
    for (key, value) in more {
        let Some(map_key) = Key::of(&key) else { return no_such_overload() };
        if entries.insert(map_key, value).is_some() {
            return Err(Failure::error(format!("insert failed: key {key:?} already exists")));
        }
    }
    Ok(Value::Map(Map::Shared(Arc::new(entries))))
}
