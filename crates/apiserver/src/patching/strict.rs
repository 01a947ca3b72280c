//! What strict field validation has against a patch itself, before it is applied: fields that stand twice.

use std::collections::HashSet;
use std::fmt::{self, Write as _};

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

/// Upstream stops collecting complaints here.
const MOST: usize = 100;

/// The complaints about a JSON text; what is no JSON is for others to say.
pub fn complaints(text: &[u8], operations: bool) -> Vec<String> {
    let mut found = Found { path: String::new(), operations, depth: 0, complaints: Vec::new() };
    let _ = Walk(&mut found).deserialize(&mut serde_json::Deserializer::from_slice(text));
    found.complaints
}

struct Found {
    path: String,
    /// The text is a JSON patch, whose operations have no other fields than these.
    operations: bool,
    depth: usize,
    complaints: Vec<String>,
}

const OPERATION: [&str; 4] = ["op", "path", "from", "value"];

impl Found {
    fn complain(&mut self, what: &str) {
        let of = if self.operations { "json patch " } else { "" };
        let complaint = format!("{of}{what} field {:?}", self.path);
        if self.complaints.len() < MOST && !self.complaints.contains(&complaint) {
            self.complaints.push(complaint);
        }
    }
}

struct Walk<'f>(&'f mut Found);

impl<'de> DeserializeSeed<'de> for Walk<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Walk<'_> {
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
            let more = items.next_element_seed(Walk(self.0))?;
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
        let is_operation = self.0.operations && self.0.depth == 1;
        self.0.depth += 1;
        let mut seen = HashSet::new();
        while let Some(name) = fields.next_key::<String>()? {
            let dot = if length == 0 { "" } else { "." };
            let _ = write!(self.0.path, "{dot}{name}");
            if is_operation && !OPERATION.contains(&name.as_str()) {
                self.0.complain("unknown");
            } else if !seen.insert(name) {
                self.0.complain("duplicate");
            }
            fields.next_value_seed(Walk(self.0))?;
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
    fn check(operations: bool, text: &str, expected: &[&str]) {
        assert_eq!(complaints(text.as_bytes(), operations), expected, "{text}");
    }

    #[test]
    fn fields_that_stand_twice() {
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
