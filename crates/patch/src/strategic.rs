//! Strategic merge patch: a merge patch that merges lists by key according to the schema and supports
//! the directives `$patch`, `$retainKeys`, `$deleteFromPrimitiveList/…` and `$setElementOrder/…`.
//!
//! Upstream: `apimachinery/pkg/util/strategicpatch`.

mod lists;
#[cfg(test)]
mod tests;

use schema::{PatchStrategy, Shape, Table, Type, TypeId};
use serde_json::{Map, Value};

use crate::go;

const PATCH: &str = "$patch";
const RETAIN_KEYS: &str = "$retainKeys";
const DELETE_FROM_LIST: &str = "$deleteFromPrimitiveList";
const SET_ORDER: &str = "$setElementOrder";

/// The only struct field with `patchStrategy: replace` upstream.
const REPLACE_FIELDS: &[(&str, &str)] = &[("PodDisruptionBudgetSpec", "selector")];

/// The variants correspond to upstream's response statuses, and the texts are upstream's.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum StrategicError {
    #[error("{0}")]
    BadRequest(String),
    #[error("{0}")]
    Unprocessable(String),
    #[error("{0}")]
    Internal(String),
}

/// Merges `patch` into `doc`, an object of type `ty`.
pub fn strategic(table: &Table, ty: TypeId, doc: &mut Value, patch: &Value) -> Result<(), StrategicError> {
    let Value::Object(patch) = patch else {
        return Err(StrategicError::BadRequest("invalid JSON document".to_owned()));
    };
    let original = match doc.take() {
        Value::Object(original) => original,
        _ => Map::new(),
    };
    *doc = Value::Object(merge_map(table, Level::Struct(table.get(ty)), original, patch)?);
    Ok(())
}

type Object = Map<String, Value>;
type MergeResult<T> = Result<T, StrategicError>;

/// The type in which the fields of an object are looked up.
#[derive(Clone, Copy)]
enum Level<'t> {
    Struct(&'t Type),
    /// A struct without JSON fields, with its Go name.
    Opaque(&'static str),
    /// Not a struct, with its Go kind.
    Plain(&'static str),
}

/// The schema of a field.
struct Meta<'t> {
    level: Level<'t>,
    is_list: bool,
    strategy: PatchStrategy,
    is_replaced: bool,
    merge_key: &'t str,
}

impl<'t> Level<'t> {
    fn of(table: &'t Table, shape: &Shape) -> Level<'t> {
        match shape {
            Shape::Struct(id) => Level::Struct(table.get(*id)),
            Shape::RawExtension => Level::Opaque("RawExtension"),
            Shape::Json => Level::Opaque("JSON"),
            Shape::FieldsV1 => Level::Opaque("FieldsV1"),
            Shape::Quantity => Level::Opaque("Quantity"),
            Shape::IntOrString => Level::Opaque("IntOrString"),
            Shape::Time | Shape::MicroTime => Level::Opaque("Time"),
            Shape::Map { .. } => Level::Plain("map"),
            Shape::List { .. } | Shape::Bytes => Level::Plain("slice"),
            Shape::String => Level::Plain("string"),
            Shape::Bool => Level::Plain("bool"),
            Shape::Int32 => Level::Plain("int32"),
            Shape::Int64 | Shape::Duration => Level::Plain("int64"),
            Shape::Double => Level::Plain("float64"),
        }
    }

    fn field(self, table: &'t Table, name: &str) -> MergeResult<Meta<'t>> {
        let unknown = |owner: &str| {
            internal(format!(
                "unable to find api field in struct {owner} for the json field {}",
                go::quote(name)
            ))
        };
        let ty = match self {
            Level::Struct(ty) => ty,
            Level::Opaque(owner) => return Err(unknown(owner)),
            Level::Plain(kind) => {
                return Err(internal(format!(
                    "merging an object in json but data type is not struct, instead is: {kind}"
                )));
            }
        };
        let field = ty
            .field(name)
            .or_else(|| ty.fields.iter().find(|field| field.name.eq_ignore_ascii_case(name)))
            .ok_or_else(|| unknown(ty.short_name()))?;
        let (shape, is_list) = match &field.shape {
            Shape::List { item, .. } => (&**item, true),
            other => (other, false),
        };
        Ok(Meta {
            level: Level::of(table, shape),
            is_list,
            strategy: field.patch_strategy,
            is_replaced: REPLACE_FIELDS.contains(&(ty.short_name(), &*field.name)),
            merge_key: &field.merge_key,
        })
    }

    /// Like `field`, for a field that is a list in both the document and the patch.
    fn list(self, table: &'t Table, name: &str) -> MergeResult<Meta<'t>> {
        let meta = self.field(table, name)?;
        if !meta.is_list {
            return Err(internal("expected slice or array type, but got: struct"));
        }
        if matches!(meta.level, Level::Plain("slice")) {
            return Err(internal("unexpected slice of slice"));
        }
        Ok(meta)
    }

    fn kind(self) -> &'static str {
        match self {
            Level::Struct(_) | Level::Opaque(_) => "struct",
            Level::Plain(kind) => kind,
        }
    }
}

fn merge_map<'t>(
    table: &'t Table,
    level: Level<'t>,
    mut original: Object,
    patch: &Object,
) -> MergeResult<Object> {
    if let Some(directive) = patch.get(PATCH) {
        return match directive.as_str() {
            Some("replace") => {
                let mut replacement = patch.clone();
                replacement.remove(PATCH);
                Ok(replacement)
            }
            Some("delete") => Ok(Map::new()),
            _ => Err(bad_patch_type(directive, patch)),
        };
    }
    retain_keys(&mut original, patch)?;
    let ordered = lists::merge_ordered(table, level, &mut original, patch)?;

    for (key, change) in patch {
        if key == RETAIN_KEYS || key.starts_with(SET_ORDER) || ordered.contains(key.as_str()) {
            continue;
        }
        let deletes = key.starts_with(DELETE_FROM_LIST);
        let name = if deletes { field_name(key, DELETE_FROM_LIST)? } else { key };
        if change.is_null() {
            original.remove(name);
            continue;
        }
        let merged = match (original.get_mut(name).map(Value::take), change) {
            (Some(Value::Object(old)), Value::Object(new)) => {
                let meta = level.field(table, name)?;
                Some(Value::Object(if meta.is_replaced {
                    new.clone()
                } else {
                    merge_map(table, meta.level, old, new)?
                }))
            }
            (Some(Value::Array(old)), Value::Array(new)) => {
                let meta = level.list(table, name)?;
                Some(Value::Array(lists::merge_field(table, &meta, old, new, deletes)?))
            }
            (old, _) if deletes => old,
            (_, new) => remove_directives(new),
        };
        match merged {
            Some(merged) => original.insert(name.to_owned(), merged),
            None => original.remove(name),
        };
    }
    Ok(original)
}

/// The field that a parallel list such as `$deleteFromPrimitiveList/finalizers` refers to.
fn field_name<'k>(key: &'k str, prefix: &str) -> MergeResult<&'k str> {
    match key.split_once('/') {
        Some((start, name)) if start == prefix => Ok(name),
        _ if prefix == SET_ORDER => Err(bad_order()),
        _ => Err(StrategicError::BadRequest("invalid patch format of primitive list".to_owned())),
    }
}

