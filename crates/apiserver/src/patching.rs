//! PATCH: the four kinds of patch, server-side apply among them.

use api::json::Json as _;
use api::status::Cause;
use api::{Errors, Path, Status};
use http::{Response, StatusCode};
use patch::apply::{ApplyError, Writer};
use patch::{JsonPatchError, StrategicError};
use serde_json::Value;

use crate::body::Body;
use crate::codec::{self, FieldValidation, type_of};
use crate::create::{defaulted, ignored};
use crate::door::Door;
use crate::registry::stored_as;
use crate::render::Renderer;
use crate::request::Target;
use crate::server::{Call, Server};
use crate::update::{Change, check_name};
use crate::write::{WriteOptions, with_warnings};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Json,
    Merge,
    Strategic,
    Apply,
}

const ACCEPTED: &str = "application/json-patch+json, application/merge-patch+json, application/strategic-merge-patch+json, application/apply-patch+yaml, application/apply-patch+cbor";

pub async fn patch(
    server: &Server,
    call: &Call,
    target: &Target,
    door: Door,
    renderer: &Renderer,
) -> Result<Response<Body>, Status> {
    let kind = match call.header(http::header::CONTENT_TYPE).split(';').next().unwrap_or("").trim() {
        "application/json-patch+json" => Kind::Json,
        "application/merge-patch+json" => Kind::Merge,
        "application/strategic-merge-patch+json" => Kind::Strategic,
        "application/apply-patch+yaml" if matches!(door, Door::Main | Door::Status) => Kind::Apply,
        _ => return Err(codec::unsupported_media(ACCEPTED)),
    };
    let options = WriteOptions::parse(call, "PatchOptions")?;
    check_options(call, kind)?;
    if kind == Kind::Apply {
        return apply(server, call, target, door, &options, renderer).await;
    }
    let patch: Value = serde_json::from_slice(&call.body)
        .map_err(|error| Status::bad_request(format!("error decoding patch: {error}")))?;
    let row = target.resource;
    let warnings = parking_lot::Mutex::new(Vec::new());
    let make = |before: &Value| {
        let mut value = door.view(row, before.clone());
        run(kind, door.kind(row), &mut value, &patch)?;
        let complaints = shape(door.kind(row), &mut value, &patch)?;
        *warnings.lock() = judge(options.validation, complaints, &patch)?;
        check_name(&mut value, target)?;
        // A patch that does not speak of the version does not insist on one.
        if patch.is_object() && patch.path("metadata.resourceVersion").is_null() {
            value.object_mut("metadata").remove("resourceVersion");
        }
        Ok(Change::replace(door.merge(row, before, value)?))
    };
    let (outcome, more) = server.change(target, &options, &make).await?;
    let mut warnings = warnings.into_inner();
    warnings.extend(more);
    Ok(with_warnings(door.rendered(renderer, StatusCode::OK, outcome), &warnings))
}

fn check_options(call: &Call, kind: Kind) -> Result<(), Status> {
    let mut errors = Errors::default();
    let force = call.query.flag("force");
    if kind == Kind::Apply && call.query.get("fieldManager").is_empty() {
        errors.required(&Path::new("fieldManager"), "is required for apply patch");
    }
    if kind != Kind::Apply && force.is_some() {
        errors.forbidden(&Path::new("force"), "may not be specified for non-apply patch");
    }
    if errors.is_empty() { Ok(()) } else { Err(Status::invalid("meta.k8s.io", "PatchOptions", "", &errors)) }
}

fn run(kind: Kind, gvk: (&str, &str, &str), value: &mut Value, patch: &Value) -> Result<(), Status> {
    match kind {
        Kind::Json => patch::json_patch(value, patch).map_err(|error| match error {
            JsonPatchError::Invalid(_) => Status::bad_request(error.to_string()),
            JsonPatchError::TooManyOperations(_) => {
                Status::failure(413, "RequestEntityTooLarge", format!("Request entity too large: {error}"))
            }
            other => unprocessable(&other.to_string()),
        }),
        Kind::Merge if !patch.is_object() => Err(Status::bad_request(
            "error decoding patch: json: cannot unmarshal into Go value of type map[string]interface {}",
        )),
        Kind::Merge => {
            patch::merge_patch(value, patch);
            Ok(())
        }
        _ => {
            let ty = type_of(gvk.0, gvk.1, gvk.2)?;
            patch::strategic(schema::kubernetes(), ty, value, patch).map_err(|error| match error {
                StrategicError::BadRequest(text) => Status::bad_request(text),
                StrategicError::Unprocessable(text) => unprocessable(&text),
                StrategicError::Internal(text) => Status::failure(500, "", text),
            })
        }
    }
}

/// A patch that does not apply.
fn unprocessable(why: &str) -> Status {
    let mut status =
        Status::failure(422, "Invalid", "the server rejected our request due to an error in our request");
    status.details.get_or_insert_default().causes.push(Cause {
        reason: "UnexpectedServerResponse".into(),
        message: why.to_owned(),
        field: String::new(),
    });
    // The cause is for people with -v=8; kubectl words this one by its reason.
    status.details = None;
    status
}

