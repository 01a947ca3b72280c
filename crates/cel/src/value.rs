//! Values during evaluation. JSON is borrowed and converted on access, one level at a time.

mod equality;
mod json;

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use jiff::Timestamp;
use serde_json::Value as Json;

use crate::authorizer::AuthorizerCheck;
use crate::decl::{Decl, ListType};
use crate::eval::{Budget, EvalError};
use crate::functions::{CidrBlock, Format, IpAddress, Url, Version};
use crate::types::Type;
pub(crate) use equality::same_element;
pub(crate) use json::from_json;

/// The value of an expression.
#[derive(Clone)]
pub enum Value<'a> {
    /// `null`.
    Null,
    /// A boolean.
    Bool(bool),
    /// A signed integer.
    Int(i64),
    /// An unsigned integer.
    Uint(u64),
    /// A floating-point number.
    Double(f64),
    /// A string.
    String(Text<'a>),
    /// A byte string.
    Bytes(Arc<[u8]>),
    /// A duration in nanoseconds.
    Duration(i64),
    /// A timestamp.
    Timestamp(Timestamp),
    /// A list.
    List(List<'a>),
    /// A map, or an object from JSON.
    Map(Map<'a>),
    /// An object whose fields are computed on access.
    Fields(Arc<dyn Fields<'a> + 'a>),
    /// An optional value.
    Optional(Option<Arc<Value<'a>>>),
    /// A type.
    Type(Type),
    /// A value of a Kubernetes library.
    Library(LibraryValue<'a>),
}

/// The values of Kubernetes libraries.
#[derive(Clone)]
pub enum LibraryValue<'a> {
    /// A quantity, from `quantity()`.
    Quantity(schema::quantity::Quantity),
    /// A semantic version, from `semver()`.
    Version(Arc<Version>),
    /// A URL, from `url()`.
    Url(Arc<Url>),
    /// An IP address, from `ip()`.
    Ip(IpAddress),
    /// A CIDR, from `cidr()`.
    Cidr(CidrBlock),
    /// A named format, from `format.named()`.
    Format(Format),
    /// An authorization check, from the variable `authorizer`.
    Check(Arc<AuthorizerCheck<'a>>),
}

/// An object whose fields are computed when an expression reads them.
pub trait Fields<'a>: Send + Sync {
    /// Returns the field with this name if it exists. The cost of computing it is subtracted from
    /// `budget`.
    fn get(&self, name: &str, budget: &mut Budget) -> Option<Result<Value<'a>, EvalError>>;

    /// The name of the object's type.
    fn type_name(&self) -> &str {
        "object"
    }
}

/// A string, borrowed or shared.
#[derive(Clone)]
pub enum Text<'a> {
    /// Borrowed from JSON or from the expression.
    Borrowed(&'a str),
    /// Created by a function.
    Shared(Arc<str>),
}

/// A list, borrowed from JSON or shared.
#[derive(Clone)]
pub enum List<'a> {
    /// Borrowed from JSON, with the declaration of the list.
    Json(&'a [Json], &'a Decl),
    /// Created by an expression.
    Shared(Arc<Vec<Value<'a>>>),
}

/// A map, borrowed from JSON or shared.
#[derive(Clone)]
pub enum Map<'a> {
    /// Borrowed from JSON, with the declaration of the object or map.
    Json(&'a serde_json::Map<String, Json>, &'a Decl),
    /// Created by an expression.
    Shared(Arc<BTreeMap<Key<'a>, Value<'a>>>),
    /// A message created by an expression, with its type name.
    Message(Arc<str>, Arc<BTreeMap<Key<'a>, Value<'a>>>),
    /// A map that returns an empty map for missing keys.
    WithDefault(Arc<BTreeMap<Key<'a>, Value<'a>>>),
}

/// A key of a map.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key<'a> {
    /// A boolean.
    Bool(bool),
    /// A signed integer, or a double with an integral value.
    Int(i64),
    /// An unsigned integer.
    Uint(u64),
    /// A string.
    String(Text<'a>),
}

impl<'a> Value<'a> {
    /// Converts JSON without a declared type.
    pub fn from_json(json: &'a Json) -> Value<'a> {
        from_json(json, Decl::unknown())
    }

    /// Converts JSON with this declaration.
    pub fn from_declared(json: &'a Json, decl: &'a Decl) -> Value<'a> {
        from_json(json, decl)
    }

    /// A shared string.
    pub fn text(text: impl Into<Arc<str>>) -> Value<'a> {
        Value::String(Text::Shared(text.into()))
    }

    /// A semantic version; `None` if the text is invalid.
    pub fn semver(text: &str) -> Option<Value<'a>> {
        Version::parse(text).ok().map(|version| Value::Library(LibraryValue::Version(Arc::new(version))))
    }

    pub(crate) fn list(items: Vec<Value<'a>>) -> Value<'a> {
        Value::List(List::Shared(Arc::new(items)))
    }

    pub(crate) fn some(value: Value<'a>) -> Value<'a> {
        Value::Optional(Some(Arc::new(value)))
    }

    /// The string, if this is one.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::String(text) => Some(text),
            _ => None,
        }
    }

    /// The boolean, if this is one.
    pub fn as_bool(&self) -> Option<bool> {
        match self {
            Value::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// The type, as `type(x)` returns it.
    pub fn type_of(&self) -> Type {
        match self {
            Value::Null => Type::Null,
            Value::Bool(_) => Type::Bool,
            Value::Int(_) => Type::Int,
            Value::Uint(_) => Type::Uint,
            Value::Double(_) => Type::Double,
            Value::String(_) => Type::String,
            Value::Bytes(_) => Type::Bytes,
            Value::Duration(_) => Type::Duration,
            Value::Timestamp(_) => Type::Timestamp,
            Value::List(_) => Type::list(Type::Dyn),
            Value::Map(Map::Json(_, decl)) if matches!(decl.ty, Type::Object(_)) => decl.ty.clone(),
            Value::Map(Map::Message(name, _)) => Type::object(name, BTreeMap::new()),
            Value::Map(_) => Type::map(Type::Dyn, Type::Dyn),
            Value::Fields(fields) => Type::object(fields.type_name(), BTreeMap::new()),
            Value::Optional(_) => Type::optional(Type::Dyn),
            Value::Type(_) => Type::Type(None),
            Value::Library(library) => Type::opaque(library.type_name()),
        }
    }

    /// The result of `size()`; 1 for values without a size.
    pub(crate) fn size(&self) -> u64 {
        match self {
            Value::String(text) => text.chars().count() as u64,
            Value::Bytes(bytes) => bytes.len() as u64,
            Value::List(list) => list.len() as u64,
            Value::Map(map) => map.len() as u64,
            Value::Optional(Some(value)) => value.size(),
            Value::Library(LibraryValue::Ip(address)) => address.bytes() as u64,
            Value::Library(LibraryValue::Cidr(block)) => block.bytes() as u64,
            _ => 1,
        }
    }

    /// Compares two values; `None` if their types are not comparable.
    pub(crate) fn compare(&self, other: &Value<'a>) -> Option<Ordering> {
        match (self, other) {
            (Value::Bool(a), Value::Bool(b)) => Some(a.cmp(b)),
            (Value::String(a), Value::String(b)) => Some(a.as_bytes().cmp(b.as_bytes())),
            (Value::Bytes(a), Value::Bytes(b)) => Some(a.cmp(b)),
            (Value::Duration(a), Value::Duration(b)) => Some(a.cmp(b)),
            (Value::Timestamp(a), Value::Timestamp(b)) => Some(a.cmp(b)),
            _ => equality::compare_numbers(self, other),
        }
    }

    /// Whether this is the zero value of its type.
    pub(crate) fn is_zero(&self) -> bool {
        match self {
            Value::Null => true,
            Value::Bool(value) => !value,
            Value::Int(value) => *value == 0,
            Value::Uint(value) => *value == 0,
            Value::Double(value) => *value == 0.0,
            Value::String(text) => text.is_empty(),
            Value::Bytes(bytes) => bytes.is_empty(),
            Value::Duration(nanos) => *nanos == 0,
            Value::Timestamp(timestamp) => {
                timestamp.as_second() == crate::time::MIN_UNIX_SECONDS && timestamp.subsec_nanosecond() == 0
            }
            Value::List(list) => list.is_empty(),
            Value::Map(map) => map.is_empty(),
            Value::Optional(value) => value.is_none(),
            _ => false,
        }
    }
}

impl LibraryValue<'_> {
    fn type_name(&self) -> &'static str {
        match self {
            LibraryValue::Quantity(_) => "kubernetes.Quantity",
            LibraryValue::Version(_) => "kubernetes.Semver",
            LibraryValue::Url(_) => "kubernetes.URL",
            LibraryValue::Ip(_) => "net.IP",
            LibraryValue::Cidr(_) => "net.CIDR",
            LibraryValue::Format(_) => "kubernetes.NamedFormat",
            LibraryValue::Check(check) => check.type_name(),
        }
    }
}

