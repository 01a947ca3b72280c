//! Type conversions.

use super::{EvalContext, FunctionOp, overload_error};
use crate::eval::EvalResult;
use crate::eval::budget::EvalError;
use crate::time;
use crate::value::{LibraryValue, Value};

pub(super) fn function_op(name: &str) -> Option<FunctionOp> {
    Some(match name {
        "type" => |_, args| match args {
            [value] => Ok(Value::Type(value.type_of())),
            _ => overload_error(),
        },
        "dyn" => |_, args| match args {
            [value] => Ok(value.clone()),
            _ => overload_error(),
        },
        "bool" => |_, args| match args {
            [Value::Bool(value)] => Ok(Value::Bool(*value)),
            [Value::String(text)] => match &**text {
                "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(Value::Bool(true)),
                "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(Value::Bool(false)),
                _ => conversion_error(&args[0], "bool"),
            },
            [other] => conversion_error(other, "bool"),
            _ => overload_error(),
        },
        "bytes" => |cx, args| match args {
            [Value::Bytes(bytes)] => Ok(Value::Bytes(bytes.clone())),
            [Value::String(text)] => {
                cx.cost_tracker.add_bytes(text.len())?;
                Ok(Value::Bytes(text.as_bytes().into()))
            }
            [other] => conversion_error(other, "bytes"),
            _ => overload_error(),
        },
        "int" => int,
        "uint" => uint,
        "double" => double,
        "string" => string,
        "duration" => |_, args| match args {
            [Value::Duration(nanos)] => Ok(Value::Duration(*nanos)),
            [Value::Int(nanos)] => Ok(Value::Duration(*nanos)),
            [Value::String(text)] => match time::parse_duration(text) {
                Some(nanos) => Ok(Value::Duration(nanos)),
                None => Err(EvalError::new(format!("time: invalid duration {:?}", &**text))),
            },
            [other] => conversion_error(other, "google.protobuf.Duration"),
            _ => overload_error(),
        },
        "timestamp" => |_, args| match args {
            [Value::Timestamp(timestamp)] => Ok(Value::Timestamp(*timestamp)),
            [Value::Int(seconds)] => time::from_second(*seconds)
                .map(Value::Timestamp)
                .ok_or_else(|| EvalError::new("timestamp overflow")),
            [Value::String(text)] => match time::parse_timestamp(text) {
                Some(timestamp) => Ok(Value::Timestamp(timestamp)),
                None => Err(EvalError::new(format!("invalid timestamp {:?}", &**text))),
            },
            [other] => conversion_error(other, "google.protobuf.Timestamp"),
            _ => overload_error(),
        },
        _ => return None,
    })
}

fn conversion_error<'a>(from: &Value<'a>, to: &str) -> EvalResult<'a> {
    Err(EvalError::new(format!("type conversion error from '{}' to '{to}'", from.type_of().name())))
}

fn int<'a>(_: &mut EvalContext, args: &[Value<'a>]) -> EvalResult<'a> {
    let overflow = || EvalError::new("integer overflow");
    match args {
        [Value::Int(value)] => Ok(Value::Int(*value)),
        [Value::Uint(value)] => i64::try_from(*value).map(Value::Int).map_err(|_| overflow()),
        [Value::Double(value)] if *value > i64::MIN as f64 && *value < i64::MAX as f64 => {
            Ok(Value::Int(*value as i64))
        }
        [Value::Double(_)] => Err(overflow()),
        [Value::Timestamp(timestamp)] => Ok(Value::Int(timestamp.as_second())),
        [Value::Duration(nanos)] => Ok(Value::Int(*nanos)),
        [Value::String(text)] => match text.parse() {
            Ok(value) => Ok(Value::Int(value)),
            Err(_) => Err(parse_error("ParseInt", text)),
        },
        [other] => conversion_error(other, "int"),
        _ => overload_error(),
    }
}

fn uint<'a>(_: &mut EvalContext, args: &[Value<'a>]) -> EvalResult<'a> {
    let overflow = || EvalError::new("unsigned integer overflow");
    match args {
        [Value::Uint(value)] => Ok(Value::Uint(*value)),
        [Value::Int(value)] => u64::try_from(*value).map(Value::Uint).map_err(|_| overflow()),
        [Value::Double(value)] if *value >= 0.0 && *value < u64::MAX as f64 => Ok(Value::Uint(*value as u64)),
        [Value::Double(_)] => Err(overflow()),
        [Value::String(text)] => match text.parse() {
            Ok(value) => Ok(Value::Uint(value)),
            Err(_) => Err(parse_error("ParseUint", text)),
        },
        [other] => conversion_error(other, "uint"),
        _ => overload_error(),
    }
}

fn double<'a>(_: &mut EvalContext, args: &[Value<'a>]) -> EvalResult<'a> {
    match args {
        [Value::Double(value)] => Ok(Value::Double(*value)),
        [Value::Int(value)] => Ok(Value::Double(*value as f64)),
        [Value::Uint(value)] => Ok(Value::Double(*value as f64)),
        [Value::String(text)] => match text.parse() {
            Ok(value) => Ok(Value::Double(value)),
            Err(_) => Err(parse_error("ParseFloat", text)),
        },
        [other] => conversion_error(other, "double"),
        _ => overload_error(),
    }
}

fn parse_error(function: &str, text: &str) -> EvalError {
    EvalError::new(format!("strconv.{function}: parsing {text:?}: invalid syntax"))
}

fn string<'a>(cx: &mut EvalContext, args: &[Value<'a>]) -> EvalResult<'a> {
    match args {
        [text @ Value::String(_)] => Ok(text.clone()),
        [Value::Bytes(bytes)] => {
            cx.cost_tracker.add_bytes(bytes.len())?;
            match std::str::from_utf8(bytes) {
                Ok(text) => Ok(Value::text(text)),
                Err(_) => Err(EvalError::new("invalid UTF-8 in bytes, cannot convert to string")),
            }
        }
        [value] => match value_to_string(value) {
            Some(text) => cx.text(text),
            None => conversion_error(value, "string"),
        },
        _ => overload_error(),
    }
}

/// Formats a scalar.
pub(super) fn value_to_string(value: &Value<'_>) -> Option<String> {
    Some(match value {
        Value::Bool(value) => value.to_string(),
        Value::Int(value) => value.to_string(),
        Value::Uint(value) => value.to_string(),
        Value::Double(value) => double_text(*value),
        Value::String(text) => text.to_string(),
        Value::Duration(nanos) => time::format_duration(*nanos),
        Value::Timestamp(timestamp) => timestamp.to_string(),
        Value::Type(ty) => ty.name().to_owned(),
        Value::Library(LibraryValue::Ip(address)) => address.to_string(),
        Value::Library(LibraryValue::Cidr(block)) => block.to_string(),
        _ => return None,
    })
}

/// Formats a float as Go's `%g` with the shortest representation.
pub(super) fn double_text(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "+Inf" } else { "-Inf" }.to_owned();
    }
    let exponent = if value == 0.0 { 0 } else { value.abs().log10().floor() as i32 };
    if (-4..21).contains(&exponent) {
        return format!("{value}");
    }
    let text = format!("{value:e}");
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    format!("{mantissa}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}