/// Removes the fields that are not listed in `$retainKeys`.
fn retain_keys(original: &mut Object, patch: &Object) -> MergeResult<()> {
    let Some(retained) = patch.get(RETAIN_KEYS) else { return Ok(()) };
    let bad = || StrategicError::BadRequest("invalid patch format of retainKeys".to_owned());
    let retained = retained.as_array().ok_or_else(bad)?;
    let keep: std::collections::HashSet<&str> = retained.iter().filter_map(Value::as_str).collect();
    let has_extra_keys = patch.iter().any(|(key, change)| {
        let directive =
            [RETAIN_KEYS, DELETE_FROM_LIST, SET_ORDER].iter().any(|prefix| key.starts_with(prefix));
        !change.is_null() && !directive && !keep.contains(key.as_str())
    });
    if has_extra_keys {
        return Err(bad());
    }
    original.retain(|key, _| keep.contains(key.as_str()));
    Ok(())
}

/// A patch value for a field that does not exist: without nulls and directives. `None` if it is a
/// directive itself.
fn remove_directives(change: &Value) -> Option<Value> {
    match change {
        Value::Object(fields) if fields.contains_key(PATCH) => None,
        Value::Object(fields) => Some(Value::Object(
            fields
                .iter()
                .filter(|(_, value)| !value.is_null())
                .filter_map(|(name, value)| Some((name.clone(), remove_directives(value)?)))
                .collect(),
        )),
        Value::Array(items) => Some(Value::Array(items.iter().filter_map(remove_directives).collect())),
        scalar => Some(scalar.clone()),
    }
}

fn internal(text: impl Into<String>) -> StrategicError {
    StrategicError::Internal(text.into())
}

fn bad_order() -> StrategicError {
    StrategicError::BadRequest("invalid patch format of setElementOrder list".to_owned())
}

fn bad_patch_type(directive: &Value, patch: &Object) -> StrategicError {
    let map = go::print(&Value::Object(patch.clone()));
    internal(format!("unknown patch type: {} in map: {map}", go::print(directive)))
}

fn no_merge_key(item: &Object, key: &str) -> StrategicError {
    let map = go::print(&Value::Object(item.clone()));
    internal(format!("map: {map} does not contain declared merge key: {key}"))
}

fn wrong_type(expected: &str, got: &Value) -> StrategicError {
    let got = if got.is_null() { "%!s(<nil>)" } else { go::type_name(got) };
    internal(format!("expected a {expected}, but received a {got}"))
}
