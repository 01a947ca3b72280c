//! PATCH: the four patch types, including server-side apply.

pub mod strict;

use api::json::JsonExt as _;
use api::status::{StatusCause, StatusDetails};
use api::{ErrorList, Path, Resource, Status};
use http::{Response, StatusCode};
use patch::apply::{ApplyError, FieldManager};
use patch::{JsonPatchError, StrategicError};
use serde_json::{Map, Value};

use crate::access;
use crate::body::Body;
use crate::codec::{self, FieldValidation, Yaml, type_of};
use crate::create::defaulted;
use crate::registry::stored_as;
use crate::render::Renderer;
use crate::request::Target;
use crate::server::{Call, Server};
use crate::strategy::reset_fields;
use crate::subresource_view::SubresourceView;
use crate::update::{ObjectChange, check_name};
use crate::write::{AFTER_ADMISSION, WriteOptions, dedup_owner_references, with_warnings};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PatchType {
    Json,
    Merge,
    Strategic,
    Apply,
}

const CUSTOM_RESOURCE_PATCH_MEDIA_TYPES: &str =
    "application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml";
const PATCH_MEDIA_TYPES: &str = "application/json-patch+json, application/merge-patch+json, application/strategic-merge-patch+json, application/apply-patch+yaml, application/apply-patch+cbor";

pub async fn patch(
    server: &Server,
    call: &Call,
    target: &Target,
    view: SubresourceView,
    renderer: &Renderer,
) -> Result<Response<Body>, Status> {
    let custom = target.resource.custom.is_some();
    let kind = match call.header(http::header::CONTENT_TYPE).split(';').next().unwrap_or("").trim() {
        "application/json-patch+json" => PatchType::Json,
        "application/merge-patch+json" => PatchType::Merge,
        "application/strategic-merge-patch+json" if !custom => PatchType::Strategic,
        "application/apply-patch+yaml"
            if matches!(view, SubresourceView::Object | SubresourceView::Status) =>
        {
            PatchType::Apply
        }
        _ if custom => return Err(codec::unsupported_media(CUSTOM_RESOURCE_PATCH_MEDIA_TYPES)),
        _ => return Err(codec::unsupported_media(PATCH_MEDIA_TYPES)),
    };
    let options = WriteOptions::parse_with(call, "PatchOptions", check_options(call, kind))?;
    if kind == PatchType::Apply {
        return apply(server, call, target, view, &options, renderer).await;
    }
    let patch = read_patch(kind, &call.body)?;
    let row = target.resource;
    let validation_errors = match options.validation {
        FieldValidation::Ignore => Vec::new(),
        _ => strict::strict_errors(&call.body, kind == PatchType::Json),
    };
    let warnings = parking_lot::Mutex::new(Vec::new());
    let make = |before: &Value| {
        let mut value = view.project(row, before.clone())?;
        apply_patch(kind, view.kind(row), &mut value, &patch)?;
        *warnings.lock() =
            validate_patched(kind, (row, view), &mut value, &patch, &validation_errors, options.validation)?;
        check_name(&mut value, target)?;
        warnings.lock().extend(dedup_owner_references(&mut value, AFTER_ADMISSION));
        // The patched object carries the resourceVersion that it was made from. One that the patch
        // sets explicitly conflicts on a retry, as intended.
        Ok(ObjectChange::replace(view.apply_update(row, before, value)?))
    };
    let (result, more) = server.update_object(target, &options, &make).await?;
    let mut warnings = warnings.into_inner();
    warnings.extend(more);
    Ok(with_warnings(view.render(renderer, StatusCode::OK, result), &warnings))
}

fn check_options(call: &Call, kind: PatchType) -> ErrorList {
    let mut errors = ErrorList::default();
    let force = call.query.flag("force");
    if kind == PatchType::Apply && call.query.get("fieldManager").is_empty() {
        errors.required(&Path::new("fieldManager"), "is required for apply patch");
    }
    if kind != PatchType::Apply && force.is_some() {
        errors.forbidden(&Path::new("force"), "may not be specified for non-apply patch");
    }
    errors
}

fn apply_patch(
    kind: PatchType,
    gvk: (&str, &str, &str),
    value: &mut Value,
    patch: &Value,
) -> Result<(), Status> {
    match kind {
        PatchType::Json => patch::json_patch(value, patch).map_err(|error| match error {
            JsonPatchError::Invalid(_) => Status::bad_request(error.to_string()),
            JsonPatchError::TooManyOperations(_) => {
                Status::failure(413, "RequestEntityTooLarge", format!("Request entity too large: {error}"))
            }
            _ => patch_failed(),
        }),
        PatchType::Merge => {
            patch::merge_patch(value, patch);
            Ok(())
        }
        _ => {
            let ty = type_of(gvk.0, gvk.1, gvk.2)?;
            patch::strategic(schema::kubernetes(), ty, value, patch).map_err(|error| match error {
                StrategicError::BadRequest(text) => Status::bad_request(text),
                StrategicError::Unprocessable(_) => patch_failed(),
                StrategicError::Internal(text) => Status::failure(500, "", text),
            })
        }
    }
}

