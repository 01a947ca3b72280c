//! Values that may be missing.

use std::sync::Arc;

use super::{Cx, Native, no_such_overload};
use crate::eval::Evaluated;
use crate::eval::budget::Failure;
use crate::value::Value;

pub(super) fn native(name: &str) -> Option<Native> {
    Some(match name {
        "optional.of" => |_, args| match args {
            [value] => Ok(Value::some(value.clone())),
            _ => no_such_overload(),
        },
        "optional.ofNonZeroValue" => |_, args| match args {
            [value] if value.is_zero() => Ok(Value::Optional(None)),
            [value] => Ok(Value::some(value.clone())),
            _ => no_such_overload(),
        },
        "optional.none" => |_, _| Ok(Value::Optional(None)),
        "value" => |_, args| match args {
            [Value::Optional(Some(value))] => Ok(Value::clone(value)),
            [Value::Optional(None)] => Err(Failure::error("optional.none() dereference")),
            _ => no_such_overload(),
        },
        "hasValue" => |_, args| match args {
            [Value::Optional(value)] => Ok(Value::Bool(value.is_some())),
            _ => no_such_overload(),
        },
        "first" => |_, args| match args {
            [Value::List(list)] => Ok(Value::Optional(list.get(0).map(Arc::new))),
            _ => no_such_overload(),
        },
        "last" => |_, args| match args {
            [Value::List(list)] => {
                Ok(Value::Optional(list.len().checked_sub(1).and_then(|last| list.get(last)).map(Arc::new)))
            }
            _ => no_such_overload(),
        },
        "optional.unwrap" | "unwrapOpt" => unwrap,
        _ => return None,
    })
}

fn unwrap<'a>(cx: &mut Cx, args: &[Value<'a>]) -> Evaluated<'a> {
    let [Value::List(list)] = args else { return no_such_overload() };
    cx.meter.values(list.len())?;
    let mut items = Vec::new();
    for item in list.iter() {
        match item {
            Value::Optional(inner) => items.extend(inner.map(Arc::unwrap_or_clone)),
            other => return Err(Failure::error(format!("value {other:?} is not optional"))),
        }
    }
    Ok(Value::list(items))
}