/// The patched object must still have the kind's shape.
fn shape(gvk: (&str, &str, &str), value: &mut Value, patch: &Value) -> Result<Vec<String>, Status> {
    let ty = type_of(gvk.0, gvk.1, gvk.2)?;
    let complaints = schema::normalize(schema::kubernetes(), ty, value).map_err(|error| {
        let mut errors = Errors::default();
        errors.invalid(&Path::new("patch"), patch.to_string(), &error.to_string());
        Status::invalid("", "", "", &errors)
    })?;
    codec::set_type_meta(value, gvk.0, gvk.1, gvk.2);
    Ok(complaints)
}

fn judge(validation: FieldValidation, complaints: Vec<String>, patch: &Value) -> Result<Vec<String>, Status> {
    match validation {
        FieldValidation::Ignore => Ok(Vec::new()),
        FieldValidation::Warn => Ok(complaints),
        FieldValidation::Strict if complaints.is_empty() => Ok(complaints),
        FieldValidation::Strict => {
            let mut errors = Errors::default();
            let why = format!("strict decoding error: {}", complaints.join(", "));
            errors.invalid(&Path::new("patch"), patch.to_string(), &why);
            Err(Status::invalid("", "", "", &errors))
        }
    }
}

async fn apply(
    server: &Server,
    call: &Call,
    target: &Target,
    door: Door,
    options: &WriteOptions,
    renderer: &Renderer,
) -> Result<Response<Body>, Status> {
    let row = target.resource;
    let stored = stored_as(row);
    let force = call.query.flag("force").unwrap_or(false);
    let mut config = read_config(call, target, options)?;
    let mut warnings = std::mem::take(&mut config.warnings);
    let now = options.timestamp();
    let api_version = codec::api_version(stored.group, stored.version);
    let writer = Writer {
        manager: &options.manager,
        api_version: &api_version,
        subresource: &target.subresource,
        now: &now,
        ignore: ignored(stored, &target.subresource),
    };
    let ty = codec::row_type(stored)?;
    let merge = |live: Option<&Value>| {
        patch::apply::apply(schema::kubernetes(), ty, live, &config.value, &writer, force)
            .map_err(apply_failed)
    };
    if server.current(target).await?.is_none() {
        if door != Door::Main {
            return Err(target.not_found());
        }
        if !config.value.path("metadata.uid").as_str().unwrap_or("").is_empty() {
            let uid = config.value.path("metadata.uid").as_str().unwrap_or("");
            let why = format!(
                "uid mismatch: the provided object specified uid {uid}, and no existing object was found"
            );
            return Err(Status::conflict(row.group, row.plural, &target.name, &why));
        }
        let mut value = merge(None)?;
        value.object_mut("metadata").remove("resourceVersion");
        let fields = value.path("metadata.managedFields").clone();
        let collection = Target { name: String::new(), resource: stored, ..target.clone() };
        let (outcome, more) =
            server.create_tracked(&collection, value, options, Some(call), Some(fields)).await?;
        warnings.extend(more);
        return Ok(with_warnings(door.rendered(renderer, StatusCode::CREATED, outcome), &warnings));
    }
    let make = |before: &Value| {
        let mut value = merge(Some(before))?;
        codec::set_type_meta(&mut value, stored.group, stored.version, stored.kind);
        if config.value.path("metadata.resourceVersion").is_null() {
            value.object_mut("metadata").remove("resourceVersion");
        }
        Ok(Change { value: defaulted(stored, value)?, tracked: true })
    };
    let (outcome, more) = server.change(target, options, make).await?;
    warnings.extend(more);
    Ok(with_warnings(door.rendered(renderer, StatusCode::OK, outcome), &warnings))
}

/// The applied configuration, in the stored version; its unknown fields are complaints as anywhere.
fn read_config(call: &Call, target: &Target, options: &WriteOptions) -> Result<codec::Decoded, Status> {
    let row = target.resource;
    let json = codec::yaml_to_json(&call.body)?;
    let mut value: Value = serde_json::from_slice(&json)
        .map_err(|error| Status::bad_request(format!("error decoding YAML: {error}")))?;
    if !value.is_object() {
        return Err(Status::bad_request("error decoding YAML: the configuration is not an object"));
    }
    let text = |name: &str| value.get(name).and_then(Value::as_str).unwrap_or("").to_owned();
    codec::check_type_meta(&(text("apiVersion"), text("kind")), row.group, row.version, row.kind)?;
    check_name(&mut value, target)?;
    // Only looked at for complaints: what is sent counts exactly as it was sent.
    let mut copy = value.clone();
    let complaints = match schema::normalize(schema::kubernetes(), codec::row_type(row)?, &mut copy) {
        Ok(complaints) => complaints,
        Err(_) => Vec::new(),
    };
    let warnings = options.validation.judge(row.kind, row.version, complaints)?;
    if !std::ptr::eq(stored_as(row), row) {
        value = codec::to_stored_version(row, value);
    }
    Ok(codec::Decoded { value, warnings })
}

fn apply_failed(error: ApplyError) -> Status {
    match error {
        ApplyError::Conflict(conflicts) => {
            let mut status = Status::failure(409, "Conflict", conflicts.to_string());
            let causes = conflicts.causes().map(|cause| Cause {
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
