//! The implementations of functions. The caller has charged their cost; what a function allocates or
//! visits beyond that it accounts for with the [`CostTracker`].

pub(crate) mod address;
mod authz;
mod convert;
mod lists;
mod named;
mod operators;
mod optional;
mod quantity;
pub(crate) mod regex;
mod semver;
mod string_format;
mod strings;
mod timestamps;
mod url;

pub use regex::compile as compile_regex;

use std::collections::HashMap;
use std::sync::Arc;

use crate::eval::EvalResult;
use crate::eval::budget::{CostTracker, EvalError};
use crate::value::Value;
pub use address::{CidrBlock, IpAddress};
pub use named::Format;
pub use semver::Version;
pub use url::Url;

/// A function of evaluated arguments, the receiver first.
pub(crate) type FunctionOp = for<'a> fn(&mut EvalContext, &[Value<'a>]) -> EvalResult<'a>;

/// The state that functions share during an evaluation.
pub(crate) struct EvalContext {
    pub cost_tracker: CostTracker,
    regex_cache: HashMap<String, Arc<::regex::Regex>>,
}

impl EvalContext {
    pub fn new(cost_tracker: CostTracker) -> EvalContext {
        EvalContext { cost_tracker, regex_cache: HashMap::new() }
    }

    /// Compiles a pattern, once per evaluation.
    fn regex(&mut self, pattern: &str) -> Result<Arc<::regex::Regex>, EvalError> {
        if let Some(known) = self.regex_cache.get(pattern) {
            return Ok(known.clone());
        }
        self.cost_tracker.add_steps(pattern.len() as u64 * 50)?;
        let regex = Arc::new(regex::compile_in_expression(pattern).map_err(EvalError::new)?);
        self.regex_cache.insert(pattern.to_owned(), regex.clone());
        Ok(regex)
    }

    fn text<'a>(&mut self, text: String) -> EvalResult<'a> {
        self.cost_tracker.add_bytes(text.len())?;
        Ok(Value::text(text))
    }

    fn equal<'a>(&mut self, a: &Value<'a>, b: &Value<'a>) -> Result<bool, EvalError> {
        let mut work = 0;
        let equal = a.equals(b, &mut work);
        self.cost_tracker.add_steps(work)?;
        Ok(equal)
    }
}

fn overload_error<'a>() -> EvalResult<'a> {
    Err(EvalError::new("no such overload"))
}

/// Whether a list has an item or a map has a key.
pub(crate) fn contains<'a>(cx: &mut EvalContext, item: &Value<'a>, within: &Value<'a>) -> EvalResult<'a> {
    operators::contains(cx, &[item.clone(), within.clone()])
}

/// The implementation of a function; `None` for those that the evaluator implements itself.
pub(crate) fn function_op(name: &str) -> Option<FunctionOp> {
    [
        operators::function_op,
        convert::function_op,
        timestamps::function_op,
        strings::function_op,
        lists::function_op,
        optional::function_op,
        regex::function_op,
        url::function_op,
        quantity::function_op,
        semver::function_op,
        address::function_op,
        named::function_op,
        authz::function_op,
    ]
    .iter()
    .find_map(|module| module(name))
}