/// A patch that does not apply. Upstream does not include the reason.
fn patch_failed() -> Status {
    let mut status =
        Status::failure(422, "Invalid", "the server rejected our request due to an error in our request");
    status.details = Some(StatusDetails::default());
    status
}

fn read_patch(kind: PatchType, body: &[u8]) -> Result<Value, Status> {
    let prefix = if kind == PatchType::Strategic { "" } else { "error decoding patch: " };
    let bad = |reason: &str| Status::bad_request(format!("{prefix}{reason}"));
    let patch: Value = serde_json::from_slice(body)
        .map_err(|error| bad(&schema::syntax::syntax_error(body).unwrap_or_else(|| error.to_string())))?;
    let json_type = match &patch {
        Value::Null if kind == PatchType::Json => return Ok(Value::Array(Vec::new())),
        Value::Null => return Ok(Value::Object(Map::new())),
        Value::Object(_) if kind != PatchType::Json => return Ok(patch),
        Value::Array(_) if kind == PatchType::Json => return Ok(patch),
        Value::Object(_) => "object",
        Value::Array(_) => "array",
        Value::String(_) => "string",
        Value::Number(_) => "number",
        Value::Bool(_) => "bool",
    };
    let expected_type =
        if kind == PatchType::Json { "[]handlers.jsonPatchOp" } else { "map[string]interface {}" };
    Err(bad(&format!("json: cannot unmarshal {json_type} into Go value of type {expected_type}")))
}

/// Validates the patched object against the schema. Returns warnings about unknown and duplicate
/// fields.
fn validate_patched(
    kind: PatchType,
    (row, view): (&Resource, SubresourceView),
    value: &mut Value,
    patch: &Value,
    validation_errors: &[String],
    validation: FieldValidation,
) -> Result<Vec<String>, Status> {
    let gvk = view.kind(row);
    let before = value.clone();
    let invalid_patch = |reason: &str| {
        // Upstream shows the patch for strategic merge patches, and the patched object otherwise.
        let patch_text =
            if kind == PatchType::Strategic { patch::go::print(patch) } else { before.to_string() };
        let mut errors = ErrorList::default();
        errors.invalid(&Path::new("patch"), patch_text, reason);
        Status::invalid("", "", "", &errors)
    };
    let more = codec::normalize_row(row, view, value).map_err(|error| match kind {
        PatchType::Strategic => invalid_patch(&unstructured_error(&error.to_string())),
        _ => invalid_patch(&error.to_string()),
    })?;
    let validation_errors = [validation_errors, &more].concat();
    // For custom resources, a wrong kind is left for validation to report.
    if row.custom.is_none() || value.text("kind").is_empty() {
        codec::set_type_meta(value, gvk.0, gvk.1, gvk.2);
    }
    match validation {
        FieldValidation::Ignore => Ok(Vec::new()),
        FieldValidation::Strict if !validation_errors.is_empty() => {
            Err(invalid_patch(&format!("strict decoding error: {}", validation_errors.join(", "))))
        }
        _ => Ok(validation_errors),
    }
}

/// Upstream converts the result of a strategic merge patch to an object without JSON, so a value of
/// the wrong type has a different error text.
fn unstructured_error(error: &str) -> String {
    let parts = error.strip_prefix("json: cannot unmarshal ").and_then(|rest| {
        let (found, rest) = rest.split_once(" into Go ")?;
        Some((found, rest.rsplit_once(" of type ")?.1))
    });
    let Some((found, expected_type)) = parts else { return error.to_owned() };
    let found = match found.split(' ').next().unwrap_or("") {
        "number" => "int64",
        "array" => "slice",
        "object" => "map",
        other => other,
    };
    match expected_type {
        _ if expected_type.starts_with("[]") => format!("cannot restore slice from {found}"),
        _ if expected_type.starts_with("map[") => format!("cannot restore map from {found}"),
        _ if expected_type.contains('.') => format!("cannot restore struct from: {found}"),
        _ => format!("unrecognized type: {expected_type}"),
    }
}

