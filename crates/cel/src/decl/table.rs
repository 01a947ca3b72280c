//! Declarations of built-in types, from the table of their fields.

use std::collections::BTreeMap;
use std::sync::Arc;

use schema::{Shape, Table, TypeId};

use super::{Decl, Field, LARGEST_REQUEST, ListType};
use crate::escape::escape;
use crate::types::Type;

pub(super) fn decl(table: &Table, ty: TypeId) -> Decl {
    let mut decl = of_type(table, ty, &mut Vec::new());
    if let Type::Object(object) = &mut decl.ty
        && let Some(object) = Arc::get_mut(object)
    {
        for name in ["kind", "apiVersion"] {
            let field = Field { property: name.to_owned(), decl: text() };
            object.fields.entry(name.to_owned()).or_insert(field);
        }
    }
    decl
}

/// Types that contain themselves end where they begin again.
fn of_type(table: &Table, id: TypeId, above: &mut Vec<TypeId>) -> Decl {
    if above.contains(&id) {
        return Type::Dyn.into();
    }
    above.push(id);
    let mut fields = BTreeMap::new();
    for field in &table.get(id).fields {
        if let Some(escaped) = escape(&field.name) {
            let decl = of_shape(table, &field.shape, above);
            fields.insert(escaped, Field { property: field.name.to_string(), decl });
        }
    }
    above.pop();
    Decl { max: 0, min_size: 2, ..Decl::new(Type::object("object", fields)) }
}

fn of_shape(table: &Table, shape: &Shape, above: &mut Vec<TypeId>) -> Decl {
    match shape {
        Shape::String | Shape::Duration | Shape::Quantity => text(),
        Shape::Bool => Type::Bool.into(),
        Shape::Int32 | Shape::Int64 => Type::Int.into(),
        Shape::Double => Type::Double.into(),
        Shape::Bytes => Type::Bytes.into(),
        Shape::Time | Shape::MicroTime => Type::Timestamp.into(),
        Shape::IntOrString | Shape::RawExtension | Shape::Json | Shape::FieldsV1 => Type::Dyn.into(),
        Shape::Struct(id) => of_type(table, *id, above),
        Shape::List { item, kind } => {
            let item = of_shape(table, item, above);
            let list_type = match kind {
                schema::ListKind::Atomic => ListType::Atomic,
                schema::ListKind::Set => ListType::Set,
                schema::ListKind::Map(keys) => ListType::Map(keys.iter().map(ToString::to_string).collect()),
            };
            let max = (LARGEST_REQUEST - 2) / (item.min_size + 1);
            Decl { ty: Type::list(item.ty.clone()), max, min_size: 2, items: Some(Arc::new(item)), list_type }
        }
        Shape::Map { value, .. } => {
            let item = of_shape(table, value, above);
            let ty = Type::map(Type::String, item.ty.clone());
            let max = (LARGEST_REQUEST - 2) / (item.min_size + 6);
            Decl { ty, max, min_size: 2, items: Some(Arc::new(item)), list_type: ListType::Atomic }
        }
    }
}

fn text() -> Decl {
    Decl { max: LARGEST_REQUEST - 2, min_size: 2, ..Decl::new(Type::String) }
}
