//! Field paths and validation errors. Upstream: `apimachinery/pkg/util/validation/field`.

use std::collections::HashSet;
use std::fmt::{self, Write as _};

use serde_json::Value;

/// The path of a field, such as `spec.containers[0].ports[1].name` or `data[a b]`.
///
/// A path is created for every validated field and rarely printed, so short paths need no heap allocation.
#[derive(Clone)]
pub struct Path(PathBuffer);

#[derive(Clone)]
enum PathBuffer {
    Inline([u8; INLINE_BYTES], u8),
    Heap(Box<[u8]>),
}

/// With length and discriminant, a [`Path`] takes 96 bytes.
const INLINE_BYTES: usize = 94;

impl Path {
    pub fn root() -> Path {
        Path::default()
    }

    pub fn new(path: &str) -> Path {
        Path::join([path.as_bytes(), b"", b"", b""])
    }

    /// The path of a field of this value. `name` may contain dots.
    pub fn child(&self, name: &str) -> Path {
        let parent = self.bytes();
        Path::join([parent, if parent.is_empty() { b"" } else { b"." }, name.as_bytes(), b""])
    }

    pub fn index(&self, i: usize) -> Path {
        self.key(itoa::Buffer::new().format(i))
    }

    pub fn key(&self, key: &str) -> Path {
        Path::join([self.bytes(), b"[", key.as_bytes(), b"]"])
    }

    pub fn as_str(&self) -> &str {
        std::str::from_utf8(self.bytes()).expect("a path is joined from valid UTF-8 strings")
    }

    fn bytes(&self) -> &[u8] {
        match &self.0 {
            PathBuffer::Inline(bytes, length) => &bytes[..usize::from(*length)],
            PathBuffer::Heap(bytes) => bytes,
        }
    }

    fn join(parts: [&[u8]; 4]) -> Path {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        if length > INLINE_BYTES {
            return Path(PathBuffer::Heap(parts.concat().into()));
        }
        let mut bytes = [0; INLINE_BYTES];
        let mut offset = 0;
        for part in parts {
            bytes[offset..offset + part.len()].copy_from_slice(part);
            offset += part.len();
        }
        Path(PathBuffer::Inline(bytes, length as u8))
    }
}

impl Default for Path {
    fn default() -> Path {
        Path::new("")
    }
}

impl PartialEq for Path {
    fn eq(&self, other: &Path) -> bool {
        self.bytes() == other.bytes()
    }
}

impl Eq for Path {}

impl fmt::Debug for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.as_str() {
            "" => f.write_str("<nil>"),
            text => f.write_str(text),
        }
    }
}

/// The type of a validation error, as upstream's `ErrorType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorType {
    Required,
    Invalid,
    NotSupported,
    Forbidden,
    Duplicate,
    NotFound,
    TooLong,
    TooShort,
    TooMany,
    TooFew,
    TypeInvalid,
    Internal,
}

impl ErrorType {
    /// The reason in a cause of a Status.
    pub fn cause(self) -> &'static str {
        match self {
            ErrorType::Required => "FieldValueRequired",
            ErrorType::Invalid => "FieldValueInvalid",
            ErrorType::NotSupported => "FieldValueNotSupported",
            ErrorType::Forbidden => "FieldValueForbidden",
            ErrorType::Duplicate => "FieldValueDuplicate",
            ErrorType::NotFound => "FieldValueNotFound",
            ErrorType::TooLong => "FieldValueTooLong",
            ErrorType::TooShort => "FieldValueTooShort",
            ErrorType::TooMany => "FieldValueTooMany",
            ErrorType::TooFew => "FieldValueTooFew",
            ErrorType::TypeInvalid => "FieldValueTypeInvalid",
            ErrorType::Internal => "InternalError",
        }
    }
}

/// A validation error of a field.
#[derive(Clone, Debug, PartialEq)]
pub struct FieldError {
    pub error_type: ErrorType,
    pub path: Path,
    /// The text after the path: `Invalid value: 0: must be between 1 and 65535, inclusive`.
    pub message: String,
}

/// Limits the errors of an object: a small request can contain millions of errors.
const MAX_ERRORS: usize = 10_000;

/// The validation errors of an object, in the order found.
#[derive(Clone, Debug, Default)]
pub struct ErrorList(pub Vec<FieldError>);

impl ErrorList {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn required(&mut self, path: &Path, detail: &str) {
        self.push(ErrorType::Required, path, with_detail("Required value", detail));
    }

    pub fn forbidden(&mut self, path: &Path, detail: &str) {
        self.push(ErrorType::Forbidden, path, with_detail("Forbidden", detail));
    }

