//! Field selectors such as `metadata.name=web,status.phase!=Failed`.

use std::fmt;

use super::SelectorError;

/// A field selector: all terms must match.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FieldSelector {
    terms: Vec<FieldTerm>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldTerm {
    pub field: String,
    pub value: String,
    /// `!=`
    pub not_equal: bool,
}

impl FieldSelector {
    pub fn parse(text: &str) -> Result<FieldSelector, SelectorError> {
        let mut parts = split_terms(text);
        parts.sort_unstable();
        let term = |part: &&str| {
            let Some((field, not_equal, value)) = split_term(part) else {
                let message = format!("invalid selector: '{text}'; can't understand '{part}'");
                return Err(SelectorError(message));
            };
            Ok(FieldTerm { field: field.to_owned(), value: unescape(value)?, not_equal })
        };
        let terms = parts.iter().filter(|part| !part.is_empty()).map(term).collect::<Result<_, _>>()?;
        Ok(FieldSelector { terms })
    }

    /// Whether the selector matches; `get` returns the value of a field. Absent fields are empty.
    pub fn matches<'a>(&self, get: impl Fn(&str) -> Option<&'a str>) -> bool {
        self.terms.iter().all(|term| (get(&term.field).unwrap_or("") == term.value) != term.not_equal)
    }

    pub fn is_everything(&self) -> bool {
        self.terms.is_empty()
    }

    pub fn terms(&self) -> &[FieldTerm] {
        &self.terms
    }

    /// The value that the selector requires for a field, if there is one.
    pub fn exact(&self, field: &str) -> Option<&str> {
        self.terms.iter().find(|term| term.field == field && !term.not_equal).map(|term| term.value.as_str())
    }
}

impl fmt::Display for FieldSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, term) in self.terms.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            let operator = if term.not_equal { "!=" } else { "=" };
            write!(f, "{comma}{}{operator}{}", term.field, escape(&term.value))?;
        }
        Ok(())
    }
}

/// Escapes a value for a field selector.
pub fn escape(value: &str) -> String {
    value.replace('\\', r"\\").replace(',', r"\,").replace('=', r"\=")
}

fn unescape(text: &str) -> Result<String, SelectorError> {
    let bad_escape = |sequence: &str| {
        SelectorError(format!("invalid field selector: invalid escape sequence: {sequence}"))
    };
    let mut value = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => match chars.next() {
                Some(escaped @ ('\\' | ',' | '=')) => value.push(escaped),
                Some(other) => return Err(bad_escape(&format!("\\{other}"))),
                None => return Err(bad_escape("\\")),
            },
            // Upstream prints the code point as a number.
            ',' | '=' => {
                let number = u32::from(c);
                let message = format!("invalid field selector: unescaped character in value: {number}");
                return Err(SelectorError(message));
            }
            other => value.push(other),
        }
    }
    Ok(value)
}

/// Splits at unescaped commas.
fn split_terms(text: &str) -> Vec<&str> {
    let mut terms = Vec::new();
    let (mut start, mut escaped) = (0, false);
    for (i, c) in text.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            ',' => {
                terms.push(&text[start..i]);
                start = i + 1;
            }
            _ => {}
        }
    }
    terms.push(&text[start..]);
    terms
}

/// Splits a term into field, negation and value.
fn split_term(term: &str) -> Option<(&str, bool, &str)> {
    let at = (0..term.len()).find(|&i| term.is_char_boundary(i) && is_operator(&term[i..]))?;
    let (field, rest) = term.split_at(at);
    let not_equal = rest.starts_with("!=");
    let long = not_equal || rest.starts_with("==");
    Some((field, not_equal, &rest[if long { 2 } else { 1 }..]))
}

fn is_operator(text: &str) -> bool {
    text.starts_with('=') || text.starts_with("!=")
}
