//! The quantity library, for resource quantities such as `1.5Gi`.

use schema::quantity::{Format, Quantity};

use super::{FunctionOp, overload_error, semver};
use crate::eval::EvalResult;
use crate::eval::budget::EvalError;
use crate::value::{LibraryValue, Value};

pub(super) fn function_op(name: &str) -> Option<FunctionOp> {
    Some(match name {
        "quantity" => |_, args| match args {
            [Value::String(text)] => match Quantity::parse(text) {
                Ok(quantity) => Ok(Value::Library(LibraryValue::Quantity(quantity))),
                Err(error) => Err(EvalError::new(error.to_string())),
            },
            _ => overload_error(),
        },
        "isQuantity" => |_, args| match args {
            [Value::String(text)] => Ok(Value::Bool(Quantity::parse(text).is_ok())),
            _ => overload_error(),
        },
        "sign" => |_, args| with_quantity(args, |quantity| Ok(Value::Int(quantity.sign().into()))),
        "asApproximateFloat" => {
            |_, args| with_quantity(args, |quantity| Ok(Value::Double(quantity.to_f64())))
        }
        "isInteger" => {
            |_, args| with_quantity(args, |quantity| Ok(Value::Bool(to_integer(quantity).is_some())))
        }
        "asInteger" => |_, args| {
            with_quantity(args, |quantity| {
                to_integer(quantity)
                    .map(Value::Int)
                    .ok_or_else(|| EvalError::new("cannot convert value to integer"))
            })
        },
        "isGreaterThan" => |_, args| compare(args, |order| Value::Bool(order > 0)),
        "isLessThan" => |_, args| compare(args, |order| Value::Bool(order < 0)),
        "compareTo" => |_, args| compare(args, Value::Int),
        "add" => |_, args| arithmetic(args, |a, b| a + b),
        "sub" => |_, args| arithmetic(args, |a, b| a - b),
        _ => return None,
    })
}

fn to_integer(quantity: Quantity) -> Option<i64> {
    let value = quantity.value();
    (quantity.is_whole() && value != i64::MAX && value != i64::MIN).then_some(value)
}

fn with_quantity<'a>(args: &[Value<'a>], read: impl Fn(Quantity) -> EvalResult<'a>) -> EvalResult<'a> {
    match args {
        [Value::Library(LibraryValue::Quantity(quantity))] => read(*quantity),
        _ => overload_error(),
    }
}

/// Compares two quantities or two semantic versions.
fn compare<'a>(args: &[Value<'a>], result: impl Fn(i64) -> Value<'a>) -> EvalResult<'a> {
    match args {
        [Value::Library(LibraryValue::Quantity(a)), Value::Library(LibraryValue::Quantity(b))] => {
            Ok(result(a.cmp(b) as i64))
        }
        [Value::Library(LibraryValue::Version(a)), Value::Library(LibraryValue::Version(b))] => {
            Ok(result(semver::Version::compare(a, b) as i64))
        }
        _ => overload_error(),
    }
}

fn arithmetic<'a>(args: &[Value<'a>], combine: impl Fn(Quantity, Quantity) -> Quantity) -> EvalResult<'a> {
    let (a, b) = match args {
        [Value::Library(LibraryValue::Quantity(a)), Value::Library(LibraryValue::Quantity(b))] => (*a, *b),
        [Value::Library(LibraryValue::Quantity(a)), Value::Int(b)] => {
            (*a, Quantity::new(*b, Format::DecimalExponent))
        }
        _ => return overload_error(),
    };
    Ok(Value::Library(LibraryValue::Quantity(combine(a, b))))
}
