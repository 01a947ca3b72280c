//! POST: creates an object.

use api::json::JsonExt as _;
use api::{ErrorList, Path, Resource, Status};
use http::{Response, StatusCode};
use serde_json::{Value, json};

use crate::admission::{Operation, Request};
use crate::body::Body;
use crate::codec::{self, row_type, to_stored_version};
use crate::options::parse_version;
use crate::registry::stored_as;
use crate::render::Renderer;
use crate::request::Target;
use crate::server::{Call, Server};
use crate::strategy::{has_status, reset_fields};
use crate::subresource_view::SubresourceView;
use crate::write::{WriteOptions, WriteResult, check_depth, dedup_owner_references, with_warnings};

/// Attempts to generate a name, as upstream.
const MAX_NAME_GENERATION_ATTEMPTS: usize = 7;
const RESOURCE_VERSION_ERROR: &str = "resourceVersion should not be set on objects to be created";

pub async fn create(
    server: &Server,
    call: &Call,
    target: &Target,
    renderer: &Renderer,
) -> Result<Response<Body>, Status> {
    let row = target.resource;
    let options = WriteOptions::parse(call, "CreateOptions")?;
    let media = codec::body_media(&call.headers)?;
    let decoded = codec::decode_row(media, &call.body, row, SubresourceView::Object, options.validation)?;
    let mut warnings = decoded.warnings;
    let mut value = decoded.value;
    warnings.extend(dedup_owner_references(&mut value, ""));
    let (outcome, more) = server.create_object(target, value, &options, Some(call)).await?;
    warnings.extend(more);
    Ok(with_warnings(SubresourceView::Object.render(renderer, StatusCode::CREATED, outcome), &warnings))
}

impl Server {
    /// Creates an object given in the version of the target's row: defaulting, admission,
    /// validation, allocation and storage.
    pub async fn create_object(
        &self,
        target: &Target,
        value: Value,
        options: &WriteOptions,
        call: Option<&Call>,
    ) -> Result<(WriteResult, Vec<String>), Status> {
        self.create_tracked(target, value, options, call, None).await
    }

    /// The same with precomputed managedFields, for server-side apply.
    pub async fn create_tracked(
        &self,
        target: &Target,
        mut value: Value,
        options: &WriteOptions,
        call: Option<&Call>,
        tracked: Option<Value>,
    ) -> Result<(WriteResult, Vec<String>), Status> {
        let row = target.resource;
        crate::custom::check_creation(target, value.at("metadata").text("name"))?;
        set_namespace(&mut value, target)?;
        value = defaulted(row, value)?;
        let stored = stored_as(row);
        if let Some(user) = &options.user {
            crate::rbac::escalation::check(&self.rbac, user, target, &value, None).await?;
        }
        // As upstream, a resourceVersion is only rejected after everything else is validated.
        let versioned =
            parse_version(value.at("metadata").text("resourceVersion")).is_ok_and(|v| v > Some(0));
        // The creator owns the fields of the request and its defaults, but not the fields that the
        // server sets below.
        let mut record = None;
        if let Some(fields) = tracked {
            value.object_mut("metadata").insert("managedFields".into(), fields);
        } else if options.dry_run || versioned || row.custom.is_some() || self.has_admission_hooks() {
            track_managed_fields(row, None, &mut value, options, "")?;
        } else {
            record = track_new_managed_fields(row, &mut value, options)?;
        }
        let user = options.user.as_ref();
        let request = Request::new(target, Operation::Create, &value, None, user).with_write_options(options);
        self.mutate(&request, &mut value).await?;
        // A webhook may have changed the namespace.
        set_namespace(&mut value, target)?;
        fill_system_fields(&mut value, stored, options);
        let prefixed = !value.at("metadata").text("generateName").is_empty();
        let generated = prefixed && value.at("metadata").text("name").is_empty();
        let mut attempts = 0;
        loop {
            // Only generated names and allocated addresses can conflict and need another attempt.
            let may_retry = generated || stored.plural == "services";
            let mut attempt = if may_retry { value.clone() } else { std::mem::take(&mut value) };
            if generated {
                generate_name(&mut attempt, || self.random());
            }
            let mut claim = self.allocations.claim(self, stored, &mut attempt, None).await?;
            stored.strategy.prepare_for_create(&mut attempt);
            crate::special::before_create(stored, &mut attempt, call);
            crate::special::set_server_times(stored, &mut attempt, &options.timestamp());
            complete_status(stored, &mut attempt)?;
            check_depth(row, &attempt)?;
            validate_new(stored, &attempt)?;
            let mut request =
                Request::new(target, Operation::Create, &attempt, None, user).with_write_options(options);
            request.dry_run = options.dry_run || versioned;
            let warnings = stored.strategy.warnings(&attempt, None);
            self.validate(&request, &attempt).await?;
            self.admission.quotas.grant(self, &request, &attempt).await?;
            let name = attempt.path("metadata.name").as_str().unwrap_or("").to_owned();
            if options.dry_run || versioned {
                let named_target = Target { name: name.clone(), ..target.clone() };
                return match self.current(&named_target).await? {
                    _ if versioned => Err(Status::failure(500, "", RESOURCE_VERSION_ERROR)),
                    Some(_) => Err(already_exists(row, &name, prefixed)),
                    None => Ok((WriteResult::DryRun(attempt), warnings)),
                };
            }
            if !claim.reserve(self, &attempt).await? {
                if attempts >= MAX_NAME_GENERATION_ATTEMPTS {
                    return Err(Status::internal(
                        "allocation conflicted with other servers on every attempt",
                    ));
                }
                attempts += 1;
                continue;
            }
            match self.put_with(row, attempt, record.as_deref(), None).await? {
                Some(object) => {
                    claim.commit_for(self, &object).await;
                    return Ok((WriteResult::Stored(self.convert_for_request(row, object).await?), warnings));
                }
                None if generated && attempts < MAX_NAME_GENERATION_ATTEMPTS => attempts += 1,
                None => return Err(already_exists(row, &name, prefixed)),
            }
        }
    }
}

