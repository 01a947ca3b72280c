//! PATCH: the four kinds of patch, server-side apply among them.

pub mod strict;

use api::json::Json as _;
use api::status::{Cause, Details};
use api::{Errors, Path, Resource, Status};
use http::{Response, StatusCode};
use patch::apply::{ApplyError, Writer};
use patch::{JsonPatchError, StrategicError};
use serde_json::{Map, Value};

use crate::access;
use crate::body::Body;
use crate::codec::{self, FieldValidation, Yaml, type_of};
use crate::create::defaulted;
use crate::door::Door;
use crate::registry::stored_as;
use crate::render::Renderer;
use crate::request::Target;
use crate::server::{Call, Server};
use crate::strategy::ignored;
use crate::update::{Change, check_name};
use crate::write::{AFTER_ADMISSION, WriteOptions, dedup_owners, with_warnings};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Json,
    Merge,
    Strategic,
    Apply,
}

const ACCEPTED_OF_CUSTOM: &str =
    "application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml";
const ACCEPTED: &str = "application/json-patch+json, application/merge-patch+json, application/strategic-merge-patch+json, application/apply-patch+yaml, application/apply-patch+cbor";

pub async fn patch(
    server: &Server,
    call: &Call,
    target: &Target,
    door: Door,
    renderer: &Renderer,
) -> Result<Response<Body>, Status> {
    let custom = target.resource.custom.is_some();
    let kind = match call.header(http::header::CONTENT_TYPE).split(';').next().unwrap_or("").trim() {
        "application/json-patch+json" => Kind::Json,
        "application/merge-patch+json" => Kind::Merge,
        "application/strategic-merge-patch+json" if !custom => Kind::Strategic,
        "application/apply-patch+yaml" if matches!(door, Door::Main | Door::Status) => Kind::Apply,
        _ if custom => return Err(codec::unsupported_media(ACCEPTED_OF_CUSTOM)),
        _ => return Err(codec::unsupported_media(ACCEPTED)),
    };
    let options = WriteOptions::parse_with(call, "PatchOptions", check_options(call, kind))?;
    if kind == Kind::Apply {
        return apply(server, call, target, door, &options, renderer).await;
    }
    let patch = read_patch(kind, &call.body)?;
    let row = target.resource;
    let complaints = match options.validation {
        FieldValidation::Ignore => Vec::new(),
        _ => strict::complaints(&call.body, kind == Kind::Json),
    };
    let warnings = parking_lot::Mutex::new(Vec::new());
    let make = |before: &Value| {
        let mut value = door.view(row, before.clone())?;
        run(kind, door.kind(row), &mut value, &patch)?;
        *warnings.lock() = shape(kind, (row, door), &mut value, &patch, &complaints, options.validation)?;
        check_name(&mut value, target)?;
        warnings.lock().extend(dedup_owners(&mut value, AFTER_ADMISSION));
        // The patched object carries the version it was made of; one that the patch itself sets is wrong
        // the next time, as it should be.
        Ok(Change::replace(door.merge(row, before, value)?))
    };
    let (outcome, more) = server.change(target, &options, &make).await?;
    let mut warnings = warnings.into_inner();
    warnings.extend(more);
    Ok(with_warnings(door.rendered(renderer, StatusCode::OK, outcome), &warnings))
}

fn check_options(call: &Call, kind: Kind) -> Errors {
    let mut errors = Errors::default();
    let force = call.query.flag("force");
    if kind == Kind::Apply && call.query.get("fieldManager").is_empty() {
        errors.required(&Path::new("fieldManager"), "is required for apply patch");
    }
    if kind != Kind::Apply && force.is_some() {
        errors.forbidden(&Path::new("force"), "may not be specified for non-apply patch");
    }
    errors
}

fn run(kind: Kind, gvk: (&str, &str, &str), value: &mut Value, patch: &Value) -> Result<(), Status> {
    match kind {
        Kind::Json => patch::json_patch(value, patch).map_err(|error| match error {
            JsonPatchError::Invalid(_) => Status::bad_request(error.to_string()),
            JsonPatchError::TooManyOperations(_) => {
                Status::failure(413, "RequestEntityTooLarge", format!("Request entity too large: {error}"))
            }
            _ => unprocessable(),
        }),
        Kind::Merge => {
            patch::merge_patch(value, patch);
            Ok(())
        }
        _ => {
            let ty = type_of(gvk.0, gvk.1, gvk.2)?;
            patch::strategic(schema::kubernetes(), ty, value, patch).map_err(|error| match error {
                StrategicError::BadRequest(text) => Status::bad_request(text),
                StrategicError::Unprocessable(_) => unprocessable(),
                StrategicError::Internal(text) => Status::failure(500, "", text),
            })
        }
    }
}

/// A patch that does not apply. Upstream does not tell why.
fn unprocessable() -> Status {
    let mut status =
        Status::failure(422, "Invalid", "the server rejected our request due to an error in our request");
    status.details = Some(Details::default());
    status
}

fn read_patch(kind: Kind, body: &[u8]) -> Result<Value, Status> {
    let prefix = if kind == Kind::Strategic { "" } else { "error decoding patch: " };
    let bad = |why: &str| Status::bad_request(format!("{prefix}{why}"));
    let patch: Value = serde_json::from_slice(body)
        .map_err(|error| bad(&schema::syntax::error(body).unwrap_or_else(|| error.to_string())))?;
    let shape = match &patch {
        Value::Null if kind == Kind::Json => return Ok(Value::Array(Vec::new())),
        Value::Null => return Ok(Value::Object(Map::new())),
        Value::Object(_) if kind != Kind::Json => return Ok(patch),
        Value::Array(_) if kind == Kind::Json => return Ok(patch),
        Value::Object(_) => "object",
        Value::Array(_) => "array",
        Value::String(_) => "string",
        Value::Number(_) => "number",
        Value::Bool(_) => "bool",
    };
    let wanted = if kind == Kind::Json { "[]handlers.jsonPatchOp" } else { "map[string]interface {}" };
    Err(bad(&format!("json: cannot unmarshal {shape} into Go value of type {wanted}")))
}

