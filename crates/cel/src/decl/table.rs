//! Creates declarations of built-in types from the schema table.

use std::collections::BTreeMap;
use std::sync::Arc;

use schema::{Shape, Table, TypeId};

use super::{Decl, Field, ListType, MAX_REQUEST_SIZE_BYTES};
use crate::escape::escape;
use crate::types::Type;

pub(super) fn decl(table: &Table, ty: TypeId) -> Decl {
    let mut decl = decl_of_type(table, ty, &mut Vec::new());
    if let Type::Object(object) = &mut decl.ty
        && let Some(object) = Arc::get_mut(object)
    {
        for name in ["kind", "apiVersion"] {
            let field = Field { property: name.to_owned(), decl: string_decl() };
            object.fields.entry(name.to_owned()).or_insert(field);
        }
    }
    decl
}

/// Recursive types become `dyn` where they repeat.
fn decl_of_type(table: &Table, id: TypeId, parent_types: &mut Vec<TypeId>) -> Decl {
    if parent_types.contains(&id) {
        return Type::Dyn.into();
    }
    parent_types.push(id);
    let mut fields = BTreeMap::new();
    for field in &table.get(id).fields {
        if let Some(escaped) = escape(&field.name) {
            let decl = decl_of_shape(table, &field.shape, parent_types);
            fields.insert(escaped, Field { property: field.name.to_string(), decl });
        }
    }
    parent_types.pop();
    Decl { max: 0, min_size: 2, ..Decl::new(Type::object("object", fields)) }
}

fn decl_of_shape(table: &Table, shape: &Shape, parent_types: &mut Vec<TypeId>) -> Decl {
    match shape {
        Shape::String | Shape::Duration | Shape::Quantity => string_decl(),
        Shape::Bool => Type::Bool.into(),
        Shape::Int32 | Shape::Int64 => Type::Int.into(),
        Shape::Double => Type::Double.into(),
        Shape::Bytes => Type::Bytes.into(),
        Shape::Time | Shape::MicroTime => Type::Timestamp.into(),
        Shape::IntOrString | Shape::RawExtension | Shape::Json | Shape::FieldsV1 => Type::Dyn.into(),
        Shape::Struct(id) => decl_of_type(table, *id, parent_types),
        Shape::List { item, kind } => {
            let item = decl_of_shape(table, item, parent_types);
            let list_type = match kind {
                schema::ListType::Atomic => ListType::Atomic,
                schema::ListType::Set => ListType::Set,
                schema::ListType::Map(keys) => ListType::Map(keys.iter().map(ToString::to_string).collect()),
            };
            let max = (MAX_REQUEST_SIZE_BYTES - 2) / (item.min_size + 1);
            Decl { ty: Type::list(item.ty.clone()), max, min_size: 2, items: Some(Arc::new(item)), list_type }
        }
        Shape::Map { value, .. } => {
            let item = decl_of_shape(table, value, parent_types);
            let ty = Type::map(Type::String, item.ty.clone());
            let max = (MAX_REQUEST_SIZE_BYTES - 2) / (item.min_size + 6);
            Decl { ty, max, min_size: 2, items: Some(Arc::new(item)), list_type: ListType::Atomic }
        }
    }
}

fn string_decl() -> Decl {
    Decl { max: MAX_REQUEST_SIZE_BYTES - 2, min_size: 2, ..Decl::new(Type::String) }
}
