//! Resolves field paths such as `.spec.ports['http']` in a schema.

use serde_json::Value;

use crate::json::JsonExt;

/// Returns the schema at a field path such as `.spec.ports['http']`.
pub(super) fn field_at<'a>(path: &str, schema: &'a Value, brackets: bool) -> Result<&'a Value, String> {
    let mut tokens = PathTokens(path);
    let mut schema = schema;
    while let Some(token) = tokens.next() {
        let end = || "unexpected end of JSON path".to_owned();
        let name = match token {
            "[" if !brackets => return Err("array notation is not allowed".to_owned()),
            "[" => {
                let quoted = tokens.next().ok_or_else(end)?;
                let inside = quoted.strip_prefix('\'').and_then(|rest| rest.strip_suffix('\''));
                let Some(inside) = inside else {
                    return Err(format!("expected single quoted string but got {quoted}"));
                };
                let close = tokens.next().ok_or_else(end)?;
                if close != "]" {
                    return Err(format!("expected ] but got {close}"));
                }
                inside.replace("\\'", "'").replace("\\\\", "\\")
            }
            "." => tokens.next().ok_or_else(end)?.to_owned(),
            other => return Err(format!("expected [ or . but got: {other}")),
        };
        let invalid_field = || "does not refer to a valid field".to_owned();
        schema = if schema.entries("properties").next().is_some() {
            schema.at("properties").get(&name).ok_or_else(invalid_field)?
        } else if schema.has("additionalProperties") {
            schema.at("additionalProperties")
        } else {
            return Err(invalid_field());
        };
    }
    Ok(schema)
}

/// Splits a path into tokens: `.`, `[`, `]`, names and quoted strings.
struct PathTokens<'a>(&'a str);

impl<'a> Iterator for PathTokens<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        let length = if self.0.starts_with('\'') {
            let mut escaped = false;
            let closing = self.0.char_indices().skip(1).find(|(_, c)| {
                let closes = *c == '\'' && !escaped;
                escaped = *c == '\\';
                closes
            });
            closing.map_or(self.0.len(), |(i, _)| i + 1)
        } else {
            match self.0.find(['.', '[', ']']) {
                Some(0) => 1,
                Some(i) => i,
                None => self.0.len(),
            }
        };
        let (token, rest) = self.0.split_at(length);
        self.0 = rest;
        (!token.is_empty()).then_some(token)
    }
}
