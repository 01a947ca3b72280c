//! Regular expressions of RE2's syntax, by the `regex` crate, which takes linear time as well. Where the two read
//! a pattern differently it is rewritten: RE2's `\d`, `\w`, `\s` and `\b` know ASCII only, and its classes do not
//! nest.

mod complaint;

use ::regex::{Regex, RegexBuilder};

pub use complaint::complaint;

use super::{Native, no_such_overload};
use crate::value::Value;

/// Bytes of a compiled pattern.
const LARGEST: usize = 1 << 20;

pub(super) fn native(name: &str) -> Option<Native> {
    Some(match name {
        "matches" => |cx, args| match args {
            [Value::String(text), Value::String(pattern)] => {
                let regex = cx.regex(pattern)?;
                cx.meter.steps(text.len() as u64 / 16)?;
                Ok(Value::Bool(regex.is_match(text)))
            }
            _ => no_such_overload(),
        },
        "find" => |cx, args| match args {
            [Value::String(text), Value::String(pattern)] => {
                let regex = cx.regex(pattern)?;
                cx.text(regex.find(text).map_or("", |found| found.as_str()).to_owned())
            }
            _ => no_such_overload(),
        },
        "findAll" => |cx, args| {
            let (text, pattern, most) = match args {
                [Value::String(text), Value::String(pattern)] => (text, pattern, -1),
                [Value::String(text), Value::String(pattern), Value::Int(most)] => (text, pattern, *most),
                _ => return no_such_overload(),
            };
            let regex = cx.regex(pattern)?;
            let most = if most < 0 { usize::MAX } else { most as usize };
            let found: Vec<&str> = regex.find_iter(text).take(most).map(|found| found.as_str()).collect();
            cx.meter.values(found.len())?;
            cx.meter.bytes(text.len())?;
            Ok(Value::list(found.into_iter().map(Value::text).collect()))
        },
        _ => return None,
    })
}

/// Compiles a pattern as RE2 reads it; says what is wrong with one that is none.
pub fn compile(pattern: &str) -> Result<Regex, String> {
    if let Some(words) = complaint(pattern) {
        return Err(format!("Illegal regex: {words}"));
    }
    RegexBuilder::new(&translated(pattern)).size_limit(LARGEST).dfa_size_limit(LARGEST).build().map_err(
        |error| {
            match error {
                ::regex::Error::CompiledTooBig(_) => "Illegal regex: expression too large".to_owned(),
                // Only the last line of the description says what is wrong; the others draw it.
                error => {
                    let words = error.to_string();
                    let reason =
                        words.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned();
                    format!("Illegal regex: error parsing regexp: {reason}: `{pattern}`")
                }
            }
        },
    )
}

fn translated(pattern: &str) -> String {
    let mut out = String::with_capacity(pattern.len() + 16);
    let mut chars = pattern.chars().peekable();
    let mut in_class = false;
    let mut class_start = false;
    while let Some(c) = chars.next() {
        let first_in_class = std::mem::take(&mut class_start);
        match c {
            '\\' => match chars.next() {
                Some('d') => out.push_str("[0-9]"),
                Some('D') => out.push_str("[^0-9]"),
                Some('w') => out.push_str("[0-9A-Za-z_]"),
                Some('W') => out.push_str("[^0-9A-Za-z_]"),
                Some('s') => out.push_str(r"[\t\n\x0C\r ]"),
                Some('S') => out.push_str(r"[^\t\n\x0C\r ]"),
                Some('b') if !in_class => out.push_str(r"(?-u:\b)"),
                Some('B') if !in_class => out.push_str(r"(?-u:\B)"),
                Some('Q') if !in_class => {
                    // Everything up to `\E` stands for itself.
                    let mut literal = String::new();
                    while let Some(c) = chars.next() {
                        if c == '\\' && chars.peek() == Some(&'E') {
                            chars.next();
                            break;
                        }
                        literal.push(c);
                    }
                    out.push_str(&::regex::escape(&literal));
                }
                Some(other) => out.extend(['\\', other]),
                None => out.push('\\'),
            },
            '[' if !in_class => {
                in_class = true;
                class_start = true;
                out.push('[');
                if chars.peek() == Some(&'^') {
                    chars.next();
                    out.push('^');
                }
            }
            '[' if chars.peek() == Some(&':') => out.push('['),
            '[' => out.push_str(r"\["),
            ']' if in_class && first_in_class => out.push_str(r"\]"),
            ']' if in_class => {
                // `[:alpha:]` closes itself first.
                in_class = out.ends_with(':')
                    && out.rfind("[:").is_some_and(|open| open > out.rfind(']').map_or(0, |at| at));
                out.push(']');
            }
            '&' | '~' if in_class => out.extend(['\\', c]),
            c => out.push(c),
        }
    }
    out
}
