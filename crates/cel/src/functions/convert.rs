//! Conversions between types.

use super::{Cx, Native, no_such_overload};
use crate::eval::Evaluated;
use crate::eval::budget::Failure;
use crate::time;
use crate::value::{Library, Value};

pub(super) fn native(name: &str) -> Option<Native> {
    Some(match name {
        "type" => |_, args| match args {
            [value] => Ok(Value::Type(value.type_of())),
            _ => no_such_overload(),
        },
        "dyn" => |_, args| match args {
            [value] => Ok(value.clone()),
            _ => no_such_overload(),
        },
        "bool" => |_, args| match args {
            [Value::Bool(value)] => Ok(Value::Bool(*value)),
            [Value::String(text)] => match &**text {
                "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(Value::Bool(true)),
                "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(Value::Bool(false)),
                _ => conversion(&args[0], "bool"),
            },
            [other] => conversion(other, "bool"),
            _ => no_such_overload(),
        },
        "bytes" => |cx, args| match args {
            [Value::Bytes(bytes)] => Ok(Value::Bytes(bytes.clone())),
            [Value::String(text)] => {
                cx.meter.bytes(text.len())?;
                Ok(Value::Bytes(text.as_bytes().into()))
            }
            [other] => conversion(other, "bytes"),
            _ => no_such_overload(),
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
                None => Err(Failure::error(format!("time: invalid duration {:?}", &**text))),
            },
            [other] => conversion(other, "google.protobuf.Duration"),
            _ => no_such_overload(),
        },
        "timestamp" => |_, args| match args {
            [Value::Timestamp(timestamp)] => Ok(Value::Timestamp(*timestamp)),
            [Value::Int(seconds)] => time::from_second(*seconds)
                .map(Value::Timestamp)
                .ok_or_else(|| Failure::error("timestamp overflow")),
            [Value::String(text)] => match time::parse_timestamp(text) {
                Some(timestamp) => Ok(Value::Timestamp(timestamp)),
                None => Err(Failure::error(format!("invalid timestamp {:?}", &**text))),
            },
            [other] => conversion(other, "google.protobuf.Timestamp"),
            _ => no_such_overload(),
        },
        _ => return None,
    })
}

fn conversion<'a>(from: &Value<'a>, to: &str) -> Evaluated<'a> {
    Err(Failure::error(format!("type conversion error from '{}' to '{to}'", from.type_of().name())))
}

fn int<'a>(_: &mut Cx, args: &[Value<'a>]) -> Evaluated<'a> {
    let overflow = || Failure::error("integer overflow");
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
        [other] => conversion(other, "int"),
        _ => no_such_overload(),
    }
}

fn uint<'a>(_: &mut Cx, args: &[Value<'a>]) -> Evaluated<'a> {
    let overflow = || Failure::error("unsigned integer overflow");
    match args {
        [Value::Uint(value)] => Ok(Value::Uint(*value)),
        [Value::Int(value)] => u64::try_from(*value).map(Value::Uint).map_err(|_| overflow()),
        [Value::Double(value)] if *value >= 0.0 && *value < u64::MAX as f64 => Ok(Value::Uint(*value as u64)),
        [Value::Double(_)] => Err(overflow()),
        [Value::String(text)] => match text.parse() {
            Ok(value) => Ok(Value::Uint(value)),
            Err(_) => Err(parse_error("ParseUint", text)),
        },
        [other] => conversion(other, "uint"),
        _ => no_such_overload(),
    }
}

fn double<'a>(_: &mut Cx, args: &[Value<'a>]) -> Evaluated<'a> {
    match args {
        [Value::Double(value)] => Ok(Value::Double(*value)),
        [Value::Int(value)] => Ok(Value::Double(*value as f64)),
        [Value::Uint(value)] => Ok(Value::Double(*value as f64)),
        [Value::String(text)] => match text.parse() {
            Ok(value) => Ok(Value::Double(value)),
            Err(_) => Err(parse_error("ParseFloat", text)),
        },
        [other] => conversion(other, "double"),
        _ => no_such_overload(),
    }
}

fn parse_error(function: &str, text: &str) -> Failure {
    Failure::error(format!("strconv.{function}: parsing {text:?}: invalid syntax"))
}

fn string<'a>(cx: &mut Cx, args: &[Value<'a>]) -> Evaluated<'a> {
    match args {
        [text @ Value::String(_)] => Ok(text.clone()),
        [Value::Bytes(bytes)] => {
            cx.meter.bytes(bytes.len())?;
            match std::str::from_utf8(bytes) {
                Ok(text) => Ok(Value::text(text)),
                Err(_) => Err(Failure::error("invalid UTF-8 in bytes, cannot convert to string")),
            }
        }
        [value] => match shown(value) {
            Some(text) => cx.text(text),
            None => conversion(value, "string"),
        },
        _ => no_such_overload(),
    }
}

/// The text of a scalar.
pub(super) fn shown(value: &Value<'_>) -> Option<String> {
    Some(match value {
        Value::Bool(value) => value.to_string(),
        Value::Int(value) => value.to_string(),
        Value::Uint(value) => value.to_string(),
        Value::Double(value) => double_text(*value),
        Value::String(text) => text.to_string(),
        Value::Duration(nanos) => time::show_duration(*nanos),
        Value::Timestamp(timestamp) => timestamp.to_string(),
        Value::Type(ty) => ty.name().to_owned(),
        Value::Library(Library::Ip(address)) => address.to_string(),
        Value::Library(Library::Cidr(block)) => block.to_string(),
        _ => return None,
    })
}

/// As Go prints a float with `%g` and the fewest digits.
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
