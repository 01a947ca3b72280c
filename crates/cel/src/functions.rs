//! What the functions do. Arguments have been paid for already; what a function makes or looks at beyond that it
//! tells the meter.

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
mod strings;
mod template;
mod timestamps;
mod url;

pub use regex::compile as compile_regex;

use std::collections::HashMap;
use std::sync::Arc;

use crate::eval::Evaluated;
use crate::eval::budget::{Failure, Meter};
use crate::value::Value;
pub use address::{Address, Block};
pub use named::Format;
pub use semver::Version;
pub use url::Web;

/// A function over evaluated arguments, the receiver first.
pub(crate) type Native = for<'a> fn(&mut Cx, &[Value<'a>]) -> Evaluated<'a>;

/// What functions share during one evaluation.
pub(crate) struct Cx {
    pub meter: Meter,
    regexes: HashMap<String, Arc<::regex::Regex>>,
}

impl Cx {
    pub fn new(meter: Meter) -> Cx {
        Cx { meter, regexes: HashMap::new() }
    }

    /// The compiled pattern, compiled once.
    fn regex(&mut self, pattern: &str) -> Result<Arc<::regex::Regex>, Failure> {
        if let Some(known) = self.regexes.get(pattern) {
            return Ok(known.clone());
        }
        self.meter.steps(pattern.len() as u64 * 50)?;
        let regex = Arc::new(regex::compile_in_expression(pattern).map_err(Failure::error)?);
        self.regexes.insert(pattern.to_owned(), regex.clone());
        Ok(regex)
    }

    fn text<'a>(&mut self, text: String) -> Evaluated<'a> {
        self.meter.bytes(text.len())?;
        Ok(Value::text(text))
    }

    fn equal<'a>(&mut self, a: &Value<'a>, b: &Value<'a>) -> Result<bool, Failure> {
        let mut work = 0;
        let equal = a.equals(b, &mut work);
        self.meter.steps(work)?;
        Ok(equal)
    }
}

fn no_such_overload<'a>() -> Evaluated<'a> {
    Err(Failure::error("no such overload"))
}

/// Whether a list or map has the item.
pub(crate) fn contains<'a>(cx: &mut Cx, item: &Value<'a>, within: &Value<'a>) -> Evaluated<'a> {
    operators::contains(cx, &[item.clone(), within.clone()])
}

/// The code of a function; none for those that evaluation itself knows.
pub(crate) fn native(name: &str) -> Option<Native> {
    [
        operators::native,
        convert::native,
        timestamps::native,
        strings::native,
        lists::native,
        optional::native,
        regex::native,
        url::native,
        quantity::native,
        semver::native,
        address::native,
        named::native,
        authz::native,
    ]
    .iter()
    .find_map(|module| module(name))
}
