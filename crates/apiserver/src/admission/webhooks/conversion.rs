//! Conversion of objects between the stored version and the version of a webhook or policy, for
//! subresources, too.

use api::json::JsonExt as _;
use api::{Resource, Status};
use serde_json::Value;

use crate::admission::Request;
use crate::codec;
use crate::create::defaulted;
use crate::subresource_view::SubresourceView;

/// Group, version and kind of the body of a request for the subresource.
pub fn kind_of(row: &'static Resource, subresource: &str) -> (&'static str, &'static str, &'static str) {
    let through = row.subresources.iter().find(|sub| sub.name == subresource && !sub.kind.is_empty());
    match through {
        Some(sub) => {
            let (group, version) = sub.group_version.unwrap_or((row.group, row.version));
            (group, version, sub.kind)
        }
        None => (row.group, row.version, row.kind),
    }
}

/// Whether the subresource has a kind of its own.
fn is_subresource_object(request: &Request<'_>, row: &'static Resource) -> bool {
    kind_of(row, request.subresource).2 != row.kind
}

/// Converts an object in its stored version to the version of `row`.
pub fn to_versioned(request: &Request<'_>, row: &'static Resource, object: &Value) -> Value {
    if object.is_null() {
        return Value::Null;
    }
    match request.subresource {
        // A custom resource without a replicas field has no Scale.
        "scale" => SubresourceView::Scale.project(row, object.clone()).unwrap_or_default(),
        _ if is_subresource_object(request, row) => object.clone(),
        _ => codec::from_stored(row, object.clone()),
    }
}

/// Validates and defaults the object a webhook returned, and converts it back to the stored
/// version.
pub fn from_versioned(
    request: &Request<'_>,
    row: &'static Resource,
    before: &Value,
    mut converted: Value,
) -> Result<Value, Status> {
    let gvk = kind_of(row, request.subresource);
    if row.custom.is_some() && request.subresource != "scale" {
        codec::normalize_row(row, SubresourceView::Object, &mut converted).map_err(Status::internal)?;
        codec::set_type_meta(&mut converted, gvk.0, gvk.1, gvk.2);
        return defaulted(row, converted);
    }
    let ty = codec::type_of(gvk.0, gvk.1, gvk.2)?;
    let table = schema::kubernetes();
    schema::normalize(table, ty, &mut converted).map_err(Status::internal)?;
    codec::set_type_meta(&mut converted, gvk.0, gvk.1, gvk.2);
    Ok(match request.subresource {
        "scale" => {
            converted.object_mut("metadata");
            SubresourceView::Scale.apply_update(row, before, converted)?
        }
        _ if is_subresource_object(request, row) => {
            api::defaults::set_defaults(table, ty, &mut converted);
            converted
        }
        _ => defaulted(row, converted)?,
    })
}