    pub fn invalid(&mut self, path: &Path, value: impl Into<Value>, detail: &str) {
        self.push(
            ErrorType::Invalid,
            path,
            with_detail(&format!("Invalid value: {}", render_value(&value.into())), detail),
        );
    }

    pub fn duplicate(&mut self, path: &Path, value: impl Into<Value>) {
        self.push(ErrorType::Duplicate, path, format!("Duplicate value: {}", render_value(&value.into())));
    }

    pub fn not_found(&mut self, path: &Path, value: impl Into<Value>) {
        self.push(ErrorType::NotFound, path, format!("Not found: {}", render_value(&value.into())));
    }

    /// `supported` is printed in this order.
    pub fn not_supported(&mut self, path: &Path, value: impl Into<Value>, supported: &[&str]) {
        let mut message = format!("Unsupported value: {}", render_value(&value.into()));
        for (i, word) in supported.iter().enumerate() {
            let _ = write!(message, "{}\"{word}\"", if i == 0 { ": supported values: " } else { ", " });
        }
        self.push(ErrorType::NotSupported, path, message);
    }

    /// The value is longer than `max` bytes.
    pub fn too_long(&mut self, path: &Path, max: usize) {
        let unit = plural(max, "byte");
        self.push(ErrorType::TooLong, path, format!("Too long: may not be more than {max} {unit}"));
    }

    pub fn too_long_characters(&mut self, path: &Path, max: usize) {
        let unit = plural(max, "character");
        self.push(ErrorType::TooLong, path, format!("Too long: may not be more than {max} {unit}"));
    }

    pub fn too_short(&mut self, path: &Path, min: usize) {
        let unit = plural(min, "character");
        self.push(ErrorType::TooShort, path, format!("Too short: must be at least {min} {unit}"));
    }

    pub fn too_many(&mut self, path: &Path, actual: usize, max: usize) {
        let unit = plural(max, "item");
        self.push(ErrorType::TooMany, path, format!("Too many: {actual}: must have at most {max} {unit}"));
    }

    pub fn too_few(&mut self, path: &Path, actual: usize, min: usize) {
        let unit = plural(min, "item");
        self.push(ErrorType::TooFew, path, format!("Too few: {actual}: must have at least {min} {unit}"));
    }

    /// The value has another type than the schema specifies.
    pub fn type_invalid(&mut self, path: &Path, value: impl Into<Value>, detail: &str) {
        let what = format!("Invalid value: {}", render_value(&value.into()));
        self.push(ErrorType::TypeInvalid, path, with_detail(&what, detail));
    }

    pub fn internal(&mut self, path: &Path, detail: &str) {
        self.push(ErrorType::Internal, path, with_detail("Internal error", detail));
    }

    /// Reports each message of a name check (see `names`) as an error.
    pub fn invalid_each(&mut self, path: &Path, value: impl Into<Value>, messages: Vec<String>) {
        if !messages.is_empty() {
            let value = value.into();
            messages.iter().for_each(|word| self.invalid(path, value.clone(), word));
        }
    }

    pub fn push(&mut self, error_type: ErrorType, path: &Path, message: String) {
        if self.0.len() == MAX_ERRORS {
            return;
        }
        self.0.push(FieldError { error_type, path: path.clone(), message });
    }
}

/// All distinct errors on one line: `a: Required value`, or `[a: Required value, b: …]`.
impl fmt::Display for ErrorList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut seen = HashSet::new();
        let lines: Vec<String> = self
            .0
            .iter()
            .filter(|error| seen.insert((error.path.as_str(), error.message.as_str())))
            .map(|error| format!("{}: {}", error.path, error.message))
            .collect();
        match lines.as_slice() {
            [one] => f.write_str(one),
            [] => Ok(()),
            many => write!(f, "[{}]", many.join(", ")),
        }
    }
}

fn with_detail(what: &str, detail: &str) -> String {
    if detail.is_empty() { what.to_owned() } else { format!("{what}: {detail}") }
}

fn plural(count: usize, unit: &str) -> String {
    if count == 1 { unit.to_owned() } else { format!("{unit}s") }
}

/// A value as upstream prints it in errors: a quoted string, or JSON as Go encodes it.
fn render_value(value: &Value) -> String {
    match value {
        Value::String(text) => quote(text),
        other => other.to_string().replace('&', "\\u0026").replace('<', "\\u003c").replace('>', "\\u003e"),
    }
}