async fn apply(
    server: &Server,
    call: &Call,
    target: &Target,
    view: SubresourceView,
    options: &WriteOptions,
    renderer: &Renderer,
) -> Result<Response<Body>, Status> {
    let row = target.resource;
    let stored = stored_as(row);
    let force = call.query.flag("force").unwrap_or(false);
    let (config, duplicates) = read_config(call, target)?;
    let mut warnings = Vec::new();
    let now = options.timestamp();
    let api_version = codec::api_version(stored.group, stored.version);
    let writer = FieldManager {
        manager: &options.manager,
        api_version: &api_version,
        subresource: &target.subresource,
        now: &now,
        ignore: reset_fields(stored, &target.subresource),
    };
    let merge = |live: Option<&Value>| {
        let applied = codec::with_type(stored, |table, ty| {
            patch::apply::apply(table, ty, live, &config, &writer, force)
        })?;
        let mut value = applied.map_err(apply_error_status)?;
        // The applied object contains only the fields that were sent; normalize it to the full
        // schema before defaulting.
        codec::normalize_row(stored, SubresourceView::Object, &mut value)
            .map_err(|error| Status::bad_request(error.to_string()))?;
        // Reported only after everything else is valid, as upstream.
        match &duplicates {
            Some(reason) if options.validation == FieldValidation::Strict => {
                let reason = format!("error strict decoding YAML: error converting YAML to JSON: {reason}");
                Err(Status::bad_request(reason))
            }
            _ => Ok::<Value, Status>(value),
        }
    };
    if server.current(target).await?.is_none() {
        if view != SubresourceView::Object {
            return Err(target.not_found());
        }
        let uid = config.at("metadata").text("uid");
        if !uid.is_empty() {
            let reason = format!(
                "uid mismatch: the provided object specified uid {uid}, and no existing object was found"
            );
            return Err(Status::conflict(row.group, row.plural, &target.name, &reason));
        }
        access::authorize_creation(&server.rbac, &call.user, target).await?;
        let mut value = merge(None)?;
        value.object_mut("metadata").remove("resourceVersion");
        let fields = value.path("metadata.managedFields").clone();
        let collection = Target { name: String::new(), resource: stored, ..target.clone() };
        let (result, more) =
            server.create_tracked(&collection, value, options, Some(call), Some(fields)).await?;
        warnings.extend(more);
        return Ok(with_warnings(view.render(renderer, StatusCode::CREATED, result), &warnings));
    }
    let make = |before: &Value| {
        let mut value = merge(Some(before))?;
        codec::set_type_meta(&mut value, stored.group, stored.version, stored.kind);
        Ok(ObjectChange {
            value: defaulted(stored, value)?,
            managed_fields_set: true,
            retry_on_conflict: true,
        })
    };
    let (result, more) = server.update_object(target, options, make).await?;
    warnings.extend(more);
    Ok(with_warnings(view.render(renderer, StatusCode::OK, result), &warnings))
}

/// Reads the applied configuration, converts it to the storage version, and returns the duplicate
/// fields as text. `apply` rejects fields that are not in the schema.
fn read_config(call: &Call, target: &Target) -> Result<(Value, Option<String>), Status> {
    let row = target.resource;
    let decode_error = |reason: String| Status::bad_request(format!("error decoding YAML: {reason}"));
    let Yaml { json, duplicates } = codec::read_yaml(&call.body)
        .map_err(|reason| decode_error(format!("error converting YAML to JSON: {reason}")))?;
    let mut value: Value = serde_json::from_slice(&json).map_err(|error| decode_error(error.to_string()))?;
    let (api_version, kind) = (value.text("apiVersion"), value.text("kind"));
    if kind != row.kind || api_version != codec::api_version(row.group, row.version) {
        let slash = if api_version.contains('/') { "" } else { "/" };
        return Err(Status::bad_request(format!("invalid object type: {slash}{api_version}, Kind={kind}")));
    }
    // The configuration may omit the name.
    let named = target.name.clone();
    value.object_mut("metadata").entry("name").or_insert_with(|| named.into());
    check_name(&mut value, target)?;
    let stored = stored_as(row);
    if !std::ptr::eq(stored, row) {
        value = codec::to_stored_version(row, value);
        codec::set_type_meta(&mut value, stored.group, stored.version, stored.kind);
    }
    Ok((value, duplicates))
}

fn apply_error_status(error: ApplyError) -> Status {
    match error {
        ApplyError::Conflict(conflicts) => {
            let mut status = Status::failure(409, "Conflict", conflicts.to_string());
            let causes = conflicts.causes().map(|cause| StatusCause {
                reason: "FieldManagerConflict".into(),
                message: cause.message,
                field: cause.field,
            });
            status.details.get_or_insert_default().causes = causes.collect();
            status
        }
        ApplyError::BadRequest(text) => Status::bad_request(text),
        ApplyError::Internal(text) => Status::failure(500, "", text),
    }
}
