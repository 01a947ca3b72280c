//! Optional values.

use std::sync::Arc;

use super::{EvalContext, FunctionOp, overload_error};
use crate::eval::EvalResult;
use crate::eval::budget::EvalError;
use crate::value::Value;

pub(super) fn function_op(name: &str) -> Option<FunctionOp> {
    Some(match name {
        "optional.of" => |_, args| match args {
            [value] => Ok(Value::some(value.clone())),
            _ => overload_error(),
        },
        "optional.ofNonZeroValue" => |_, args| match args {
            [value] if value.is_zero() => Ok(Value::Optional(None)),
            [value] => Ok(Value::some(value.clone())),
            _ => overload_error(),
        },
        "optional.none" => |_, _| Ok(Value::Optional(None)),
        "value" => |_, args| match args {
            [Value::Optional(Some(value))] => Ok(Value::clone(value)),
            [Value::Optional(None)] => Err(EvalError::new("optional.none() dereference")),
            _ => overload_error(),
        },
        "hasValue" => |_, args| match args {
            [Value::Optional(value)] => Ok(Value::Bool(value.is_some())),
            _ => overload_error(),
        },
        "first" => |_, args| match args {
            [Value::List(list)] => Ok(Value::Optional(list.get(0).map(Arc::new))),
            _ => overload_error(),
        },
        "last" => |_, args| match args {
            [Value::List(list)] => {
                Ok(Value::Optional(list.len().checked_sub(1).and_then(|last| list.get(last)).map(Arc::new)))
            }
            _ => overload_error(),
        },
        "optional.unwrap" | "unwrapOpt" => unwrap,
        _ => return None,
    })
}

fn unwrap<'a>(cx: &mut EvalContext, args: &[Value<'a>]) -> EvalResult<'a> {
    let [Value::List(list)] = args else { return overload_error() };
    cx.cost_tracker.add_values(list.len())?;
    let mut items = Vec::new();
    for item in list.iter() {
        match item {
            Value::Optional(inner) => items.extend(inner.map(Arc::unwrap_or_clone)),
            other => return Err(EvalError::new(format!("value {other:?} is not optional"))),
        }
    }
    Ok(Value::list(items))
}
