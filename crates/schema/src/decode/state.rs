//! Where the reader is, and what it has found wrong so far.

use serde_json::{Map, Value};

use super::{MAX_DEPTH, MAX_UNKNOWN};
use crate::table::{Alternative, Field, Shape, Table, Type, TypeId};

pub(super) struct State<'t> {
    pub table: &'t Table,
    pub path: Vec<Step<'t>>,
    depth: usize,
    pub too_deep: bool,
    /// The first value that does not fit; reading goes on, for the text may not be JSON at all.
    pub error: Option<String>,
    pub unknown: Vec<String>,
    /// Inside values whose own reader upstream does not tell about strictness.
    lenient: usize,
}

pub(super) enum Step<'t> {
    Field(&'t Type, &'t Field),
    Key(String),
    Index(usize),
}

/// What a value is expected to be.
#[derive(Clone, Copy)]
pub(super) enum Target<'t> {
    Shape(&'t Shape),
    /// A struct of this type or its alternative.
    Either(TypeId, Alternative),
    MapOfEither(TypeId, Alternative),
}

impl<'t> State<'t> {
    pub fn new(table: &'t Table) -> State<'t> {
        State {
            table,
            path: Vec::new(),
            depth: 0,
            too_deep: false,
            error: None,
            unknown: Vec::new(),
            lenient: 0,
        }
    }

    /// One level further down.
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

    pub fn fail(&mut self, message: impl ToString) {
        if self.error.is_none() {
            self.error = Some(message.to_string());
        }
    }

    /// A value of the wrong type.
    pub fn mismatch(&mut self, found: &str, target: Target<'_>) {
        if self.error.is_some() {
            return;
        }
        let mut names = Vec::new();
        let mut owner = None;
        for step in &self.path {
            if let Step::Field(ty, field) = step {
                names.push(&*field.name);
                owner = Some(ty);
            }
        }
        let place = match owner {
            Some(ty) => format!("struct field {}.{}", ty.short_name(), names.join(".")),
            None => "value".to_owned(),
        };
        let expected = target.go_type(self.table);
        self.fail(format!("json: cannot unmarshal {found} into Go {place} of type {expected}"));
    }

    /// A field that strict decoding does not like.
    pub fn complain(&mut self, what: &str, name: &str) {
        if self.lenient > 0 || self.unknown.len() >= MAX_UNKNOWN {
            return;
        }
        let mut path = String::new();
        for step in &self.path {
            match step {
                Step::Index(index) => path.push_str(&format!("[{index}]")),
                Step::Field(_, field) => push_name(&mut path, &field.name),
                Step::Key(key) => push_name(&mut path, key),
            }
        }
        push_name(&mut path, name);
        let complaint = format!("{what} field {path:?}");
        if !self.unknown.contains(&complaint) {
            self.unknown.push(complaint);
        }
    }

    pub fn target(&self, owner: TypeId, field: &'t Field) -> Target<'t> {
        match (self.table.alternative(owner, &field.name), &field.shape) {
            (None, shape) => Target::Shape(shape),
            (Some(alternative), Shape::Map { .. }) => Target::MapOfEither(owner, alternative),
            (Some(alternative), _) => Target::Either(owner, alternative),
        }
    }

    /// What upstream writes for a value that was never set.
    pub fn zero(&self, shape: &Shape) -> Value {
        match shape {
            Shape::String => Value::String(String::new()),
            Shape::Bool => Value::Bool(false),
            Shape::Int32 | Shape::Int64 | Shape::Double | Shape::IntOrString => Value::from(0),
            Shape::Quantity => Value::from("0"),
            Shape::Duration => Value::from("0s"),
            Shape::Struct(id) => {
                let mut map = Map::new();
                self.complete(self.table.get(*id), &mut map);
                Value::Object(map)
            }
            _ => Value::Null,
        }
    }

    /// Adds the fields that are always written. Structs that hold themselves do so by pointers, so this ends.
    pub fn complete(&self, ty: &Type, map: &mut Map<String, Value>) {
        for field in ty.fields.iter().filter(|field| field.always) {
            if !map.contains_key(&*field.name) {
                let zero = if field.pointer { Value::Null } else { self.zero(&field.shape) };
                map.insert(field.name.to_string(), zero);
            }
        }
    }
}

fn push_name(path: &mut String, name: &str) {
    if !path.is_empty() {
        path.push('.');
    }
    path.push_str(name);
}

impl Target<'_> {
    /// Shapes that upstream reads as they are, to look into later or never.
    pub fn is_raw(self) -> bool {
        matches!(self, Target::Shape(Shape::RawExtension | Shape::Json | Shape::FieldsV1))
    }

    /// The name of the Go type, as its messages have it.
    fn go_type(self, table: &Table) -> String {
        match self {
            Target::Shape(shape) => go_type(table, shape),
            Target::Either(..) => "v1.JSONSchemaProps".to_owned(),
            Target::MapOfEither(..) => "v1.JSONSchemaDependencies".to_owned(),
        }
    }
}

fn go_type(table: &Table, shape: &Shape) -> String {
    match shape {
        Shape::String | Shape::Time | Shape::MicroTime | Shape::Duration => "string".to_owned(),
        Shape::Bool => "bool".to_owned(),
        Shape::Int32 | Shape::IntOrString => "int32".to_owned(),
        Shape::Int64 => "int64".to_owned(),
        Shape::Double => "float64".to_owned(),
        Shape::Bytes => "[]uint8".to_owned(),
        Shape::Quantity => "resource.Quantity".to_owned(),
        Shape::RawExtension => "runtime.RawExtension".to_owned(),
        Shape::Json => "v1.JSON".to_owned(),
        Shape::FieldsV1 => "v1.FieldsV1".to_owned(),
        Shape::Struct(id) => {
            let mut parts = table.get(*id).name.rsplit('.');
            let name = parts.next().unwrap_or_default();
            format!("{}.{name}", parts.next().unwrap_or_default())
        }
        Shape::List { item, .. } => format!("[]{}", go_type(table, item)),
        Shape::Map { value, .. } => format!("map[string]{}", go_type(table, value)),
    }
}
