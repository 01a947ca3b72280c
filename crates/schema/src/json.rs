//! Writes JSON values as text, and finds the members of a stored object without decoding them.
//!
//! `serde_json`'s writer is generic over type and sink and takes four times as long. Every stored
//! object is written once and scanned once.

use std::io::Write as _;
use std::ops::Range;

use serde_json::Value;

/// Appends a value. The output equals that of `serde_json::to_writer`.
pub fn write(value: &Value, out: &mut Vec<u8>) {
    match value {
        Value::Null => out.extend_from_slice(b"null"),
        Value::Bool(true) => out.extend_from_slice(b"true"),
        Value::Bool(false) => out.extend_from_slice(b"false"),
        Value::String(text) => write_text(text, out),
        // Writing into a Vec cannot fail.
        Value::Number(number) => drop(write!(out, "{number}")),
        Value::Array(items) => {
            let mut separator = b'[';
            for item in items {
                out.push(std::mem::replace(&mut separator, b','));
                write(item, out);
            }
            out.extend_from_slice(if separator == b'[' { b"[]" } else { b"]" });
        }
        Value::Object(members) => {
            let mut separator = b'{';
            for (name, value) in members {
                out.push(std::mem::replace(&mut separator, b','));
                write_text(name, out);
                out.push(b':');
                write(value, out);
            }
            out.extend_from_slice(if separator == b'{' { b"{}" } else { b"}" });
        }
    }
}

/// The nesting depth of lists and objects; 0 for other values.
pub fn depth(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
        Value::Object(members) => 1 + members.values().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}

/// Appends a string with its quotes.
pub fn write_text(text: &str, out: &mut Vec<u8>) {
    out.reserve(text.len() + 2);
    out.push(b'"');
    write_escaped(text, out);
    out.push(b'"');
}

/// Appends the contents of a string, without the quotes.
pub fn write_escaped(text: &str, out: &mut Vec<u8>) {
    let mut rest = text.as_bytes();
    while let Some(at) = find_escape(rest) {
        out.extend_from_slice(&rest[..at]);
        match rest[at] {
            byte @ (b'"' | b'\\') => out.extend_from_slice(&[b'\\', byte]),
            b'\n' => out.extend_from_slice(b"\\n"),
            b'\t' => out.extend_from_slice(b"\\t"),
            b'\r' => out.extend_from_slice(b"\\r"),
            0x08 => out.extend_from_slice(b"\\b"),
            0x0c => out.extend_from_slice(b"\\f"),
            byte => drop(write!(out, "\\u{byte:04x}")),
        }
        rest = &rest[at + 1..];
    }
    out.extend_from_slice(rest);
}

/// The position of the first byte that must be escaped. Checks eight bytes at a time (SWAR), because
/// nearly all text needs no escape.
fn find_escape(bytes: &[u8]) -> Option<usize> {
    const LOW_BITS: u64 = 0x0101_0101_0101_0101;
    const HIGH_BITS: u64 = 0x8080_8080_8080_8080;
    let needs_escape = |byte: u8| byte < b' ' || byte == b'"' || byte == b'\\';
    let (chunks, rest) = bytes.as_chunks::<8>();
    for (at, chunk) in chunks.iter().enumerate() {
        let word = u64::from_le_bytes(*chunk);
        let zero_bytes = |word: u64| word.wrapping_sub(LOW_BITS) & !word & HIGH_BITS;
        let control = word.wrapping_sub(LOW_BITS * 0x20) & !word & HIGH_BITS;
        let found = control
            | zero_bytes(word ^ (LOW_BITS * b'"' as u64))
            | zero_bytes(word ^ (LOW_BITS * b'\\' as u64));
        if found != 0 {
            // A borrow can set false bits only above a true one, so the lowest bit is always right.
            return Some(at * 8 + found.trailing_zeros() as usize / 8);
        }
    }
    let start = bytes.len() - rest.len();
    rest.iter().position(|byte| needs_escape(*byte)).map(|at| start + at)
}

/// Calls `visit` for each member of a JSON object, with its quoted name, the position of the name and
/// the range of its value. `at` is the position of the first member. Returns the position of the
/// closing brace. Does not accept whitespace: [`write`](fn@write) writes none.
pub fn for_each_member(
    bytes: &[u8],
    at: usize,
    mut visit: impl FnMut(&[u8], usize, Range<usize>),
) -> Option<usize> {
    let mut at = at;
    loop {
        let name_end = end_of_string(bytes, at)?;
        if bytes.get(name_end) != Some(&b':') {
            return None;
        }
        let end = end_of_value(bytes, name_end + 1)?;
        visit(&bytes[at..name_end], at, name_end + 1..end);
        match bytes.get(end)? {
            b',' => at = end + 1,
            b'}' => return Some(end),
            _ => return None,
        }
    }
}

/// The position after the value that starts at `at`.
fn end_of_value(bytes: &[u8], at: usize) -> Option<usize> {
    let mut depth = 0usize;
    let mut at = at;
    loop {
        match bytes.get(at)? {
            b'"' => at = end_of_string(bytes, at)?,
            b'{' | b'[' => {
                depth += 1;
                at += 1;
                continue;
            }
            b'}' | b']' => {
                depth = depth.checked_sub(1)?;
                at += 1;
            }
            b',' | b':' if depth > 0 => {
                at += 1;
                continue;
            }
            b',' | b':' => return None,
            // A number, `true`, `false` or `null`.
            _ => at += bytes[at..].iter().position(|byte| b",}]".contains(byte))?,
        }
        if depth == 0 {
            return Some(at);
        }
    }
}

/// The position after the string that starts at `at`.
fn end_of_string(bytes: &[u8], at: usize) -> Option<usize> {
    if bytes.get(at) != Some(&b'"') {
        return None;
    }
    let mut at = at + 1;
    loop {
        at += find_escape(bytes.get(at..)?)?;
        match bytes[at] {
            b'"' => return Some(at + 1),
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn any_value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            any::<String>().prop_map(Value::from),
            "[a\\\\\"\u{0}-\u{21}é]{0,20}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 40, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::btree_map(any::<String>(), inner, 0..6)
                    .prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn write_matches_serde_json(value in any_value()) {
            let mut out = Vec::new();
            write(&value, &mut out);
            prop_assert_eq!(String::from_utf8(out).unwrap(), value.to_string());
        }

        #[test]
        fn for_each_member_returns_all_members(object in prop::collection::btree_map(any::<String>(), any_value(), 1..5)) {
            let text = json!(object).to_string();
            let mut found = BTreeMap::new();
            let end = for_each_member(text.as_bytes(), 1, |name, at, value| {
                assert_eq!(&text.as_bytes()[at..at + name.len()], name);
                found.insert(serde_json::from_slice::<String>(name).unwrap(), text[value].to_owned());
            });
            prop_assert_eq!(end, Some(text.len() - 1));
            let expected: BTreeMap<_, _> = object.iter().map(|(name, value)| (name.clone(), value.to_string())).collect();
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn for_each_member_terminates_on_invalid_input(bytes in prop::collection::vec(prop::sample::select(b"{}[]:,\"\\1n ".to_vec()), 0..40)) {
            let _ = for_each_member(&bytes, 0, |_, _, _| {});
        }
    }
}
