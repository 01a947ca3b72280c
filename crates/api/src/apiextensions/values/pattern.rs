//! The patterns of a schema, ready to be used. Whatever the pattern, matching takes time linear in the text.

use std::collections::HashMap;

use regex::Regex;
use serde_json::Value;

/// The patterns of a schema by their text. One that cannot be used lets everything pass, as it is the
/// definition's fault and not the object's.
#[derive(Debug, Default)]
pub struct Patterns(HashMap<String, Option<Regex>>);

impl Patterns {
    pub fn of(schema: &Value) -> Patterns {
        let mut patterns = Patterns::default();
        patterns.collect(schema);
        patterns
    }

    pub fn matches(&self, pattern: &str, text: &str) -> bool {
        self.0.get(pattern).and_then(Option::as_ref).is_none_or(|regex| regex.is_match(text))
    }

    fn collect(&mut self, schema: &Value) {
        match schema {
            Value::Object(map) => {
                if let Some(Value::String(pattern)) = map.get("pattern")
                    && !self.0.contains_key(pattern)
                {
                    self.0.insert(pattern.clone(), cel::compile_regex(pattern).ok());
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
        let regex = cel::compile_regex(pattern).unwrap();
        yes.iter().for_each(|text| assert!(regex.is_match(text), "{pattern} {text}"));
        no.iter().for_each(|text| assert!(!regex.is_match(text), "{pattern} {text}"));
    }

    #[test]
    fn patterns_are_gos() {
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
        assert!(cel::compile_regex("(").is_err());
        assert!(Patterns::of(&serde_json::json!({"pattern": "("})).matches("(", "x"));
    }
}
