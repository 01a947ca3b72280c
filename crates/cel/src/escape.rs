//! Escapes property names that are not valid CEL identifiers.

const RESERVED_NAMES: &[&str] = &[
    "true",
    "false",
    "null",
    "in",
    "as",
    "break",
    "const",
    "continue",
    "else",
    "for",
    "function",
    "if",
    "import",
    "let",
    "loop",
    "package",
    "namespace",
    "return",
    "var",
    "void",
    "while",
];

/// Whether the name is a reserved word of CEL.
pub fn is_reserved(name: &str) -> bool {
    RESERVED_NAMES.contains(&name)
}

const ESCAPE_SEQUENCES: &[(&str, &str)] =
    &[("__", "underscores"), (".", "dot"), ("-", "dash"), ("/", "slash")];

/// Returns the identifier of a property: `x__dot__y` for `x.y`, `__namespace__` for `namespace`. `None`
/// if the name cannot be escaped, so that expressions cannot use the property.
pub fn escape(name: &str) -> Option<String> {
    if name.is_empty() || name.starts_with(|c: char| c.is_ascii_digit()) {
        return None;
    }
    if is_reserved(name) {
        return Some(format!("__{name}__"));
    }
    let mut out = String::with_capacity(name.len());
    let mut rest = name;
    while let Some(c) = rest.chars().next() {
        if let Some((text, word)) = ESCAPE_SEQUENCES.iter().find(|(text, _)| rest.starts_with(text)) {
            out.push_str("__");
            out.push_str(word);
            out.push_str("__");
            rest = &rest[text.len()..];
        } else if c.is_ascii_alphanumeric() || c == '_' {
            out.push(c);
            rest = &rest[1..];
        } else {
            return None;
        }
    }
    Some(out)
}

/// Returns the property of an identifier; `None` if it contains unknown escape sequences.
pub fn unescape(identifier: &str) -> Option<String> {
    let mut out = String::with_capacity(identifier.len());
    let mut rest = identifier;
    while let Some(start) = rest.find("__") {
        let inner = &rest[start + 2..];
        let length = inner.find('_').filter(|length| *length > 0 && inner[*length..].starts_with("__"));
        let Some(length) = length else {
            // Not the start of an escape sequence, so the underscore is literal.
            out.push_str(&rest[..=start]);
            rest = &rest[start + 1..];
            continue;
        };
        let word = &inner[..length];
        out.push_str(&rest[..start]);
        match ESCAPE_SEQUENCES.iter().find(|(_, name)| *name == word) {
            Some((text, _)) => out.push_str(text),
            None if is_reserved(word) && identifier.len() == length + 4 => out.push_str(word),
            None => return None,
        }
        rest = &inner[length + 2..];
    }
    out.push_str(rest);
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(name: &str, escaped: &str) {
        assert_eq!(escape(name).as_deref(), Some(escaped));
        assert_eq!(unescape(escaped).as_deref(), Some(name));
    }

    #[test]
    fn escape_property_names() {
        check("a", "a");
        check("namespace", "__namespace__");
        check("x.y", "x__dot__y");
        check("a-b/c", "a__dash__b__slash__c");
        check("a__b", "a__underscores__b");
        check("a_b", "a_b");
        assert_eq!(escape("1a"), None);
        assert_eq!(escape("a b"), None);
        assert_eq!(unescape("a__nothing__b"), None);
    }
}
