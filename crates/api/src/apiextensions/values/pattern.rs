//! The patterns of a schema, ready to be used. Whatever the pattern, matching takes time linear in the text.

use std::collections::HashMap;

use regex::{Regex, RegexBuilder};
use serde_json::Value;

/// A compiled pattern may not be larger than this.
const SIZE: usize = 4 << 20;

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
                    self.0.insert(pattern.clone(), compile(pattern).ok());
                }
                map.values().for_each(|value| self.collect(value));
            }
            Value::Array(items) => items.iter().for_each(|value| self.collect(value)),
            _ => {}
        }
    }
}

/// Compiles a pattern as Go reads it.
pub fn compile(pattern: &str) -> Result<Regex, regex::Error> {
    RegexBuilder::new(&translated(pattern)).size_limit(SIZE).build()
}

/// Go's `\d`, `\w` and `\s` are ASCII's, and `\Q…\E` is literal text.
fn translated(pattern: &str) -> String {
    let mut out = String::with_capacity(pattern.len());
    let mut chars = pattern.chars();
    let mut in_class = false;
    while let Some(c) = chars.next() {
        match c {
            '\\' => {
                let Some(next) = chars.next() else {
                    out.push('\\');
                    break;
                };
                let class = match next {
                    'd' => "0-9",
                    'w' => "0-9A-Za-z_",
                    's' => "\\t\\n\\f\\r ",
                    'Q' => {
                        let rest = chars.as_str();
                        let (literal, after) = rest.split_once("\\E").unwrap_or((rest, ""));
                        out.push_str(&regex::escape(literal));
                        chars = after.chars();
                        continue;
                    }
                    'D' | 'W' | 'S' => {
                        let class = match next {
                            'D' => "^0-9",
                            'W' => "^0-9A-Za-z_",
                            _ => "^\\t\\n\\f\\r ",
                        };
                        out.push_str(&format!("[{class}]"));
                        continue;
                    }
                    other => {
                        out.push('\\');
                        out.push(other);
                        continue;
                    }
                };
                match in_class {
                    true => out.push_str(class),
                    false => out.push_str(&format!("[{class}]")),
                }
            }
            '[' if in_class => {
                // Go takes an inner bracket for itself, unless it begins a named class.
                let named = chars.as_str().starts_with(':');
                out.push_str(if named { "[" } else { "\\[" });
                if named && let Some((name, rest)) = chars.as_str().split_once(":]") {
                    out.push_str(name);
                    out.push_str(":]");
                    chars = rest.chars();
                }
            }
            '[' => {
                in_class = true;
                out.push('[');
                for first in ['^', ']'] {
                    if chars.as_str().starts_with(first) {
                        out.push_str(if first == ']' { "\\]" } else { "^" });
                        chars.next();
                    }
                }
            }
            ']' if in_class => {
                in_class = false;
                out.push(']');
            }
            '&' | '~' if in_class => {
                out.push('\\');
                out.push(c);
            }
            other => out.push(other),
        }
    }
    out
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
        assert!(compile("(").is_err());
        assert!(Patterns::of(&serde_json::json!({"pattern": "("})).matches("(", "x"));
    }
}
