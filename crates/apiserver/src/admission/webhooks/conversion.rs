//! Objects as webhooks see them: in the version they want, and through a subresource's eyes.

use api::json::JsonExt as _;
use api::{Resource, Status};
use serde_json::Value;

use crate::admission::Request;
use crate::codec;
use crate::create::defaulted;
use crate::subresource_view::SubresourceView;

/// Group, version and kind of what is sent through a row's subresource.
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

/// Whether what is sent through the subresource is an object of its own.
fn is_subresource_object(request: &Request<'_>, row: &'static Resource) -> bool {
    kind_of(row, request.subresource).2 != row.kind
}

/// The object, as it is on its way into the store, for a webhook that wants `row`'s version.
pub fn to_versioned(request: &Request<'_>, row: &'static Resource, object: &Value) -> Value {
    if object.is_null() {
        return Value::Null;
    }
    match request.subresource {
        // An object without a number of replicas has no scale to show.
        "scale" => SubresourceView::Scale.project(row, object.clone()).unwrap_or_default(),
        _ if is_subresource_object(request, row) => object.clone(),
        _ => codec::from_stored(row, object.clone()),
    }
}

/// What a webhook has made of it, checked and back in the form it came in.
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
