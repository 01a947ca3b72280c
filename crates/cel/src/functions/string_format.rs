//! The `format` function: `'%s is %d'.format([name, count])`.

use super::EvalContext;
use super::convert::{double_text, value_to_string};
use crate::eval::EvalResult;
use crate::eval::budget::EvalError;
use crate::value::{List, Value};

const DEFAULT_PRECISION: usize = 6;
const MAX_PRECISION: usize = 1000;
const MAX_VALUE_DEPTH: u32 = 100;

pub(super) fn format<'a>(cx: &mut EvalContext, template: &str, values: &List<'a>) -> EvalResult<'a> {
    let mut out = String::new();
    let mut rest = template;
    let mut next = 0;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix('%') {
            out.push('%');
            rest = after;
            continue;
        }
        let mut precision = None;
        if let Some(after) = rest.strip_prefix('.') {
            let digits = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
            let number: usize = after[..digits].parse().map_err(|_| {
                EvalError::new("error while parsing precision: error while converting precision to integer")
            })?;
            precision = Some(number.min(MAX_PRECISION));
            rest = &after[digits..];
        }
        let Some(clause) = rest.chars().next() else {
            return Err(EvalError::new("unexpected end of string"));
        };
        rest = &rest[clause.len_utf8()..];
        let value = values.get(next).ok_or_else(|| EvalError::new(format!("index {next} out of range")))?;
        next += 1;
        let text = format_clause(cx, clause, precision, &value)?;
        cx.cost_tracker.add_bytes(text.len())?;
        out.push_str(&text);
    }
    out.push_str(rest);
    cx.text(out)
}

fn format_clause(
    cx: &mut EvalContext,
    clause: char,
    precision: Option<usize>,
    value: &Value<'_>,
) -> Result<String, EvalError> {
    let precision = precision.unwrap_or(DEFAULT_PRECISION);
    let clause_error = |words: &str| {
        let ty = value.type_of();
        EvalError::new(format!("error during formatting: {words}, was given {}", ty.name()))
    };
    match (clause, value) {
        ('s', value) => format_value(cx, value, 0),
        ('d', Value::Int(value)) => Ok(value.to_string()),
        ('d', Value::Uint(value)) => Ok(value.to_string()),
        ('d', _) => Err(clause_error("decimal clause can only be used on integers")),
        ('f', Value::Double(value)) => Ok(format_with_thousands_separator(*value, precision)),
        ('f', _) => Err(clause_error("fixed-point clause can only be used on doubles")),
        ('e', Value::Double(value)) => {
            let text = format!("{value:.precision$e}");
            let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
            let exponent: i32 = exponent.parse().unwrap_or(0);
            let digits: String = format!("{:02}", exponent.abs()).chars().map(exponent_digit).collect();
            Ok(format!("{mantissa}\u{d7}10{}{digits}", if exponent < 0 { "\u{207b}" } else { "" }))
        }
        ('e', _) => Err(clause_error("scientific clause can only be used on doubles")),
        ('b', Value::Int(value)) if *value < 0 => Ok(format!("-{:b}", value.unsigned_abs())),
        ('b', Value::Int(value)) => Ok(format!("{value:b}")),
        ('b', Value::Uint(value)) => Ok(format!("{value:b}")),
        ('b', Value::Bool(value)) => Ok(u8::from(*value).to_string()),
        ('b', _) => Err(clause_error("only integers and bools can be formatted as binary")),
        ('x' | 'X', value) => {
            let hex = match value {
                Value::Int(value) if *value < 0 => format!("-{:x}", value.unsigned_abs()),
                Value::Int(value) => format!("{value:x}"),
                Value::Uint(value) => format!("{value:x}"),
                Value::String(text) => bytes(cx, text.as_bytes())?,
                Value::Bytes(raw) => bytes(cx, raw)?,
                _ => {
                    return Err(clause_error(
                        "only integers, byte buffers, and strings can be formatted as hex",
                    ));
                }
            };
            Ok(if clause == 'X' { hex.to_uppercase() } else { hex })
        }
        ('o', Value::Int(value)) if *value < 0 => Ok(format!("-{:o}", value.unsigned_abs())),
        ('o', Value::Int(value)) => Ok(format!("{value:o}")),
        ('o', Value::Uint(value)) => Ok(format!("{value:o}")),
        ('o', _) => Err(clause_error("octal clause can only be used on integers")),
        (other, _) => Err(EvalError::new(format!(
            "could not parse formatting clause: unrecognized formatting clause \"{other}\""
        ))),
    }
}

