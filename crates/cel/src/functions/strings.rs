//! The strings library. Indexes count characters.

use super::{EvalContext, FunctionOp, overload_error, string_format};
use crate::eval::EvalResult;
use crate::eval::budget::EvalError;
use crate::value::{Text, Value};

pub(super) fn function_op(name: &str) -> Option<FunctionOp> {
    Some(match name {
        "contains" => |_, args| test(args, |text, part| text.contains(part)),
        "startsWith" => |_, args| test(args, |text, part| text.starts_with(part)),
        "endsWith" => |_, args| test(args, |text, part| text.ends_with(part)),
        "charAt" => |_, args| match args {
            [Value::String(text), Value::Int(index)] => substring(text, *index, 1),
            _ => overload_error(),
        },
        "substring" => |_, args| match args {
            [Value::String(text), Value::Int(start)] => substring(text, *start, usize::MAX),
            [Value::String(_), Value::Int(start), Value::Int(end)] if start > end => {
                let message = format!("invalid substring range. start: {start}, end: {end}");
                Err(EvalError::new(message))
            }
            [Value::String(text), Value::Int(start), Value::Int(end)] => {
                if *end < 0 || *end as usize > text.chars().count() {
                    return Err(out_of_range(*end));
                }
                substring(text, *start, end.abs_diff(*start) as usize)
            }
            _ => overload_error(),
        },
        "lowerAscii" => |cx, args| map(cx, args, |text| text.to_ascii_lowercase()),
        "upperAscii" => |cx, args| map(cx, args, |text| text.to_ascii_uppercase()),
        "trim" => |cx, args| map(cx, args, |text| text.trim().to_owned()),
        "strings.quote" => |cx, args| map(cx, args, quote),
        "jsonpatch.escapeKey" => |cx, args| map(cx, args, |text| text.replace('~', "~0").replace('/', "~1")),
        "replace" => replace,
        "split" => split,
        "join" => join,
        "format" => |cx, args| match args {
            [Value::String(text), Value::List(values)] => string_format::format(cx, text, values),
            _ => overload_error(),
        },
        _ => return None,
    })
}

fn out_of_range(index: i64) -> EvalError {
    EvalError::new(format!("index out of range: {index}"))
}

fn test<'a>(args: &[Value<'a>], predicate: impl Fn(&str, &str) -> bool) -> EvalResult<'a> {
    match args {
        [Value::String(text), Value::String(part)] => Ok(Value::Bool(predicate(text, part))),
        _ => overload_error(),
    }
}

fn map<'a>(cx: &mut EvalContext, args: &[Value<'a>], change: impl Fn(&str) -> String) -> EvalResult<'a> {
    match args {
        [Value::String(text)] => {
            cx.cost_tracker.add_bytes(text.len())?;
            cx.text(change(text))
        }
        _ => overload_error(),
    }
}

/// Returns up to `length` characters from `start`. Borrowed text is not copied.
fn substring<'a>(text: &Text<'a>, start: i64, length: usize) -> EvalResult<'a> {
    let mut offsets = text.char_indices().map(|(offset, _)| offset).chain(std::iter::once(text.len()));
    let from = usize::try_from(start).ok().and_then(|start| offsets.nth(start));
    let Some(from) = from else { return Err(out_of_range(start)) };
    let to = match length {
        0 => from,
        length => offsets.nth(length - 1).unwrap_or(text.len()),
    };
    Ok(match text {
        Text::Borrowed(text) => Value::String(Text::Borrowed(&text[from..to])),
        Text::Shared(text) => Value::text(&text[from..to]),
    })
}

