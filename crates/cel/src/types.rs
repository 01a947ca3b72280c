//! What the checker knows about a value before it exists.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::decl::Field;
use crate::escape::escape;

/// The type of an expression.
#[derive(Clone, Debug)]
pub enum Type {
    /// Anything; checked when it is evaluated.
    Dyn,
    /// What has already been complained about.
    Error,
    /// `null`.
    Null,
    /// `true` and `false`.
    Bool,
    /// 64 bits, signed.
    Int,
    /// 64 bits, unsigned.
    Uint,
    /// IEEE 754 with 64 bits.
    Double,
    /// Unicode text.
    String,
    /// Raw bytes.
    Bytes,
    /// A span of time.
    Duration,
    /// A point in time.
    Timestamp,
    /// A list of one type.
    List(Arc<Type>),
    /// A map from one type to another.
    Map(Arc<(Type, Type)>),
    /// An object with declared fields.
    Object(Arc<Object>),
    /// A type of a library, known by name: `net.IP`, `optional_type(T)`.
    Opaque(&'static str, Arc<[Type]>),
    /// The type of types.
    Type(Option<Arc<Type>>),
    /// A parameter of a signature.
    Param(Arc<str>),
}

/// The fields of an object type. Two of them are the same type if they have the same name.
#[derive(Debug)]
pub struct Object {
    /// Shown in complaints.
    pub name: String,
    /// By name as an expression writes it, which is escaped.
    pub fields: BTreeMap<String, Field>,
    /// Whether it has every field, all of them [`Type::Dyn`].
    pub open: bool,
}

impl Object {
    /// The field of this name, escaped or as it is in JSON.
    pub(crate) fn field(&self, name: &str) -> Option<&Field> {
        self.fields.get(name).or_else(|| self.fields.get(&escape(name)?))
    }
}

pub(crate) const OPTIONAL: &str = "optional_type";

impl Type {
    /// A list of `item`.
    pub fn list(item: Type) -> Type {
        Type::List(Arc::new(item))
    }

    /// A map from `key` to `value`.
    pub fn map(key: Type, value: Type) -> Type {
        Type::Map(Arc::new((key, value)))
    }

    /// Either a `value` or nothing.
    pub fn optional(value: Type) -> Type {
        Type::Opaque(OPTIONAL, Arc::new([value]))
    }

    /// A library's type without parameters.
    pub fn opaque(name: &'static str) -> Type {
        Type::Opaque(name, Arc::new([]))
    }

    /// An object type of this name with these fields.
    pub fn object(name: &str, fields: BTreeMap<String, Field>) -> Type {
        Type::Object(Arc::new(Object { name: name.to_owned(), fields, open: false }))
    }

    /// The name as `type(x)` prints it.
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

    /// What is inside an optional, and whether it was one.
    pub(crate) fn unwrap_optional(&self) -> (Type, bool) {
        match self {
            Type::Opaque(OPTIONAL, inner) => (inner[0].clone(), true),
            _ => (self.clone(), false),
        }
    }

    /// Whether the type is made of more than so many others.
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

    /// Of a fixed size that is known without looking.
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
