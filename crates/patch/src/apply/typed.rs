//! A value with its schema: how to walk it, the keys of list items, validation, and the set of fields
//! it has. Counterpart: `typed.TypedValue` in structured-merge-diff.

use std::collections::BTreeSet;

use schema::{Field, ListType, Shape, Table, Type, TypeId};
use serde_json::{Map, Value};

use super::field_set::{PathElement, Set};
use crate::go;

/// The schema of a value. Cheap to copy.
#[derive(Clone, Copy)]
pub(crate) struct Typed<'t> {
    table: &'t Table,
    type_ref: TypeRef<'t>,
}

#[derive(Clone, Copy)]
enum TypeRef<'t> {
    Type(&'t Type),
    Shape(&'t Shape),
    /// No schema: the type is deduced from the value, and maps are tracked by key.
    Deduced,
}

/// How to walk a value.
#[derive(Clone, Copy)]
pub(crate) enum Atom<'t> {
    Scalar(Scalar),
    /// A single value regardless of its content.
    Opaque,
    List {
        item: Typed<'t>,
        kind: &'t ListType,
    },
    Map(Fields<'t>),
}

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Scalar {
    Numeric,
    String,
    Boolean,
    Any,
}

/// The schema of an object's members.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'t> {
    table: &'t Table,
    owner: Option<&'t Type>,
    rest: Option<TypeRef<'t>>,
    pub atomic: bool,
}

static ATOMIC: ListType = ListType::Atomic;

impl<'t> Typed<'t> {
    pub fn root(table: &'t Table, ty: TypeId) -> Typed<'t> {
        Typed { table, type_ref: TypeRef::Type(table.get(ty)) }
    }

    /// How to walk `value`. Without a schema, this depends on the value itself.
    pub fn atom(self, value: &Value) -> Atom<'t> {
        let at = |type_ref| Typed { table: self.table, type_ref };
        let of = |ty: &'t Type| {
            if ty.preserve_unknown && ty.fields.is_empty() {
                return at(TypeRef::Deduced).atom(value);
            }
            let rest = ty.preserve_unknown.then_some(TypeRef::Deduced);
            Atom::Map(Fields { table: self.table, owner: Some(ty), rest, atomic: ty.atomic })
        };
        match self.type_ref {
            TypeRef::Type(ty) => of(ty),
            TypeRef::Shape(shape) => match shape {
                Shape::Struct(id) => of(self.table.get(*id)),
                Shape::String | Shape::Bytes | Shape::Time | Shape::MicroTime | Shape::Duration => {
                    Atom::Scalar(Scalar::String)
                }
                Shape::Bool => Atom::Scalar(Scalar::Boolean),
                Shape::Int32 | Shape::Int64 | Shape::Double => Atom::Scalar(Scalar::Numeric),
                Shape::Quantity | Shape::IntOrString => Atom::Scalar(Scalar::Any),
                Shape::RawExtension | Shape::Json | Shape::FieldsV1 => Atom::Opaque,
                Shape::List { item, kind } => Atom::List { item: at(TypeRef::Shape(item)), kind },
                Shape::Map { value, atomic } => Atom::Map(Fields {
                    table: self.table,
                    owner: None,
                    rest: Some(TypeRef::Shape(value)),
                    atomic: *atomic,
                }),
            },
            TypeRef::Deduced => match value {
                Value::Object(_) | Value::Null => Atom::Map(Fields {
                    table: self.table,
                    owner: None,
                    rest: Some(TypeRef::Deduced),
                    atomic: false,
                }),
                Value::Array(_) => Atom::List { item: at(TypeRef::Deduced), kind: &ATOMIC },
                _ => Atom::Scalar(Scalar::Any),
            },
        }
    }

    /// Whether there is no schema, so that only the value determines how it is walked.
    pub fn is_deduced(self) -> bool {
        match self.type_ref {
            TypeRef::Deduced => true,
            TypeRef::Shape(Shape::Struct(id)) => {
                let ty = self.table.get(*id);
                ty.preserve_unknown && ty.fields.is_empty()
            }
            _ => false,
        }
    }

    /// The path element that identifies an item in its list.
    pub fn item_key(self, kind: &ListType, item: &Value) -> Result<PathElement, String> {
        let keys = match kind {
            ListType::Atomic => return Err("invalid indexing of non-associative list".to_owned()),
            ListType::Set => {
                return match item {
                    Value::Object(_) => Err("associative list without keys has an element that's a map type"),
                    Value::Array(_) => Err("not supported: associative list with lists as elements"),
                    Value::Null => {
                        Err("associative list without keys has an element that's an explicit null")
                    }
                    scalar => Ok(PathElement::Value(scalar.clone())),
                }
                .map_err(str::to_owned);
            }
            ListType::Map(keys) => keys,
        };
        let fields = match item {
            Value::Object(fields) => fields,
            Value::Null => return Err("associative list with keys may not have a null element".to_owned()),
            _ => return Err("associative list with keys may not have non-map elements".to_owned()),
        };
        let owner = match self.atom(item) {
            Atom::Map(fields) => fields.owner,
            _ => None,
        };
        let mut found: Vec<(String, Value)> = keys
            .iter()
            .filter_map(|key| {
                let default = || owner?.field(key)?.default.as_ref();
                Some((key.to_string(), fields.get(&**key).or_else(default)?.clone()))
            })
            .collect();
        if found.is_empty() && !keys.is_empty() {
            let keys: Vec<String> = keys.iter().map(|key| go::quote(key)).collect();
            return Err(format!(
                "associative list with keys has an element that omits all key fields [{}] \
                 (and doesn't have default values for any key fields)",
                keys.join(" ")
            ));
        }
        found.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(PathElement::Key(found))
    }
}