/// Formats a number with thousands separators.
fn format_with_thousands_separator(value: f64, precision: usize) -> String {
    if !value.is_finite() {
        let infinity = if value > 0.0 { "\u{221e}" } else { "-\u{221e}" };
        return if value.is_nan() { "NaN" } else { infinity }.to_owned();
    }
    let text = format!("{:.precision$}", value.abs());
    let (whole, fraction) = text.split_at(text.find('.').unwrap_or(text.len()));
    let mut out = String::from(if value.is_sign_negative() && value != 0.0 { "-" } else { "" });
    for (index, digit) in whole.chars().enumerate() {
        if index > 0 && (whole.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out + fraction
}

fn exponent_digit(digit: char) -> char {
    match digit {
        '1' => '\u{b9}',
        '2' => '\u{b2}',
        '3' => '\u{b3}',
        '0' => '\u{2070}',
        other => char::from_u32(0x2070 + other as u32 - '0' as u32).unwrap_or(other),
    }
}

fn bytes(cx: &mut EvalContext, raw: &[u8]) -> Result<String, EvalError> {
    cx.cost_tracker.add_bytes(raw.len() * 2)?;
    Ok(raw.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn format_value(cx: &mut EvalContext, value: &Value<'_>, depth: u32) -> Result<String, EvalError> {
    cx.cost_tracker.add_steps(1)?;
    if depth > MAX_VALUE_DEPTH {
        return Err(EvalError::new("value is nested too deeply"));
    }
    match value {
        Value::Null => Ok("null".to_owned()),
        Value::Bytes(raw) => Ok(String::from_utf8_lossy(raw).into_owned()),
        Value::List(list) => {
            let mut parts = Vec::new();
            for item in list.iter() {
                parts.push(format_nested_value(cx, &item, depth + 1)?);
            }
            let joined = parts.join(", ");
            cx.cost_tracker.add_bytes(joined.len())?;
            Ok(format!("[{joined}]"))
        }
        Value::Map(map) => {
            let mut parts = Vec::new();
            for (key, value) in map.entries() {
                parts.push(format!(
                    "{}:{}",
                    format_nested_value(cx, &key, depth + 1)?,
                    format_nested_value(cx, &value, depth + 1)?
                ));
            }
            parts.sort();
            let joined = parts.join(", ");
            cx.cost_tracker.add_bytes(joined.len())?;
            Ok(format!("{{{joined}}}"))
        }
        Value::Library(_) => Err(unsupported_type(value)),
        value => {
            let text = value_to_string(value).ok_or_else(|| unsupported_type(value))?;
            cx.cost_tracker.add_bytes(text.len())?;
            Ok(text)
        }
    }
}

fn unsupported_type(value: &Value<'_>) -> EvalError {
    let ty = value.type_of();
    EvalError::new(format!(
        "error during formatting: string clause can only be used on strings, bools, bytes, ints, doubles, maps, lists, types, durations, and timestamps, was given {}",
        ty.name()
    ))
}

/// Formats a value in a list or map, where strings are quoted.
fn format_nested_value(cx: &mut EvalContext, value: &Value<'_>, depth: u32) -> Result<String, EvalError> {
    Ok(match value {
        Value::String(text) => format!("{:?}", &**text),
        Value::Bytes(raw) => format!("b{:?}", String::from_utf8_lossy(raw)),
        Value::Double(value) if value.is_finite() => format!("{value:.DEFAULT_PRECISION$}"),
        Value::Double(value) => format!("{:?}", double_text(*value)),
        Value::Timestamp(timestamp) => format!("timestamp(\"{timestamp}\")"),
        Value::Duration(nanos) => format!("duration(\"{}\")", crate::time::format_duration(*nanos)),
        value => format_value(cx, value, depth)?,
    })
}