impl<'a> List<'a> {
    /// The number of items.
    pub fn len(&self) -> usize {
        match self {
            List::Json(items, _) => items.len(),
            List::Shared(items) => items.len(),
        }
    }

    /// Whether the list is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The item at an index.
    pub fn get(&self, index: usize) -> Option<Value<'a>> {
        match self {
            List::Json(items, decl) => items.get(index).map(|item| from_json(item, decl.item())),
            List::Shared(items) => items.get(index).cloned(),
        }
    }

    /// The items in order.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + '_ {
        (0..self.len()).filter_map(|index| self.get(index))
    }

    pub(crate) fn list_type(&self) -> &'a ListType {
        match self {
            List::Json(_, decl) => &decl.list_type,
            List::Shared(_) => &ListType::Atomic,
        }
    }
}

impl<'a> Map<'a> {
    /// The number of entries.
    pub fn len(&self) -> usize {
        match self {
            Map::Json(entries, _) => entries.len(),
            Map::Shared(entries) | Map::Message(_, entries) | Map::WithDefault(entries) => entries.len(),
        }
    }

    /// Whether the map is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The value of a string key, or of the field with this escaped name.
    pub fn field(&self, name: &str) -> Option<Value<'a>> {
        match self {
            Map::Json(entries, decl) => match &decl.ty {
                Type::Object(object) if !object.open => {
                    // A null field counts as absent, unlike a null in a list or map.
                    let field = decl.field(name)?;
                    let value = entries.get(&field.property).filter(|value| !value.is_null())?;
                    Some(from_json(value, &field.decl))
                }
                _ => entries.get(name).map(|value| from_json(value, decl.item())),
            },
            Map::Shared(entries) | Map::Message(_, entries) => {
                entries.get(&Key::String(Text::Shared(name.into()))).cloned()
            }
            Map::WithDefault(entries) => {
                let found = entries.get(&Key::String(Text::Shared(name.into()))).cloned();
                Some(found.unwrap_or_else(|| Value::Map(Map::Shared(Arc::default()))))
            }
        }
    }

    pub(crate) fn get(&self, key: &Value<'a>) -> Option<Value<'a>> {
        match (self, key) {
            (_, Value::String(name)) => self.field(name),
            (Map::Json(..), _) => None,
            (Map::Shared(entries) | Map::Message(_, entries) | Map::WithDefault(entries), key) => {
                Key::of(key)?.numeric_keys().find_map(|key| entries.get(&key).cloned())
            }
        }
    }

    /// The keys in order.
    pub fn keys(&self) -> Vec<Value<'a>> {
        match self {
            Map::Json(entries, _) => entries.keys().map(|key| Value::String(Text::Borrowed(key))).collect(),
            Map::Shared(entries) | Map::Message(_, entries) | Map::WithDefault(entries) => {
                entries.keys().map(Key::value).collect()
            }
        }
    }

    /// The entries sorted by key.
    pub fn entries(&self) -> Vec<(Value<'a>, Value<'a>)> {
        match self {
            Map::Json(entries, decl) => {
                let known = |name: &str| match &decl.ty {
                    Type::Object(object) => object.fields.values().find(|field| field.property == name),
                    _ => None,
                };
                let entries = entries.iter().map(|(name, value)| {
                    let decl = known(name).map_or(decl.item(), |field| &field.decl);
                    (Value::String(Text::Borrowed(name)), from_json(value, decl))
                });
                entries.collect()
            }
            Map::Shared(entries) | Map::Message(_, entries) | Map::WithDefault(entries) => {
                entries.iter().map(|(key, value)| (key.value(), value.clone())).collect()
            }
        }
    }
}