impl<'t> Fields<'t> {
    /// The schema of a field. Undeclared fields are treated as deduced; `validate` rejects them
    /// earlier.
    pub fn child(&self, name: &str) -> Typed<'t> {
        self.field_type(self.declared(name))
    }

    /// The schema of a member with this declaration, or without one.
    pub fn field_type(&self, declared: Option<&'t Field>) -> Typed<'t> {
        let type_ref = declared.map(|field| TypeRef::Shape(&field.shape)).or(self.rest);
        Typed { table: self.table, type_ref: type_ref.unwrap_or(TypeRef::Deduced) }
    }

    pub fn declared(&self, name: &str) -> Option<&'t Field> {
        self.owner?.field(name)
    }
}

/// Validates a value. The error is a single line, or a list after `errors:`.
pub(crate) fn validate(typed: Typed, value: &Value, duplicates: bool) -> Result<(), String> {
    let mut errors = Vec::new();
    check(typed, value, duplicates, &mut Path::default(), &mut errors);
    match errors.as_slice() {
        [] => Ok(()),
        [one] => Err(one.clone()),
        many => Err(format!("errors:\n  {}", many.join("\n  "))),
    }
}

/// The path to the value that `check` visits.
#[derive(Default)]
struct Path {
    steps: Vec<String>,
}

impl Path {
    fn error(&self, text: &str) -> String {
        if self.steps.is_empty() { text.to_owned() } else { format!("{}: {text}", self.steps.concat()) }
    }
}

fn check(typed: Typed, value: &Value, duplicates: bool, path: &mut Path, errors: &mut Vec<String>) {
    match (typed.atom(value), value) {
        (Atom::Opaque, _) | (_, Value::Null) => {}
        (Atom::Scalar(scalar), _) => errors.extend(scalar_error(scalar, value).map(|text| path.error(&text))),
        (Atom::List { item, kind }, Value::Array(items)) => {
            let mut seen = BTreeSet::new();
            for (at, value) in items.iter().enumerate() {
                let element = if *kind == ListType::Atomic {
                    PathElement::Index(at as i64)
                } else {
                    match item.item_key(kind, value) {
                        Ok(element) => element,
                        Err(text) => return errors.push(path.error(&format!("element {at}: {text}"))),
                    }
                };
                path.steps.push(element.to_string());
                if *kind != ListType::Atomic {
                    if !duplicates && seen.contains(&element) {
                        let step = path.steps.pop();
                        errors.push(path.error(&format!("duplicate entries for key {element}")));
                        path.steps.extend(step);
                    }
                    seen.insert(element);
                }
                check(item, value, duplicates, path, errors);
                path.steps.pop();
            }
        }
        (Atom::List { .. }, other) => {
            errors.push(path.error(&format!("expected list, got &{{{}}}", go::print(other))));
        }
        (Atom::Map(fields), Value::Object(object)) => {
            for (name, value) in object {
                path.steps.push(format!(".{name}"));
                let known = fields.declared(name).is_some() || fields.rest.is_some();
                if known {
                    check(fields.child(name), value, duplicates, path, errors);
                } else {
                    errors.push(path.error("field not declared in schema"));
                }
                path.steps.pop();
                if !known {
                    return;
                }
            }
        }
        (Atom::Map(_), other) => {
            errors.push(path.error(&format!("expected map, got &{{{}}}", go::print(other))));
        }
    }
}

