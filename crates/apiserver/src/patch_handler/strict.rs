//! Strict field validation of a patch itself before it is applied: duplicate fields, and unknown
//! fields of JSON patch operations.

use std::collections::HashSet;
use std::fmt::{self, Write as _};

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

/// Upstream stops collecting errors at this number.
const MAX_ERRORS: usize = 100;

/// The strict decoding errors of a JSON text. Invalid JSON is reported elsewhere.
pub fn strict_errors(text: &[u8], is_json_patch: bool) -> Vec<String> {
    let mut collector = ErrorCollector { path: String::new(), is_json_patch, depth: 0, errors: Vec::new() };
    let _ = StrictVisitor(&mut collector).deserialize(&mut serde_json::Deserializer::from_slice(text));
    collector.errors
}

struct ErrorCollector {
    path: String,
    /// The text is a JSON patch, whose operations allow only `OPERATION_FIELDS`.
    is_json_patch: bool,
    depth: usize,
    errors: Vec<String>,
}

const OPERATION_FIELDS: [&str; 4] = ["op", "path", "from", "value"];

impl ErrorCollector {
    fn add_error(&mut self, what: &str) {
        let of = if self.is_json_patch { "json patch " } else { "" };
        let error = format!("{of}{what} field {:?}", self.path);
        if self.errors.len() < MAX_ERRORS && !self.errors.contains(&error) {
            self.errors.push(error);
        }
    }
}

struct StrictVisitor<'f>(&'f mut ErrorCollector);

impl<'de> DeserializeSeed<'de> for StrictVisitor<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for StrictVisitor<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let length = self.0.path.len();
        self.0.depth += 1;
        for index in 0.. {
            let _ = write!(self.0.path, "[{index}]");
            let more = items.next_element_seed(StrictVisitor(self.0))?;
            self.0.path.truncate(length);
            if more.is_none() {
                break;
            }
        }
        self.0.depth -= 1;
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<(), A::Error> {
        let length = self.0.path.len();
        let is_operation = self.0.is_json_patch && self.0.depth == 1;
        self.0.depth += 1;
        let mut seen = HashSet::new();
        while let Some(name) = fields.next_key::<String>()? {
            let dot = if length == 0 { "" } else { "." };
            let _ = write!(self.0.path, "{dot}{name}");
            if is_operation && !OPERATION_FIELDS.contains(&name.as_str()) {
                self.0.add_error("unknown");
            } else if !seen.insert(name) {
                self.0.add_error("duplicate");
            }
            fields.next_value_seed(StrictVisitor(self.0))?;
            self.0.path.truncate(length);
        }
        self.0.depth -= 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(is_json_patch: bool, text: &str, expected: &[&str]) {
        assert_eq!(strict_errors(text.as_bytes(), is_json_patch), expected, "{text}");
    }

    #[test]
    fn reports_duplicate_fields() {
        check(false, r#"{"a":1,"b":{"a":1}}"#, &[]);
        check(
            false,
            r#"{"a":1,"a":{"b":[{"c":1},{"c":1,"c":2,"c":3}]}}"#,
            &["duplicate field \"a\"", "duplicate field \"a.b[1].c\""],
        );
        check(false, r#"{"a":1,"a":"#, &["duplicate field \"a\""]);
        check(
            true,
            r#"[{"op":"add","op":"add","why":1,"path":"/a","value":{"x":1,"x":2,"y":3}}]"#,
            &[
                "json patch duplicate field \"[0].op\"",
                "json patch unknown field \"[0].why\"",
                "json patch duplicate field \"[0].value.x\"",
            ],
        );
    }
}
