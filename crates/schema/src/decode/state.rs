//! The state of a decoding pass: the current path and the errors so far.

use super::{MAX_DEPTH, MAX_STRICT_ERRORS};
use crate::table::{Field, Table, Type, TypeId};
use crate::zero::Target;

pub(super) struct DecodeState<'t> {
    pub table: &'t Table,
    pub path: Vec<PathSegment<'t>>,
    depth: usize,
    pub too_deep: bool,
    /// The first value of the wrong type. Decoding continues, because a syntax error later in the text
    /// takes precedence.
    pub error: Option<String>,
    pub strict_errors: Vec<String>,
    /// The number of enclosing values that upstream decodes with a custom `UnmarshalJSON`, which does
    /// not report strict errors.
    lenient: usize,
}

pub(super) enum PathSegment<'t> {
    Field(TypeId, &'t Type, &'t Field),
    Key(String),
    Index(usize),
}

impl<'t> DecodeState<'t> {
    pub fn new(table: &'t Table) -> DecodeState<'t> {
        DecodeState {
            table,
            path: Vec::new(),
            depth: 0,
            too_deep: false,
            error: None,
            strict_errors: Vec::new(),
            lenient: 0,
        }
    }

    /// Enters a nested value.
    pub fn enter<E: serde::de::Error>(&mut self, lenient: bool) -> Result<(), E> {
        self.depth += 1;
        self.lenient += usize::from(lenient);
        if self.depth > MAX_DEPTH {
            self.too_deep = true;
            return Err(E::custom("too deep"));
        }
        Ok(())
    }

    pub fn leave(&mut self, lenient: bool) {
        self.depth -= 1;
        self.lenient -= usize::from(lenient);
    }

    pub fn set_error(&mut self, message: impl ToString) {
        if self.error.is_none() {
            self.error = Some(message.to_string());
        }
    }

    /// Records a value of the wrong type.
    pub fn mismatch(&mut self, found: &str, target: Target<'_>) {
        if self.error.is_some() {
            return;
        }
        let mut names = Vec::new();
        let mut owner = None;
        for segment in &self.path {
            if let PathSegment::Field(_, ty, field) = segment {
                names.push(&*field.name);
                owner = Some(ty);
            }
        }
        let location = match owner {
            Some(ty) => format!("struct field {}.{}", ty.short_name(), names.join(".")),
            None => "value".to_owned(),
        };
        let expected = self.named_type().unwrap_or_else(|| target.go_type(self.table));
        self.set_error(format!("json: cannot unmarshal {found} into Go {location} of type {expected}"));
    }

    /// The named Go type of the current value, if its field (or the list or map field that holds it) has one.
    fn named_type(&self) -> Option<String> {
        let (inner, field) = match self.path.as_slice() {
            [.., PathSegment::Field(id, _, field)] => (false, (id, field)),
            [.., PathSegment::Field(id, _, field), _] => (true, (id, field)),
            _ => return None,
        };
        let name = self.table.go_type(*field.0, &field.1.name)?;
        match inner {
            true => Some(name.strip_prefix("[]").or_else(|| Some(name.split_once(']')?.1))?.to_owned()),
            false => Some(name.to_owned()),
        }
    }

    /// Records an unknown or duplicate field.
    pub fn add_strict_error(&mut self, what: &str, name: &str) {
        if self.lenient > 0 || self.strict_errors.len() >= MAX_STRICT_ERRORS {
            return;
        }
        let mut path = String::new();
        for segment in &self.path {
            match segment {
                PathSegment::Index(index) => path.push_str(&format!("[{index}]")),
                PathSegment::Field(_, _, field) => push_name(&mut path, &field.name),
                PathSegment::Key(key) => push_name(&mut path, key),
            }
        }
        push_name(&mut path, name);
        let message = format!("{what} field {path:?}");
        if !self.strict_errors.contains(&message) {
            self.strict_errors.push(message);
        }
    }
}

fn push_name(path: &mut String, name: &str) {
    if !path.is_empty() {
        path.push('.');
    }
    path.push_str(name);
}
