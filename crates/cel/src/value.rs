//! Values while an expression is evaluated. What comes from JSON stays a reference into it until somebody looks
//! inside, one level at a time.

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

/// What an expression evaluates to.
#[derive(Clone)]
pub enum Value<'a> {
    /// `null`.
    Null,
    /// A truth value.
    Bool(bool),
    /// A signed integer.
    Int(i64),
    /// An unsigned integer.
    Uint(u64),
    /// A floating-point number.
    Double(f64),
    /// Text.
    String(Text<'a>),
    /// Bytes.
    Bytes(Arc<[u8]>),
    /// Nanoseconds.
    Duration(i64),
    /// A point in time.
    Timestamp(Timestamp),
    /// A list.
    List(List<'a>),
    /// A map, or an object from JSON.
    Map(Map<'a>),
    /// Fields that somebody else computes when they are asked for.
    Fields(Arc<dyn Fields<'a> + 'a>),
    /// A value that may be missing.
    Optional(Option<Arc<Value<'a>>>),
    /// A type as a value.
    Type(Type),
    /// A value of one of Kubernetes' libraries.
    Library(LibraryValue<'a>),
}

/// Values of the libraries, as they are known to their functions.
#[derive(Clone)]
pub enum LibraryValue<'a> {
    /// `quantity()`.
    Quantity(schema::quantity::Quantity),
    /// `semver()`.
    Version(Arc<Version>),
    /// `url()`.
    Url(Arc<Url>),
    /// `ip()`.
    Ip(IpAddress),
    /// `cidr()`.
    Cidr(CidrBlock),
    /// `format.named()`.
    Format(Format),
    /// `authorizer` and what is built from it.
    Check(Arc<AuthorizerCheck<'a>>),
}

/// An object whose fields are computed when an expression reads them.
pub trait Fields<'a>: Send + Sync {
    /// The field of this name, if there is one. What computing it costs is taken from `budget`.
    fn get(&self, name: &str, budget: &mut Budget) -> Option<Result<Value<'a>, EvalError>>;

    /// The name of its type.
    fn type_name(&self) -> &str {
        "object"
    }
}

/// Text that is borrowed from JSON or shared.
#[derive(Clone)]
pub enum Text<'a> {
    /// From JSON or the expression.
    Borrowed(&'a str),
    /// Made by a function.
    Shared(Arc<str>),
}

/// A list that is borrowed from JSON or shared.
#[derive(Clone)]
pub enum List<'a> {
    /// From JSON, with the declaration of the list.
    Json(&'a [Json], &'a Decl),
    /// Made by an expression.
    Shared(Arc<Vec<Value<'a>>>),
}

/// A map that is borrowed from JSON or shared.
#[derive(Clone)]
pub enum Map<'a> {
    /// From JSON, with the declaration of the object or map.
    Json(&'a serde_json::Map<String, Json>, &'a Decl),
    /// Made by an expression.
    Shared(Arc<BTreeMap<Key<'a>, Value<'a>>>),
    /// Made by an expression that named its type.
    Message(Arc<str>, Arc<BTreeMap<Key<'a>, Value<'a>>>),
    /// Has an empty map at every key that it does not have.
    WithDefault(Arc<BTreeMap<Key<'a>, Value<'a>>>),
}

/// A key of a map.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key<'a> {
    /// `true` or `false`.
    Bool(bool),
    /// A number that fits.
    Int(i64),
    /// A number.
    Uint(u64),
    /// Text, as nearly always.
    String(Text<'a>),
}

impl<'a> Value<'a> {
    /// The CEL value of JSON nobody declared a type for.
    pub fn from_json(json: &'a Json) -> Value<'a> {
        from_json(json, Decl::unknown())
    }

    /// The CEL value of JSON with this declaration.
    pub fn from_declared(json: &'a Json, decl: &'a Decl) -> Value<'a> {
        from_json(json, decl)
    }

    /// Shared text.
    pub fn text(text: impl Into<Arc<str>>) -> Value<'a> {
        Value::String(Text::Shared(text.into()))
    }

    /// A semantic version; none if the text is not one.
    pub fn semver(text: &str) -> Option<Value<'a>> {
        Version::parse(text).ok().map(|version| Value::Library(LibraryValue::Version(Arc::new(version))))
    }

    pub(crate) fn list(items: Vec<Value<'a>>) -> Value<'a> {
        Value::List(List::Shared(Arc::new(items)))
    }

    pub(crate) fn some(value: Value<'a>) -> Value<'a> {
        Value::Optional(Some(Arc::new(value)))
    }

    /// The text, if it is text.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::String(text) => Some(text),
            _ => None,
        }
    }

    /// The truth value, if it is one.
    pub fn as_bool(&self) -> Option<bool> {
        match self {
            Value::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// Its type, as `type(x)` gives it.
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

    /// What `size()` gives; 1 for what has no size.
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

    /// How two values of comparable types are ordered; none for types that have no order.
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

    /// Whether it is the empty or zero value of its type.
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
    /// How many items there are.
    pub fn len(&self) -> usize {
        match self {
            List::Json(items, _) => items.len(),
            List::Shared(items) => items.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The item at this place.
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
    /// How many entries there are.
    pub fn len(&self) -> usize {
        match self {
            Map::Json(entries, _) => entries.len(),
            Map::Shared(entries) | Map::Message(_, entries) | Map::WithDefault(entries) => entries.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The value of a key that is text; of an object, of the field with this (escaped) name.
    pub fn field(&self, name: &str) -> Option<Value<'a>> {
        match self {
            Map::Json(entries, decl) => match &decl.ty {
                Type::Object(object) if !object.open => {
                    // A field that is null is as good as absent, unlike a null in a list or map.
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

    /// The entries in the order of their keys.
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

    /// The key and the same number in the other type.
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