fn scalar_error(scalar: Scalar, value: &Value) -> Option<String> {
    match (scalar, value) {
        (Scalar::Numeric, Value::Number(_))
        | (Scalar::String, Value::String(_))
        | (Scalar::Boolean, Value::Bool(_))
        | (Scalar::Any, Value::Number(_) | Value::String(_) | Value::Bool(_)) => None,
        (Scalar::Numeric, other) => {
            Some(format!("expected numeric (int or float), got {}", go::type_name(other)))
        }
        (Scalar::String, other) => {
            Some(format!("expected string, got &value.valueUnstructured{{Value:{}}}", go::syntax(other)))
        }
        (Scalar::Boolean, other) => Some(format!("expected boolean, got &{{{}}}", go::print(other))),
        (Scalar::Any, other) => Some(format!("expected any scalar, got &{{{}}}", go::print(other))),
    }
}

/// The set of fields that a value has.
pub(crate) fn field_set(typed: Typed, value: &Value) -> Set {
    let mut set = Set::default();
    collect(typed, value, &mut set);
    set
}

/// Adds the fields below `value`. Returns whether the path to it is itself a member.
fn collect(typed: Typed, value: &Value, set: &mut Set) -> bool {
    match (typed.atom(value), value) {
        (Atom::Opaque | Atom::Scalar(_), _) | (Atom::List { kind: ListType::Atomic, .. }, _) => true,
        (Atom::List { item, kind }, Value::Array(items)) => {
            let mut items_by_key: Vec<_> =
                items.iter().filter_map(|value| Some((item.item_key(kind, value).ok()?, value))).collect();
            items_by_key.sort_by(|a, b| a.0.cmp(&b.0));
            for same in items_by_key.chunk_by(|a, b| a.0 == b.0) {
                let mut below = Set::default();
                // Items with duplicate keys are owned together.
                if let [(_, value)] = same {
                    collect(item, value, &mut below);
                }
                set.attach(same[0].0.clone(), true, below);
            }
            false
        }
        (Atom::Map(Fields { atomic: true, .. }), _) => true,
        (Atom::Map(fields), Value::Object(object)) => {
            for (name, value) in object {
                let mut below = Set::default();
                let leaf = collect(fields.child(name), value, &mut below);
                let empty = value.is_null() || value.as_object().is_some_and(Map::is_empty);
                let member = leaf || empty || fields.declared(name).is_none();
                set.attach(PathElement::Field(name.clone()), member, below);
            }
            false
        }
        _ => false,
    }
}

/// The zero value of a type: the JSON form of upstream's empty struct.
///
/// The ownership of a new object is its difference from this value. A struct that is always serialized
/// (`spec`) is therefore not owned itself, only its content. Types without a protobuf form have no such
/// struct.
pub(crate) fn zero(table: &Table, ty: TypeId) -> Value {
    zero_of(table, table.get(ty), 0)
}

fn zero_of(table: &Table, ty: &Type, depth: usize) -> Value {
    let fields = ty.fields.iter().filter(|field| field.tag != 0 && !field.pointer).filter_map(|field| {
        let value = match &field.shape {
            // The limit only guards against a schema with recursive types.
            Shape::Struct(id) if depth < 16 => zero_of(table, table.get(*id), depth + 1),
            _ if !field.always_present => return None,
            Shape::String => Value::from(""),
            Shape::Bool => Value::from(false),
            Shape::Int32 | Shape::Int64 | Shape::Double => Value::from(0),
            _ => Value::Null,
        };
        Some((field.name.to_string(), value))
    });
    let pointers = ty.fields.iter().filter(|field| field.tag != 0 && field.pointer && field.always_present);
    Value::Object(fields.chain(pointers.map(|field| (field.name.to_string(), Value::Null))).collect())
}
