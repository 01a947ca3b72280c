//! The semver library. Upstream parses with github.com/blang/semver.

use std::cmp::Ordering;
use std::sync::Arc;

use super::{FunctionOp, overload_error};
use crate::eval::EvalResult;
use crate::eval::budget::EvalError;
use crate::value::{LibraryValue, Value};

/// A semantic version such as `1.2.3-alpha.1+build`.
#[derive(Debug)]
pub struct Version {
    numbers: [u64; 3],
    pre: Vec<String>,
}

pub(super) fn function_op(name: &str) -> Option<FunctionOp> {
    Some(match name {
        "semver" => |_, args| match read(args) {
            Some(Ok(version)) => Ok(Value::Library(LibraryValue::Version(Arc::new(version)))),
            Some(Err(words)) => Err(EvalError::new(words)),
            None => overload_error(),
        },
        "isSemver" => |_, args| match read(args) {
            Some(read) => Ok(Value::Bool(read.is_ok())),
            None => overload_error(),
        },
        "major" => |_, args| number(args, 0),
        "minor" => |_, args| number(args, 1),
        "patch" => |_, args| number(args, 2),
        _ => return None,
    })
}

fn number<'a>(args: &[Value<'a>], index: usize) -> EvalResult<'a> {
    match args {
        [Value::Library(LibraryValue::Version(version))] => Ok(Value::Int(version.numbers[index] as i64)),
        _ => overload_error(),
    }
}

fn read(args: &[Value<'_>]) -> Option<Result<Version, String>> {
    match args {
        [Value::String(text)] | [Value::String(text), Value::Bool(false)] => Some(Version::parse(text)),
        [Value::String(text), Value::Bool(true)] => {
            Some(normalize(text).and_then(|text| Version::parse(&text)))
        }
        _ => None,
    }
}

/// Removes a leading `v` and leading zeros, and adds missing components.
fn normalize(text: &str) -> Result<String, String> {
    let text = text.strip_prefix('v').unwrap_or(text);
    let mut parts: Vec<String> = text
        .splitn(3, '.')
        .map(|part| {
            let trimmed = part.trim_start_matches('0');
            match trimmed.starts_with(|c: char| c.is_ascii_digit()) {
                true => trimmed.to_owned(),
                false if part.len() > 1 => format!("0{trimmed}"),
                false => part.to_owned(),
            }
        })
        .collect();
    if parts.len() < 3 {
        if parts.last().is_some_and(|part| part.contains(['+', '-'])) {
            return Err("short version cannot contain PreRelease/Build meta data".to_owned());
        }
        parts.resize(3, "0".to_owned());
    }
    Ok(parts.join("."))
}

impl Version {
    pub(crate) fn parse(text: &str) -> Result<Version, String> {
        if text.is_empty() {
            return Err("Version string empty".to_owned());
        }
        let parts: Vec<&str> = text.splitn(3, '.').collect();
        let [major, minor, rest] = parts[..] else {
            return Err("No Major.Minor.Patch elements found".to_owned());
        };
        let (rest, build) = match rest.split_once('+') {
            Some((rest, build)) => (rest, Some(build)),
            None => (rest, None),
        };
        let (patch, pre) = match rest.split_once('-') {
            Some((patch, pre)) => (patch, Some(pre)),
            None => (rest, None),
        };
        let numbers =
            [parse_number("major", major)?, parse_number("minor", minor)?, parse_number("patch", patch)?];
        let pre: Vec<String> = pre.map_or_else(Vec::new, |pre| pre.split('.').map(str::to_owned).collect());
        for part in &pre {
            if part.is_empty() {
                return Err("Prerelease is empty".to_owned());
            }
            if is_number(part) && part.len() > 1 && part.starts_with('0') {
                return Err(format!("Numeric PreRelease version must not contain leading zeroes {part:?}"));
            }
            if !is_word(part) {
                return Err(format!("Invalid character(s) found in prerelease {part:?}"));
            }
        }
        for part in build.into_iter().flat_map(|build| build.split('.')) {
            if part.is_empty() {
                return Err("Build meta data is empty".to_owned());
            }
            if !is_word(part) {
                return Err(format!("Invalid character(s) found in build meta data {part:?}"));
            }
        }
        Ok(Version { numbers, pre })
    }

    /// Compares by version precedence, which ignores build metadata.
    pub(crate) fn compare(&self, other: &Version) -> Ordering {
        self.numbers.cmp(&other.numbers).then_with(|| match (self.pre.is_empty(), other.pre.is_empty()) {
            (true, true) => Ordering::Equal,
            (true, false) => Ordering::Greater,
            (false, true) => Ordering::Less,
            (false, false) => {
                let parts = self.pre.iter().zip(&other.pre).map(|(a, b)| compare_parts(a, b));
                parts.fold(Ordering::Equal, Ordering::then).then(self.pre.len().cmp(&other.pre.len()))
            }
        })
    }
}

fn compare_parts(a: &str, b: &str) -> Ordering {
    match (is_number(a), is_number(b)) {
        (true, true) => a.len().cmp(&b.len()).then_with(|| a.cmp(b)),
        (true, false) => Ordering::Less,
        (false, true) => Ordering::Greater,
        (false, false) => a.cmp(b),
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn is_word(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

fn parse_number(name: &str, text: &str) -> Result<u64, String> {
    let title = format!("{}{}", name[..1].to_uppercase(), &name[1..]);
    if !is_number(text) {
        return Err(format!("Invalid character(s) found in {name} number {text:?}"));
    }
    if text.len() > 1 && text.starts_with('0') {
        return Err(format!("{title} number must not contain leading zeroes {text:?}"));
    }
    text.parse().map_err(|_| format!("strconv.ParseUint: parsing {text:?}: value out of range"))
}