/// The patched object must still have the kind's shape. Answers with warnings about the rest of it.
fn shape(
    kind: Kind,
    (row, door): (&Resource, Door),
    value: &mut Value,
    patch: &Value,
    complaints: &[String],
    validation: FieldValidation,
) -> Result<Vec<String>, Status> {
    let gvk = door.kind(row);
    let before = value.clone();
    let refused = |why: &str| {
        // What is shown of a patch that leads nowhere: the patch, or what came of it.
        let shown = if kind == Kind::Strategic { patch::go::print(patch) } else { before.to_string() };
        let mut errors = Errors::default();
        errors.invalid(&Path::new("patch"), shown, why);
        Status::invalid("", "", "", &errors)
    };
    let more = codec::normalize_row(row, door, value).map_err(|error| match kind {
        Kind::Strategic => refused(&unstructured(&error.to_string())),
        _ => refused(&error.to_string()),
    })?;
    let complaints = [complaints, &more].concat();
    // A custom kind's rules say what is wrong with another kind.
    if row.custom.is_none() || value.text("kind").is_empty() {
        codec::set_type_meta(value, gvk.0, gvk.1, gvk.2);
    }
    match validation {
        FieldValidation::Ignore => Ok(Vec::new()),
        FieldValidation::Strict if !complaints.is_empty() => {
            Err(refused(&format!("strict decoding error: {}", complaints.join(", "))))
        }
        _ => Ok(complaints),
    }
}

/// Upstream turns a strategic patch's result into an object without the detour over JSON, and so has other
/// words for a value that does not fit its field.
fn unstructured(error: &str) -> String {
    let parts = error.strip_prefix("json: cannot unmarshal ").and_then(|rest| {
        let (found, rest) = rest.split_once(" into Go ")?;
        Some((found, rest.rsplit_once(" of type ")?.1))
    });
    let Some((found, wanted)) = parts else { return error.to_owned() };
    let found = match found.split(' ').next().unwrap_or("") {
        "number" => "int64",
        "array" => "slice",
        "object" => "map",
        other => other,
    };
    match wanted {
        _ if wanted.starts_with("[]") => format!("cannot restore slice from {found}"),
        _ if wanted.starts_with("map[") => format!("cannot restore map from {found}"),
        _ if wanted.contains('.') => format!("cannot restore struct from: {found}"),
        _ => format!("unrecognized type: {wanted}"),
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
    let (config, duplicates) = read_config(call, target)?;
    let mut warnings = Vec::new();
    let now = options.timestamp();
    let api_version = codec::api_version(stored.group, stored.version);
    let writer = Writer {
        manager: &options.manager,
        api_version: &api_version,
        subresource: &target.subresource,
        now: &now,
        ignore: ignored(stored, &target.subresource),
    };
    let merge = |live: Option<&Value>| {
        let applied = codec::with_type(stored, |table, ty| {
            patch::apply::apply(table, ty, live, &config, &writer, force)
        })?;
        let mut value = applied.map_err(apply_failed)?;
        // What was applied has only the fields that were sent; defaults go by the whole shape.
        codec::normalize_row(stored, Door::Main, &mut value)
            .map_err(|error| Status::bad_request(error.to_string()))?;
        // Only said once everything else is found good, as upstream does.
        match &duplicates {
            Some(why) if options.validation == FieldValidation::Strict => {
                let why = format!("error strict decoding YAML: error converting YAML to JSON: {why}");
                Err(Status::bad_request(why))
            }
            _ => Ok::<Value, Status>(value),
        }
    };
    if server.current(target).await?.is_none() {
        if door != Door::Main {
            return Err(target.not_found());
        }
        let uid = config.at("metadata").text("uid");
        if !uid.is_empty() {
            let why = format!(
                "uid mismatch: the provided object specified uid {uid}, and no existing object was found"
            );
            return Err(Status::conflict(row.group, row.plural, &target.name, &why));
        }
        access::authorize_creation(&server.rbac, &call.user, target).await?;
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
        Ok(Change { value: defaulted(stored, value)?, tracked: true, again: true })
    };
    let (outcome, more) = server.change(target, options, make).await?;
    warnings.extend(more);
    Ok(with_warnings(door.rendered(renderer, StatusCode::OK, outcome), &warnings))
}

/// The applied configuration, in the stored version, and what strict decoding has against it. Fields that no
/// schema knows are for `apply` to refuse.
fn read_config(call: &Call, target: &Target) -> Result<(Value, Option<String>), Status> {
    let row = target.resource;
    let undecodable = |why: String| Status::bad_request(format!("error decoding YAML: {why}"));
    let Yaml { json, duplicates } = codec::read_yaml(&call.body)
        .map_err(|why| undecodable(format!("error converting YAML to JSON: {why}")))?;
    let mut value: Value = serde_json::from_slice(&json).map_err(|error| undecodable(error.to_string()))?;
    let (said, kind) = (value.text("apiVersion"), value.text("kind"));
    if kind != row.kind || said != codec::api_version(row.group, row.version) {
        let slash = if said.contains('/') { "" } else { "/" };
        return Err(Status::bad_request(format!("invalid object type: {slash}{said}, Kind={kind}")));
    }
    // What is applied to an object need not repeat its name.
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