fn already_exists(row: &Resource, name: &str, generated: bool) -> Status {
    let mut status = Status::already_exists(row.group, row.plural, name);
    if generated {
        status.message =
            format!("{}, the server was not able to generate a unique name for the object", status.message);
        status.details.get_or_insert_default().retry_after_seconds = 1;
    }
    status
}

/// Checks that the namespaces of path and object agree, and sets that of the path.
pub fn set_namespace(value: &mut Value, target: &Target) -> Result<(), Status> {
    let metadata = value.object_mut("metadata");
    let object_namespace = metadata.get("namespace").and_then(Value::as_str).unwrap_or("");
    // Cluster-scoped objects ignore a namespace in the body.
    if !object_namespace.is_empty() && !target.namespace.is_empty() && object_namespace != target.namespace {
        return Err(Status::bad_request(
            "the namespace of the provided object does not match the namespace sent on the request",
        ));
    }
    if target.namespace.is_empty() {
        metadata.remove("namespace");
    } else {
        metadata.insert("namespace".into(), target.namespace.clone().into());
    }
    Ok(())
}

/// Applies the defaults of the request version, converts to the storage version, and applies its
/// defaults.
pub fn defaulted(row: &'static Resource, mut value: Value) -> Result<Value, Status> {
    if let Some(crd) = row.custom {
        crd.version_schema().set_defaults(&mut value);
        return Ok(value);
    }
    let table = schema::kubernetes();
    api::defaults::set_defaults(table, row_type(row)?, &mut value);
    let stored = stored_as(row);
    if !std::ptr::eq(stored, row) {
        value = to_stored_version(row, value);
        codec::set_type_meta(&mut value, stored.group, stored.version, stored.kind);
        api::defaults::set_defaults(table, row_type(stored)?, &mut value);
    }
    Ok(value)
}

/// Resets of the status by the strategy leave it empty; its non-optional fields are filled with
/// zero values.
fn complete_status(stored: &'static Resource, value: &mut Value) -> Result<(), Status> {
    if stored.custom.is_some() {
        return Ok(());
    }
    let table = schema::kubernetes();
    let field = table.get(row_type(stored)?).field("status").map(|field| &field.shape);
    if let (Some(schema::Shape::Struct(ty)), Some(status)) = (field, value.get_mut("status")) {
        schema::normalize(table, *ty, status).map_err(|error| Status::internal(error.to_string()))?;
    }
    Ok(())
}