impl<'a> Key<'a> {
    pub(crate) fn of(value: &Value<'a>) -> Option<Key<'a>> {
        match value {
            Value::Bool(value) => Some(Key::Bool(*value)),
            Value::Int(value) => Some(Key::Int(*value)),
            Value::Uint(value) => Some(Key::Uint(*value)),
            Value::Double(value) if *value == value.trunc() && value.abs() < 9e15 => {
                Some(Key::Int(*value as i64))
            }
            Value::String(text) => Some(Key::String(text.clone())),
            _ => None,
        }
    }

    /// The key and the equal number of the other integer type.
    fn numeric_keys(self) -> impl Iterator<Item = Key<'a>> {
        let other = match &self {
            Key::Int(value) => u64::try_from(*value).ok().map(Key::Uint),
            Key::Uint(value) => i64::try_from(*value).ok().map(Key::Int),
            _ => None,
        };
        std::iter::once(self).chain(other)
    }

    fn value(&self) -> Value<'a> {
        match self {
            Key::Bool(value) => Value::Bool(*value),
            Key::Int(value) => Value::Int(*value),
            Key::Uint(value) => Value::Uint(*value),
            Key::String(text) => Value::String(text.clone()),
        }
    }
}

impl Deref for Text<'_> {
    type Target = str;
    fn deref(&self) -> &str {
        match self {
            Text::Borrowed(text) => text,
            Text::Shared(text) => text,
        }
    }
}

impl Borrow<str> for Text<'_> {
    fn borrow(&self) -> &str {
        self
    }
}

impl PartialEq for Text<'_> {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Text<'_> {}

impl PartialOrd for Text<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Text<'_> {
    fn cmp(&self, other: &Self) -> Ordering {
        (**self).cmp(&**other)
    }
}

impl fmt::Debug for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.to_short_json() {
            Ok(json) => write!(f, "{json}"),
            Err(_) => write!(f, "<{}>", self.type_of()),
        }
    }
}
