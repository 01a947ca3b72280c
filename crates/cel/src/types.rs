//! The types of expressions.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::decl::Field;
use crate::escape::escape;

/// The type of an expression.
#[derive(Clone, Debug)]
pub enum Type {
    /// Any type; checked during evaluation.
    Dyn,
    /// The type of an invalid expression, for which an error has been reported.
    Error,
    /// `null`.
    Null,
    /// A boolean.
    Bool,
    /// A signed 64-bit integer.
    Int,
    /// An unsigned 64-bit integer.
    Uint,
    /// A 64-bit IEEE 754 number.
    Double,
    /// A Unicode string.
    String,
    /// A byte string.
    Bytes,
    /// A duration.
    Duration,
    /// A timestamp.
    Timestamp,
    /// A list with elements of one type.
    List(Arc<Type>),
    /// A map with its key and value types.
    Map(Arc<(Type, Type)>),
    /// An object with declared fields.
    Object(Arc<Object>),
    /// An opaque type, by name: `net.IP`, `optional_type(T)`.
    Opaque(&'static str, Arc<[Type]>),
    /// The type of a type.
    Type(Option<Arc<Type>>),
    /// A type parameter or variable.
    Param(Arc<str>),
}

/// An object type. Object types are equal if they have the same name.
#[derive(Debug)]
pub struct Object {
    /// The name in error messages.
    pub name: String,
    /// The fields by escaped name.
    pub fields: BTreeMap<String, Field>,
    /// Whether the object has arbitrary fields, all of type [`Type::Dyn`].
    pub open: bool,
}

impl Object {
    /// The field with this escaped or JSON name.
    pub(crate) fn field(&self, name: &str) -> Option<&Field> {
        self.fields.get(name).or_else(|| self.fields.get(&escape(name)?))
    }
}

pub(crate) const OPTIONAL: &str = "optional_type";

impl Type {
    /// The type of lists of `item`.
    pub fn list(item: Type) -> Type {
        Type::List(Arc::new(item))
    }

    /// The type of maps from `key` to `value`.
    pub fn map(key: Type, value: Type) -> Type {
        Type::Map(Arc::new((key, value)))
    }

    /// The type of optional values.
    pub fn optional(value: Type) -> Type {
        Type::Opaque(OPTIONAL, Arc::new([value]))
    }

    /// An opaque type without parameters.
    pub fn opaque(name: &'static str) -> Type {
        Type::Opaque(name, Arc::new([]))
    }

    /// An object type.
    pub fn object(name: &str, fields: BTreeMap<String, Field>) -> Type {
        Type::Object(Arc::new(Object { name: name.to_owned(), fields, open: false }))
    }

    /// The name as printed for `type(x)`.
    pub fn name(&self) -> &str {
        match self {
            Type::Dyn => "dyn",
            Type::Error => "!error!",
            Type::Null => "null_type",
            Type::Bool => "bool",
            Type::Int => "int",
            Type::Uint => "uint",
            Type::Double => "double",
            Type::String => "string",
            Type::Bytes => "bytes",
            Type::Duration => "google.protobuf.Duration",
            Type::Timestamp => "google.protobuf.Timestamp",
            Type::List(_) => "list",
            Type::Map(_) => "map",
            Type::Object(object) => &object.name,
            Type::Opaque(name, _) => name,
            Type::Type(_) => "type",
            Type::Param(name) => name,
        }
    }

    pub(crate) fn is_dyn(&self) -> bool {
        matches!(self, Type::Dyn)
    }

    pub(crate) fn is_dyn_or_error(&self) -> bool {
        matches!(self, Type::Dyn | Type::Error)
    }

    /// The element type of an optional type, or the type itself; and whether it was optional.
    pub(crate) fn unwrap_optional(&self) -> (Type, bool) {
        match self {
            Type::Opaque(OPTIONAL, inner) => (inner[0].clone(), true),
            _ => (self.clone(), false),
        }
    }

    /// Whether the type consists of more than `max_size` types.
    pub(crate) fn exceeds_size(&self, max_size: usize) -> bool {
        fn remaining_size(ty: &Type, remaining: usize) -> Option<usize> {
            let remaining = remaining.checked_sub(1)?;
            match ty {
                Type::List(item) => remaining_size(item, remaining),
                Type::Map(types) => remaining_size(&types.1, remaining_size(&types.0, remaining)?),
                Type::Opaque(_, parameters) => {
                    parameters.iter().try_fold(remaining, |remaining, ty| remaining_size(ty, remaining))
                }
                Type::Type(Some(inner)) => remaining_size(inner, remaining),
                _ => Some(remaining),
            }
        }
        remaining_size(self, max_size).is_none()
    }

    /// Whether values have a fixed size.
    pub(crate) fn is_scalar(&self) -> bool {
        match self {
            Type::Bool | Type::Double | Type::Duration | Type::Int | Type::Timestamp | Type::Uint => true,
            Type::Opaque(OPTIONAL, inner) => inner[0].is_scalar(),
            _ => false,
        }
    }
}

impl PartialEq for Type {
    fn eq(&self, other: &Type) -> bool {
        match (self, other) {
            (Type::List(a), Type::List(b)) => a == b,
            (Type::Map(a), Type::Map(b)) => a == b,
            (Type::Object(a), Type::Object(b)) => a.name == b.name,
            (Type::Opaque(a, p), Type::Opaque(b, q)) => a == b && p == q,
            (Type::Type(a), Type::Type(b)) => a == b,
            (Type::Param(a), Type::Param(b)) => a == b,
            _ => std::mem::discriminant(self) == std::mem::discriminant(other),
        }
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Type::Null => f.write_str("null"),
            Type::Duration => f.write_str("duration"),
            Type::Timestamp => f.write_str("timestamp"),
            Type::List(item) => write!(f, "list({item})"),
            Type::Map(types) => write!(f, "map({}, {})", types.0, types.1),
            Type::Type(Some(inner)) => write!(f, "type({inner})"),
            Type::Opaque(name, parameters) if !parameters.is_empty() => {
                write!(f, "{name}(")?;
                for (index, parameter) in parameters.iter().enumerate() {
                    write!(f, "{}{parameter}", if index > 0 { ", " } else { "" })?;
                }
                f.write_str(")")
            }
            _ => f.write_str(self.name()),
        }
    }
}
