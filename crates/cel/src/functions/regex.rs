//! Regular expressions of Go's syntax, by the `regex` crate, which takes linear time as well.

mod syntax;

use ::regex::{Regex, RegexBuilder};

use super::{FunctionOp, overload_error};
use crate::value::Value;

/// Bytes of a compiled pattern that an expression may name or compute.
const EXPRESSION_SIZE_LIMIT: usize = 1 << 20;
/// Bytes of the cache that matching fills.
const DFA_SIZE_LIMIT: usize = 1 << 20;

pub(super) fn function_op(name: &str) -> Option<FunctionOp> {
    Some(match name {
        "matches" => |cx, args| match args {
            [Value::String(text), Value::String(pattern)] => {
                let regex = cx.regex(pattern)?;
                cx.cost_tracker.add_steps(text.len() as u64 / 16)?;
                Ok(Value::Bool(regex.is_match(text)))
            }
            _ => overload_error(),
        },
        "find" => |cx, args| match args {
            [Value::String(text), Value::String(pattern)] => {
                let regex = cx.regex(pattern)?;
                cx.text(regex.find(text).map_or("", |found| found.as_str()).to_owned())
            }
            _ => overload_error(),
        },
        "findAll" => |cx, args| {
            let (text, pattern, most) = match args {
                [Value::String(text), Value::String(pattern)] => (text, pattern, -1),
                [Value::String(text), Value::String(pattern), Value::Int(most)] => (text, pattern, *most),
                _ => return overload_error(),
            };
            let regex = cx.regex(pattern)?;
            let most = if most < 0 { usize::MAX } else { most as usize };
            let found: Vec<&str> = regex.find_iter(text).take(most).map(|found| found.as_str()).collect();
            cx.cost_tracker.add_values(found.len())?;
            cx.cost_tracker.add_bytes(text.len())?;
            Ok(Value::list(found.into_iter().map(Value::text).collect()))
        },
        _ => return None,
    })
}

/// Compiles a pattern that an expression names.
pub fn compile_in_expression(pattern: &str) -> Result<Regex, String> {
    compile(pattern, EXPRESSION_SIZE_LIMIT).map_err(|error| format!("Illegal regex: {error}"))
}

/// Compiles a pattern as Go reads it. `size_limit` is in bytes of the compiled pattern.
pub fn compile(pattern: &str, size_limit: usize) -> Result<Regex, String> {
    let failed = |code: &str| format!("error parsing regexp: {code}: `{pattern}`");
    RegexBuilder::new(&syntax::parse(pattern).map_err(|error| error.to_string())?)
        .size_limit(size_limit)
        .dfa_size_limit(DFA_SIZE_LIMIT)
        // Groups that do not capture count here, but not for Go.
        .nest_limit(4 * syntax::MAX_HEIGHT)
        .build()
        .map_err(|error| match error {
            ::regex::Error::CompiledTooBig(_) => failed("expression too large"),
            // Only the last line of the description says what is wrong; the others draw it.
            error => {
                let message = error.to_string();
                failed(message.lines().last().unwrap_or_default().trim_start_matches("error: "))
            }
        })
}
