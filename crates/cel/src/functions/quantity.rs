//! Quantities such as `1.5Gi`.

use schema::quantity::{Format, Quantity};

use super::{Native, no_such_overload, semver};
use crate::eval::Evaluated;
use crate::eval::budget::Failure;
use crate::value::{Library, Value};

pub(super) fn native(name: &str) -> Option<Native> {
    Some(match name {
        "quantity" => |_, args| match args {
            [Value::String(text)] => match Quantity::parse(text) {
                Ok(quantity) => Ok(Value::Library(Library::Quantity(quantity))),
                Err(error) => Err(Failure::error(error.to_string())),
            },
            _ => no_such_overload(),
        },
        "isQuantity" => |_, args| match args {
            [Value::String(text)] => Ok(Value::Bool(Quantity::parse(text).is_ok())),
            _ => no_such_overload(),
        },
        "sign" => |_, args| of(args, |quantity| Ok(Value::Int(quantity.sign().into()))),
        "asApproximateFloat" => |_, args| of(args, |quantity| Ok(Value::Double(quantity.to_f64()))),
        "isInteger" => |_, args| of(args, |quantity| Ok(Value::Bool(whole(quantity).is_some()))),
        "asInteger" => |_, args| {
            of(args, |quantity| {
                whole(quantity)
                    .map(Value::Int)
                    .ok_or_else(|| Failure::error("cannot convert value to integer"))
            })
        },
        "isGreaterThan" => |_, args| compared(args, |order| Value::Bool(order > 0)),
        "isLessThan" => |_, args| compared(args, |order| Value::Bool(order < 0)),
        "compareTo" => |_, args| compared(args, Value::Int),
        "add" => |_, args| combined(args, |a, b| a + b),
        "sub" => |_, args| combined(args, |a, b| a - b),
        _ => return None,
    })
}

fn whole(quantity: Quantity) -> Option<i64> {
    let value = quantity.value();
    (quantity.is_whole() && value != i64::MAX && value != i64::MIN).then_some(value)
}

fn of<'a>(args: &[Value<'a>], read: impl Fn(Quantity) -> Evaluated<'a>) -> Evaluated<'a> {
    match args {
        [Value::Library(Library::Quantity(quantity))] => read(*quantity),
        _ => no_such_overload(),
    }
}

/// Of two quantities or two versions.
fn compared<'a>(args: &[Value<'a>], judge: impl Fn(i64) -> Value<'a>) -> Evaluated<'a> {
    match args {
        [Value::Library(Library::Quantity(a)), Value::Library(Library::Quantity(b))] => {
            Ok(judge(a.cmp(b) as i64))
        }
        [Value::Library(Library::Version(a)), Value::Library(Library::Version(b))] => {
            Ok(judge(semver::Version::compare(a, b) as i64))
        }
        _ => no_such_overload(),
    }
}

fn combined<'a>(args: &[Value<'a>], combine: impl Fn(Quantity, Quantity) -> Quantity) -> Evaluated<'a> {
    let (a, b) = match args {
        [Value::Library(Library::Quantity(a)), Value::Library(Library::Quantity(b))] => (*a, *b),
        [Value::Library(Library::Quantity(a)), Value::Int(b)] => {
            (*a, Quantity::new(*b, Format::DecimalExponent))
        }
        _ => return no_such_overload(),
    };
    Ok(Value::Library(Library::Quantity(combine(a, b))))
}
