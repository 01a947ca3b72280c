//! The compiled patterns of a schema. Matching takes linear time for any pattern.

use std::collections::HashMap;

use regex::Regex;
use serde_json::Value;

/// Maximum size of a compiled pattern. Go has no explicit limit; its compiled patterns end at 128 MiB.
const MAX_REGEX_BYTES: usize = 64 << 20;

/// Compiles a pattern with Go's syntax. The error has Go's text.
pub fn compile(pattern: &str) -> Result<Regex, String> {
    cel::compile_regex(pattern, MAX_REGEX_BYTES)
}

/// The compiled patterns of a schema by their text.
#[derive(Debug, Default)]
pub struct Patterns(HashMap<String, Result<Regex, String>>);

impl Patterns {
    pub fn from_schema(schema: &Value) -> Patterns {
        let mut patterns = Patterns::default();
        patterns.collect(schema);
        patterns
    }

    /// The pattern for the error message if `text` does not match. A pattern that does not compile
    /// matches nothing; only CRDs stored before patterns were validated can have one.
    pub fn mismatch(&self, pattern: &str, text: &str) -> Option<String> {
        match self.0.get(pattern)? {
            Ok(regex) if regex.is_match(text) => None,
            Ok(_) => Some(pattern.to_owned()),
            Err(error) => Some(format!("{pattern}, but pattern is invalid: {error}")),
        }
    }

    fn collect(&mut self, schema: &Value) {
        match schema {
            Value::Object(map) => {
                if let Some(Value::String(pattern)) = map.get("pattern")
                    && !self.0.contains_key(pattern)
                {
                    self.0.insert(pattern.clone(), compile(pattern));
                }
                map.values().for_each(|value| self.collect(value));
            }
            Value::Array(items) => items.iter().for_each(|value| self.collect(value)),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(pattern: &str, yes: &[&str], no: &[&str]) {
        let regex = compile(pattern).unwrap();
        yes.iter().for_each(|text| assert!(regex.is_match(text), "{pattern} {text}"));
        no.iter().for_each(|text| assert!(!regex.is_match(text), "{pattern} {text}"));
    }

    #[test]
    fn patterns_match_like_go() {
        check(r"^\d+$", &["12"], &["", "٣", "a"]);
        check(r"^[\w.-]+$", &["a_b.c-9"], &["é", ""]);
        check(r"^\S+$", &["a"], &["a b"]);
        check(r"^[^\s]+$", &["a"], &["a b"]);
        check(r"^[[:alpha:]]$", &["a"], &["1"]);
        check(r"^[]a]$", &["]", "a"], &["b"]);
        check(r"^[[]$", &["["], &["a"]);
        check(r"^\Qa.b\E$", &["a.b"], &["axb"]);
        check(r"^[&&~~]$", &["&", "~"], &["a"]);
        check(r"^(\d{1,3}\.){3}\d{1,3}$", &["10.0.0.1"], &["10.0.0"]);
        check(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$", &["a.b-c"], &["-a"]);
        let patterns = Patterns::from_schema(&serde_json::json!({"pattern": "("}));
        let error = "(, but pattern is invalid: error parsing regexp: missing closing ): `(`";
        assert_eq!(patterns.mismatch("(", "x").as_deref(), Some(error));
    }
}
