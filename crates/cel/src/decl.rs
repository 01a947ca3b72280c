//! Declarations: a type together with what a schema says beyond it, that is how JSON becomes a value of the type
//! and how large the value can get.

mod schema;
mod table;

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use crate::types::{Object, Type};

/// The largest request the API server takes, from which sizes nobody limited follow.
pub(crate) const MAX_REQUEST_SIZE_BYTES: u64 = 3 * 1024 * 1024;

/// How lists compare and add up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ListType {
    /// In order.
    #[default]
    Atomic,
    /// Without order; adding keeps an element once.
    Set,
    /// Without order; elements with the same values of these keys are the same element.
    Map(Vec<String>),
}

/// A type with what is known of its JSON.
#[derive(Clone, Debug)]
pub struct Decl {
    /// What the checker sees.
    pub ty: Type,
    /// The most characters, items or entries; `u64::MAX` when nothing is known.
    pub max: u64,
    /// The fewest bytes of its JSON.
    pub(crate) min_size: u64,
    /// Of lists and maps.
    pub(crate) items: Option<Arc<Decl>>,
    pub(crate) list_type: ListType,
}

/// A field of an object type.
#[derive(Clone, Debug)]
pub struct Field {
    /// The name in JSON; an expression writes it escaped.
    pub property: String,
    /// What it holds.
    pub decl: Decl,
}

impl Decl {
    /// A declaration that knows nothing but the type.
    pub fn new(ty: Type) -> Decl {
        let items = match &ty {
            Type::List(item) => Some(Arc::new(Decl::new((**item).clone()))),
            Type::Map(types) => Some(Arc::new(Decl::new(types.1.clone()))),
            _ => None,
        };
        let max = if ty.is_scalar() { 0 } else { u64::MAX };
        Decl { ty, max, min_size: 1, items, list_type: ListType::Atomic }
    }

    /// The declaration of a structural OpenAPI schema, as in a CustomResourceDefinition. None if the schema says
    /// nothing that expressions could use. `root` is true for whole (also embedded) resources, which always have
    /// `apiVersion`, `kind`, `metadata.name` and `metadata.generateName`.
    pub fn from_schema(schema: &serde_json::Value, root: bool) -> Option<Decl> {
        schema::decl(schema, root, 0)
    }

    /// The declaration of a built-in type.
    pub fn from_table(table: &::schema::Table, ty: ::schema::TypeId) -> Decl {
        table::decl(table, ty)
    }

    /// The same with its object types named after the place they are found at, starting from `name`.
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

    /// How often such a value can stand in one request.
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
