//! Regular expressions in Go's syntax (RE2), implemented with the `regex` crate. Both match in linear
//! time.

mod syntax;

use ::regex::{Regex, RegexBuilder};

use super::{FunctionOp, overload_error};
use crate::value::Value;

/// The size limit of a compiled pattern in an expression, in bytes.
const EXPRESSION_SIZE_LIMIT: usize = 1 << 20;
/// The size limit of the lazy DFA's cache, in bytes.
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

/// Compiles a pattern in an expression.
pub fn compile_in_expression(pattern: &str) -> Result<Regex, String> {
    compile(pattern, EXPRESSION_SIZE_LIMIT).map_err(|error| format!("Illegal regex: {error}"))
}

/// Compiles a pattern in Go's syntax. `size_limit` limits the size of the compiled pattern in bytes.
pub fn compile(pattern: &str, size_limit: usize) -> Result<Regex, String> {
    let failed = |code: &str| format!("error parsing regexp: {code}: `{pattern}`");
    RegexBuilder::new(&syntax::parse(pattern).map_err(|error| error.to_string())?)
        .size_limit(size_limit)
        .dfa_size_limit(DFA_SIZE_LIMIT)
        // Non-capturing groups count towards this limit, but not towards Go's.
        .nest_limit(4 * syntax::MAX_HEIGHT)
        .build()
        .map_err(|error| match error {
            ::regex::Error::CompiledTooBig(_) => failed("expression too large"),
            // The last line of the message has the error; the others show its position.
            error => {
                let message = error.to_string();
                failed(message.lines().last().unwrap_or_default().trim_start_matches("error: "))
            }
        })
}