/// The index of `part` in `text`. With `last`, the search goes backwards.
pub(super) fn index_of(text: &str, part: &str, offset: Option<i64>, last: bool) -> Result<i64, EvalError> {
    let length = text.chars().count() as i64;
    if part.is_empty() {
        return Ok(offset.unwrap_or(if last { length } else { 0 }));
    }
    let part_length = part.chars().count() as i64;
    if last && offset.is_none() && length < part_length {
        return Ok(-1);
    }
    let offset = offset.unwrap_or(if last { length - 1 } else { 0 });
    if offset < 0 {
        return Err(out_of_range(offset));
    }
    if offset >= length {
        return Ok(-1);
    }
    let char_index = |bytes: usize| text[..bytes].chars().count() as i64;
    let byte_at = |chars: i64| text.char_indices().nth(chars as usize).map_or(text.len(), |(at, _)| at);
    let found = if last {
        // The match must start at or before the offset, but may extend beyond it.
        let end = byte_at(offset.saturating_add(part_length));
        text[..end].rfind(part).map(char_index)
    } else {
        let from = byte_at(offset);
        text[from..].find(part).map(|at| char_index(from + at))
    };
    Ok(found.unwrap_or(-1))
}

fn replace<'a>(cx: &mut EvalContext, args: &[Value<'a>]) -> EvalResult<'a> {
    let (text, old, new, limit) = match args {
        [Value::String(text), Value::String(old), Value::String(new)] => (text, old, new, -1),
        [Value::String(text), Value::String(old), Value::String(new), Value::Int(limit)] => {
            (text, old, new, *limit)
        }
        _ => return overload_error(),
    };
    let max = if limit < 0 { usize::MAX } else { limit as usize };
    let count = if old.is_empty() { text.chars().count() + 1 } else { text.matches(&**old).count() };
    cx.cost_tracker.add_bytes(text.len().saturating_add(count.min(max).saturating_mul(new.len())))?;
    Ok(Value::text(text.replacen(&**old, new, max)))
}

fn split<'a>(cx: &mut EvalContext, args: &[Value<'a>]) -> EvalResult<'a> {
    let (text, separator, limit) = match args {
        [Value::String(text), Value::String(separator)] => (text, separator, -1),
        [Value::String(text), Value::String(separator), Value::Int(limit)] => (text, separator, *limit),
        _ => return overload_error(),
    };
    let max = if limit < 0 { usize::MAX } else { limit as usize };
    if max == 0 {
        return Ok(Value::list(Vec::new()));
    }
    cx.cost_tracker.add_bytes(text.len())?;
    let parts: Vec<&str> = if separator.is_empty() {
        // Splits into characters. If the limit is reached, the rest stays together.
        let mut parts = Vec::new();
        let mut rest: &str = text;
        while let Some(c) = rest.chars().next() {
            if parts.len() + 1 >= max {
                break;
            }
            let (first, after) = rest.split_at(c.len_utf8());
            parts.push(first);
            rest = after;
        }
        if !rest.is_empty() {
            parts.push(rest);
        }
        parts
    } else {
        text.splitn(max, &**separator).collect()
    };
    cx.cost_tracker.add_values(parts.len())?;
    Ok(Value::list(parts.into_iter().map(Value::text).collect()))
}

fn join<'a>(cx: &mut EvalContext, args: &[Value<'a>]) -> EvalResult<'a> {
    let (list, separator) = match args {
        [Value::List(list)] => (list, ""),
        [Value::List(list), Value::String(separator)] => (list, &**separator),
        _ => return overload_error(),
    };
    let mut out = String::new();
    for (index, item) in list.iter().enumerate() {
        let Value::String(text) = &item else {
            return Err(EvalError::new(format!("join: invalid input: {item:?}")));
        };
        let between = if index > 0 { separator } else { "" };
        cx.cost_tracker.add_bytes(between.len() + text.len())?;
        out.push_str(between);
        out.push_str(text);
    }
    Ok(Value::text(out))
}

fn quote(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '\u{7}' => out.push_str("\\a"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{b}' => out.push_str("\\v"),
            '\\' => out.push_str("\\\\"),
            '"' => out.push_str("\\\""),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}
