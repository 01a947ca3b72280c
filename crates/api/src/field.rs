//! Validation errors with upstream's field paths and words.

use std::fmt::{self, Write as _};

use serde_json::Value;

/// A place in an object, as `spec.containers[0].ports[1].name` or `data[a b]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Path(String);

impl Path {
    pub fn root() -> Path {
        Path::default()
    }

    pub fn new(path: &str) -> Path {
        Path(path.to_owned())
    }

    /// A field below this one; `name` may itself be dotted.
    pub fn at(&self, name: &str) -> Path {
        if self.0.is_empty() { Path(name.to_owned()) } else { Path(format!("{}.{name}", self.0)) }
    }

    pub fn index(&self, i: usize) -> Path {
        Path(format!("{}[{i}]", self.0))
    }

    pub fn key(&self, key: &str) -> Path {
        Path(format!("{}[{key}]", self.0))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { f.write_str("<nil>") } else { f.write_str(&self.0) }
    }
}

/// What is wrong with a field; the names are the reasons in a Status' causes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    Required,
    Invalid,
    NotSupported,
    Forbidden,
    Duplicate,
    NotFound,
    TooLong,
    TooMany,
    TypeInvalid,
    Internal,
}

/// One complaint about one field.
#[derive(Clone, Debug, PartialEq)]
pub struct Complaint {
    pub reason: Reason,
    pub path: Path,
    /// Everything after the path: `Invalid value: 0: must be between 1 and 65535, inclusive`.
    pub message: String,
}

/// The complaints about one object, in the order found.
#[derive(Clone, Debug, Default)]
pub struct Errors(pub Vec<Complaint>);

impl Errors {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn required(&mut self, path: &Path, detail: &str) {
        self.push(Reason::Required, path, with_detail("Required value", detail));
    }

    pub fn forbidden(&mut self, path: &Path, detail: &str) {
        self.push(Reason::Forbidden, path, with_detail("Forbidden", detail));
    }

    pub fn invalid(&mut self, path: &Path, value: impl Into<Value>, detail: &str) {
        self.push(
            Reason::Invalid,
            path,
            with_detail(&format!("Invalid value: {}", shown(&value.into())), detail),
        );
    }

    pub fn duplicate(&mut self, path: &Path, value: impl Into<Value>) {
        self.push(Reason::Duplicate, path, format!("Duplicate value: {}", shown(&value.into())));
    }

    pub fn not_found(&mut self, path: &Path, value: impl Into<Value>) {
        self.push(Reason::NotFound, path, format!("Not found: {}", shown(&value.into())));
    }

    /// `supported` is printed in the order given.
    pub fn not_supported(&mut self, path: &Path, value: impl Into<Value>, supported: &[&str]) {
        let mut message = format!("Unsupported value: {}", shown(&value.into()));
        for (i, word) in supported.iter().enumerate() {
            let _ = write!(message, "{}\"{word}\"", if i == 0 { ": supported values: " } else { ", " });
        }
        self.push(Reason::NotSupported, path, message);
    }

    pub fn too_long(&mut self, path: &Path, max: usize) {
        self.push(Reason::TooLong, path, format!("Too long: may not be more than {max} bytes"));
    }

    pub fn too_many(&mut self, path: &Path, actual: usize, max: usize) {
        self.push(Reason::TooMany, path, format!("Too many: {actual}: must have at most {max} items"));
    }

    pub fn push(&mut self, reason: Reason, path: &Path, message: String) {
        self.0.push(Complaint { reason, path: path.clone(), message });
    }
}

fn with_detail(what: &str, detail: &str) -> String {
    if detail.is_empty() { what.to_owned() } else { format!("{what}: {detail}") }
}

/// A value as upstream prints it in a complaint: JSON.
fn shown(value: &Value) -> String {
    value.to_string()
}