/// Sets the metadata that only the server decides.
fn fill_system_fields(value: &mut Value, stored: &Resource, options: &WriteOptions) {
    let metadata = value.object_mut("metadata");
    for name in ["deletionTimestamp", "deletionGracePeriodSeconds", "selfLink", "resourceVersion"] {
        metadata.remove(name);
    }
    metadata.insert("uid".into(), uuid::Uuid::new_v4().to_string().into());
    metadata.insert("creationTimestamp".into(), options.timestamp().into());
    if stored.generation {
        metadata.insert("generation".into(), 1.into());
    } else {
        metadata.remove("generation");
    }
    if has_status(stored) && !stored.strategy.keeps_status_on_create() {
        value["status"] = json!({});
    }
}

fn validate_new(stored: &Resource, value: &Value) -> Result<(), Status> {
    let mut errors = ErrorList::default();
    let rule = stored.strategy.name_format();
    api::meta::validate_object_meta(
        value.at("metadata"),
        stored.namespaced,
        rule,
        &Path::new("metadata"),
        &mut errors,
    );
    if crate::strategy::requires_valid_finalizer_names(stored) {
        api::meta::validate_builtin_finalizers(value.at("metadata"), &Path::new("metadata"), &mut errors);
    }
    stored.strategy.validate(value, &mut errors);
    stored.strategy.validate_create(value, &mut errors);
    invalid(stored, value.path("metadata.name").as_str().unwrap_or(""), &errors)
}

pub fn invalid(row: &Resource, name: &str, errors: &ErrorList) -> Result<(), Status> {
    if errors.is_empty() { Ok(()) } else { Err(Status::invalid(row.group, row.kind, name, errors)) }
}

/// A generated name: as upstream, a suffix without vowels.
fn generate_name(value: &mut Value, random: impl Fn() -> f64) {
    const LETTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    let metadata = value.object_mut("metadata");
    let mut name: String =
        metadata.get("generateName").and_then(Value::as_str).unwrap_or("").chars().take(58).collect();
    for _ in 0..5 {
        name.push(LETTERS[(random() * LETTERS.len() as f64) as usize % LETTERS.len()] as char);
    }
    metadata.insert("name".into(), name.into());
}

/// Updates managedFields for a change.
pub fn track_managed_fields(
    row: &'static Resource,
    old: Option<&Value>,
    new: &mut Value,
    options: &WriteOptions,
    subresource: &str,
) -> Result<(), Status> {
    with_field_writer(row, options, subresource, |table, ty, writer| {
        patch::apply::track(table, ty, old, new, writer);
    })
}

/// The same for a new object. If possible the record is returned separately, already encoded:
/// building the tree of fields would cost more than the rest of the creation.
fn track_new_managed_fields(
    row: &'static Resource,
    new: &mut Value,
    options: &WriteOptions,
) -> Result<Option<Vec<u8>>, Status> {
    with_field_writer(row, options, "", |table, ty, writer| {
        let sent = new.object_mut("metadata").contains_key("managedFields");
        let record = if sent { None } else { patch::apply::track_new(table, ty, new, writer) };
        if record.is_none() {
            patch::apply::track(table, ty, None, new, writer);
        }
        record.filter(|record| record != b"[]")
    })
}

fn with_field_writer<T>(
    row: &'static Resource,
    options: &WriteOptions,
    subresource: &str,
    work: impl FnOnce(&schema::Table, schema::TypeId, &patch::apply::FieldManager) -> T,
) -> Result<T, Status> {
    let stored = stored_as(row);
    let api_version = codec::api_version(stored.group, stored.version);
    let now = options.timestamp();
    let writer = patch::apply::FieldManager {
        manager: &options.manager,
        api_version: &api_version,
        subresource,
        now: &now,
        ignore: reset_fields(stored, subresource),
    };
    codec::with_type(stored, |table, ty| work(table, ty, &writer))
}