/// Quotes a string as Go's `%q`.
pub fn quote(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        let _ = match c {
            '"' | '\\' => write!(out, "\\{c}"),
            '\u{7}' => write!(out, "\\a"),
            '\u{8}' => write!(out, "\\b"),
            '\u{c}' => write!(out, "\\f"),
            '\n' => write!(out, "\\n"),
            '\r' => write!(out, "\\r"),
            '\t' => write!(out, "\\t"),
            '\u{b}' => write!(out, "\\v"),
            c if is_printable(c) => write!(out, "{c}"),
            c if c.is_ascii() => write!(out, "\\x{:02x}", u32::from(c)),
            c if u32::from(c) < 0x1_0000 => write!(out, "\\u{:04x}", u32::from(c)),
            c => write!(out, "\\U{:08x}", u32::from(c)),
        };
    }
    out.push('"');
    out
}

/// Approximates Go's `unicode.IsPrint`: letters, marks, numbers, punctuation, symbols and the ASCII
/// space. Unassigned characters count as printable here.
pub fn is_printable(c: char) -> bool {
    let invisible = matches!(u32::from(c),
        0xad | 0x600..=0x605 | 0x61c | 0x6dd | 0x70f | 0x180e | 0x200b..=0x200f | 0x2028..=0x202e
        | 0x2060..=0x206f | 0xe000..=0xf8ff | 0xfeff | 0xfff9..=0xfffb | 0xe_0000..=0xe_007f | 0xf_0000..);
    c == ' ' || !(c.is_control() || c.is_whitespace() || invisible)
}

#[cfg(test)]
mod tests {
    use expect_test::expect;
    use serde_json::json;

    use super::*;

    #[test]
    fn formats_errors_like_upstream() {
        let mut errors = ErrorList::default();
        let long = Path::new("spec").child(&"x".repeat(80)).child("é").index(12).key("key");
        assert_eq!(long.as_str(), format!("spec.{}.é[12][key]", "x".repeat(80)));
        assert_eq!((Path::root().child("a"), Path::root().as_str()), (Path::new("a"), ""));
        let path = Path::new("spec").child("items").index(0).key("a b");
        errors.required(&path, "");
        errors.required(&path, "say it");
        errors.forbidden(&path, "no");
        errors.invalid(&path, "x\"\u{7f}é\u{200b}<", "bad");
        errors.invalid(&path, json!({"a": "<c>"}), "bad");
        errors.invalid(&path, 5, "");
        errors.not_supported(&path, "x", &["a", "b"]);
        errors.not_supported(&path, "x", &[]);
        errors.duplicate(&path, "x");
        errors.not_found(&path, "x");
        errors.too_long(&path, 1);
        errors.too_long_characters(&path, 10);
        errors.too_short(&path, 2);
        errors.too_many(&path, 3, 2);
        errors.too_few(&path, 0, 1);
        errors.type_invalid(&path, 5, "must be a string");
        errors.internal(&Path::root(), "lost");
        let lines: Vec<String> =
            errors.0.iter().map(|e| format!("{} {}: {}", e.error_type.cause(), e.path, e.message)).collect();
        expect![[r#"
            FieldValueRequired spec.items[0][a b]: Required value
            FieldValueRequired spec.items[0][a b]: Required value: say it
            FieldValueForbidden spec.items[0][a b]: Forbidden: no
            FieldValueInvalid spec.items[0][a b]: Invalid value: "x\"\x7fé\u200b<": bad
            FieldValueInvalid spec.items[0][a b]: Invalid value: {"a":"\u003cc\u003e"}: bad
            FieldValueInvalid spec.items[0][a b]: Invalid value: 5
            FieldValueNotSupported spec.items[0][a b]: Unsupported value: "x": supported values: "a", "b"
            FieldValueNotSupported spec.items[0][a b]: Unsupported value: "x"
            FieldValueDuplicate spec.items[0][a b]: Duplicate value: "x"
            FieldValueNotFound spec.items[0][a b]: Not found: "x"
            FieldValueTooLong spec.items[0][a b]: Too long: may not be more than 1 byte
            FieldValueTooLong spec.items[0][a b]: Too long: may not be more than 10 characters
            FieldValueTooShort spec.items[0][a b]: Too short: must be at least 2 characters
            FieldValueTooMany spec.items[0][a b]: Too many: 3: must have at most 2 items
            FieldValueTooFew spec.items[0][a b]: Too few: 0: must have at least 1 item
            FieldValueTypeInvalid spec.items[0][a b]: Invalid value: 5: must be a string
            InternalError <nil>: Internal error: lost"#]]
        .assert_eq(&lines.join("\n"));
    }
}
