//! Declarations: a type with further information from its schema, which determines how JSON is
//! converted to CEL values and how large these can be. Counterpart: `DeclType` in `apiserver/pkg/cel`.

mod schema;
mod table;

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use crate::types::{Object, Type};

/// The API server's limit on the size of a request body. It determines the maximum size of values
/// without limits in their schema.
pub(crate) const MAX_REQUEST_SIZE_BYTES: u64 = 3 * 1024 * 1024;

/// How lists are compared and concatenated (`x-kubernetes-list-type`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ListType {
    /// Ordered.
    #[default]
    Atomic,
    /// Unordered. Concatenation removes duplicates.
    Set,
    /// Unordered. Elements with the same values of these keys are the same element.
    Map(Vec<String>),
}

/// A type with the properties of its JSON representation.
#[derive(Clone, Debug)]
pub struct Decl {
    /// The type for the checker.
    pub ty: Type,
    /// The maximum number of characters, items or entries; `u64::MAX` if unknown.
    pub max: u64,
    /// The minimum size of the JSON representation in bytes.
    pub(crate) min_size: u64,
    /// The declaration of list items or map values.
    pub(crate) items: Option<Arc<Decl>>,
    pub(crate) list_type: ListType,
}

/// A field of an object type.
#[derive(Clone, Debug)]
pub struct Field {
    /// The name in JSON. Expressions use the escaped form.
    pub property: String,
    /// The declaration of its value.
    pub decl: Decl,
}

impl Decl {
    /// A declaration with no information beyond the type.
    pub fn new(ty: Type) -> Decl {
        let items = match &ty {
            Type::List(item) => Some(Arc::new(Decl::new((**item).clone()))),
            Type::Map(types) => Some(Arc::new(Decl::new(types.1.clone()))),
            _ => None,
        };
        let max = if ty.is_scalar() { 0 } else { u64::MAX };
        Decl { ty, max, min_size: 1, items, list_type: ListType::Atomic }
    }

    /// The declaration of a structural OpenAPI schema, as in a CustomResourceDefinition. `None` if the
    /// schema has nothing that expressions could use. `root` is true for complete (also embedded)
    /// resources, which always have `apiVersion`, `kind`, `metadata.name` and `metadata.generateName`.
    pub fn from_schema(schema: &serde_json::Value, root: bool) -> Option<Decl> {
        schema::decl(schema, root, 0)
    }

    /// The declaration of a built-in type.
    pub fn from_table(table: &::schema::Table, ty: ::schema::TypeId) -> Decl {
        table::decl(table, ty)
    }

    /// Names the object types in the declaration after their path, starting with `name`.
    pub fn with_type_name(self, name: &str) -> Decl {
        let Decl { ty, max, min_size, items, list_type } = self;
        match ty {
            Type::Object(object) => {
                let name = if object.name == "object" { name } else { object.name.as_str() };
                let fields = object.fields.iter().map(|(key, field)| {
                    let decl = field.decl.clone().with_type_name(&format!("{name}.{key}"));
                    (key.clone(), Field { property: field.property.clone(), decl })
                });
                let fields: BTreeMap<String, Field> = fields.collect();
                let ty = Type::Object(Arc::new(Object { name: name.to_owned(), fields, open: object.open }));
                Decl { ty, max, min_size, items, list_type }
            }
            Type::List(_) => {
                let item =
                    items.map(|item| Arc::unwrap_or_clone(item).with_type_name(&format!("{name}.@idx")));
                let inner = item.as_ref().map_or(Type::Dyn, |item| item.ty.clone());
                Decl { ty: Type::list(inner), max, min_size, items: item.map(Arc::new), list_type }
            }
            Type::Map(types) => {
                let item =
                    items.map(|item| Arc::unwrap_or_clone(item).with_type_name(&format!("{name}.@elem")));
                let inner = item.as_ref().map_or(Type::Dyn, |item| item.ty.clone());
                Decl {
                    ty: Type::map(types.0.clone(), inner),
                    max,
                    min_size,
                    items: item.map(Arc::new),
                    list_type,
                }
            }
            ty => Decl { ty, max, min_size, items, list_type },
        }
    }

    /// The maximum number of such values in one request.
    pub fn max_items_in_request(&self) -> u64 {
        MAX_REQUEST_SIZE_BYTES / self.min_size.saturating_add(1)
    }

    pub(crate) fn unknown() -> &'static Decl {
        static UNKNOWN: LazyLock<Decl> = LazyLock::new(|| Decl::new(Type::Dyn));
        &UNKNOWN
    }

    pub(crate) fn item(&self) -> &Decl {
        match &self.items {
            Some(items) => items,
            None => Decl::unknown(),
        }
    }

    pub(crate) fn field(&self, name: &str) -> Option<&Field> {
        match &self.ty {
            Type::Object(object) => object.field(name),
            _ => None,
        }
    }
}

impl From<Type> for Decl {
    fn from(ty: Type) -> Decl {
        Decl::new(ty)
    }
}
