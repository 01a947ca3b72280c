//! PUT, and the update path that all writes to existing objects share.

use api::json::JsonExt as _;
use api::{ErrorList, Path, Resource, Status};
use http::{Response, StatusCode};
use serde_json::{Value, json};

use crate::access;
use crate::admission::{Operation, Request};
use crate::body::Body;
use crate::codec;
use crate::create::{invalid, set_namespace, track_managed_fields};
use crate::object::Object;
use crate::registry::stored_as;
use crate::render::Renderer;
use crate::request::Target;
use crate::server::{Call, Server};
use crate::services::AllocationClaim;
use crate::strategy;
use crate::subresource_view::SubresourceView;
use crate::write::{
    OBJECT_MODIFIED_MESSAGE, WriteOptions, WriteResult, check_depth, dedup_owner_references, with_warnings,
};

/// How often a conflicting update is retried. Each attempt waits until the cache has the winning
/// write.
const MAX_UPDATE_ATTEMPTS: usize = 200;

pub async fn update(
    server: &Server,
    call: &Call,
    target: &Target,
    view: SubresourceView,
    renderer: &Renderer,
) -> Result<Response<Body>, Status> {
    let row = target.resource;
    let options = WriteOptions::parse(call, "UpdateOptions")?;
    let media = codec::body_media(&call.headers)?;
    let decoded = codec::decode_row(media, &call.body, row, view, options.validation)?;
    let mut warnings = decoded.warnings;
    let mut value = decoded.value;
    check_name(&mut value, target)?;
    warnings.extend(dedup_owner_references(&mut value, ""));
    if view == SubresourceView::Object && server.current(target).await?.is_none() {
        if !strategy::allow_create_on_update(stored_as(row)) || !value.at("metadata").text("uid").is_empty() {
            return Err(target.not_found());
        }
        access::authorize_creation(&server.rbac, &call.user, target).await?;
        let collection = Target { name: String::new(), ..target.clone() };
        value.object_mut("metadata").remove("resourceVersion");
        let (result, more) = server.create_object(&collection, value, &options, Some(call)).await?;
        warnings.extend(more);
        return Ok(with_warnings(view.render(renderer, StatusCode::CREATED, result), &warnings));
    }
    let make = |before: &Value| {
        check_uid(target, value.at("metadata").text("uid"), before)?;
        Ok(ObjectChange {
            value: view.apply_update(row, before, value.clone())?,
            managed_fields_set: false,
            retry_on_conflict: false,
        })
    };
    let (result, more) = server.update_object(target, &options, make).await?;
    warnings.extend(more);
    Ok(with_warnings(view.render(renderer, StatusCode::OK, result), &warnings))
}

/// Checks that the object's name and namespace match the path.
pub fn check_name(value: &mut Value, target: &Target) -> Result<(), Status> {
    set_namespace(value, target)?;
    let expected_name = &target.name;
    match value.at("metadata").text("name") {
        name if name == expected_name => Ok(()),
        "" => Err(Status::bad_request(format!(
            "the name of the object ({expected_name} based on URL) was undeterminable: name must be provided"
        ))),
        name => Err(Status::bad_request(format!(
            "the name of the object ({name}) does not match the name on the URL ({expected_name})"
        ))),
    }
}

/// A UID is a precondition: the object must not have been deleted and recreated.
pub fn check_uid(target: &Target, requested: &str, before: &Value) -> Result<(), Status> {
    let uid = before.at("metadata").text("uid");
    if requested.is_empty() || requested == uid {
        return Ok(());
    }
    let message = format!(
        "StorageError: invalid object, Code: 4, Key: {}, ResourceVersion: 0, AdditionalErrorMsg: Precondition failed: UID in precondition: {requested}, UID in object meta: {uid}",
        target.key()
    );
    Err(Status::conflict(target.resource.group, target.resource.plural, &target.name, &message))
}

/// The new state of an object, in its storage version and with defaults set.
pub struct ObjectChange {
    pub value: Value,
    /// managedFields are final and need no update.
    pub managed_fields_set: bool,
    /// The resourceVersion in `value` comes from the server, so a conflict is retried. Otherwise it
    /// is the client's precondition.
    pub retry_on_conflict: bool,
}

impl ObjectChange {
    /// A replacement that the server computed from the current object.
    pub fn replace(value: Value) -> ObjectChange {
        ObjectChange { value, managed_fields_set: false, retry_on_conflict: true }
    }
}

impl Server {
    /// Replaces an object with the result of `make`, after admission and validation. An update
    /// without the client's precondition is retried on conflict.
    pub async fn update_object(
        &self,
        target: &Target,
        options: &WriteOptions,
        make: impl Fn(&Value) -> Result<ObjectChange, Status>,
    ) -> Result<(WriteResult, Vec<String>), Status> {
        let row = target.resource;
        let stored = stored_as(row);
        for _ in 0..MAX_UPDATE_ATTEMPTS {
            let old = self.current(target).await?.ok_or_else(|| target.not_found())?;
            let before = self.value_of(row, &old).await?;
            let ObjectChange { mut value, managed_fields_set, retry_on_conflict } = make(&before)?;
            if let Some(user) = &options.user {
                crate::rbac::escalation::check(&self.rbac, user, target, &value, Some(&before)).await?;
            }
            let conditional = check_version(row, &value, &old)? && !retry_on_conflict;
            if !managed_fields_set {
                // Before admission and preparation: the client owns what it sent, not what the
                // server resets or fills in.
                track_managed_fields(row, Some(&before), &mut value, options, &target.subresource)?;
            }
            let user = options.user.as_ref();
            let request = Request::new(target, Operation::Update, &value, Some(&before), user)
                .with_write_options(options);
            self.mutate(&request, &mut value).await?;
            // Only writes to the object itself can change allocated fields.
            let mut claim = match target.subresource.as_str() {
                "" => self.allocations.claim(self, stored, &mut value, Some(&before)).await?,
                _ => AllocationClaim::default(),
            };
            prepare_for_update(stored, &mut value, &before, &target.subresource, &options.timestamp());
            check_depth(row, &value)?;
            let warnings = validate_change(target, &value, &before)?;
            self.validate(&request, &value).await?;
            self.admission.quotas.grant(self, &request, &value).await?;
            patch::apply::keep_times(&before, &mut value);
            if options.dry_run {
                return Ok((WriteResult::DryRun(value), warnings));
            }
            if is_deletion_complete(&value) {
                drop(claim);
                let claim = self.allocations.claim_release(self, stored, &before).await;
                if let Some(revision) = self.remove(&old).await? {
                    Box::pin(claim.commit(self, &before)).await;
                    let metadata = value.object_mut("metadata");
                    metadata.insert("resourceVersion".into(), revision.to_string().into());
                    return Ok((WriteResult::DryRun(value), warnings));
                }
            } else if value == before && !self.store.is_stale(&old.key) && self.is_stored_current(row, &old) {
                // A no-op update writes nothing, so watchers receive no event.
                return Ok((WriteResult::Stored(old), warnings));
            } else if !claim.reserve(self, &value).await? {
                // Another server allocated it at the same time: choose again.
                continue;
            } else if let Some(object) = self.put(row, value, Some(&old)).await? {
                claim.commit_for(self, &object).await;
                return Ok((WriteResult::Stored(self.convert_for_request(row, object).await?), warnings));
            }
            if conditional {
                break;
            }
        }
        Err(Status::conflict(row.group, row.plural, &target.name, OBJECT_MODIFIED_MESSAGE))
    }
}

/// Restores fields that the update may not change, and sets those that follow from it (upstream's
/// `PrepareForUpdate`).
fn prepare_for_update(stored: &Resource, value: &mut Value, before: &Value, subresource: &str, now: &str) {
    retain_server_metadata(value, before);
    if subresource == "status" {
        let status = value.at("status").clone();
        let sent = std::mem::replace(value, before.clone());
        value["status"] = status;
        let metadata = value.object_mut("metadata");
        for name in strategy::status_mutable_metadata(stored).iter().copied().chain(["managedFields", "uid"])
        {
            match sent.at("metadata").get(name) {
                Some(new) => drop(metadata.insert(name.into(), new.clone())),
                None => drop(metadata.remove(name)),
            }
        }
        stored.strategy.prepare_for_status_update(value, before);
        return crate::special::prepare_status(stored, value, before, now);
    }
    if strategy::has_status(stored) && matches!(subresource, "" | "finalize") {
        match before.get("status") {
            Some(status) => value["status"] = status.clone(),
            None => drop(value.as_object_mut().map(|fields| fields.remove("status"))),
        }
    }
    match subresource {
        // A binding does not change the generation, as upstream.
        "binding" => return,
        "finalize" => {}
        "approval" => crate::special::prepare_approval(value, before, now),
        _ => stored.strategy.prepare_for_update(value, before),
    }
    crate::special::set_server_times(stored, value, now);
    let status_counts = stored.custom.is_some() && !strategy::has_status(stored);
    let differs = spec_differs(value, before) || status_counts && value.at("status") != before.at("status");
    if stored.generation && differs {
        let generation = before.path("metadata.generation").as_i64().unwrap_or(0) + 1;
        value.object_mut("metadata").insert("generation".into(), generation.into());
    }
}

fn validate_change(target: &Target, value: &Value, before: &Value) -> Result<Vec<String>, Status> {
    let stored = stored_as(target.resource);
    let mut errors = ErrorList::default();
    let path = Path::new("metadata");
    let rule = stored.strategy.name_format();
    api::meta::validate_object_meta(value.at("metadata"), stored.namespaced, rule, &path, &mut errors);
    api::meta::validate_object_meta_update(value.at("metadata"), before.at("metadata"), &path, &mut errors);
    if crate::strategy::requires_valid_finalizer_names(stored) {
        api::meta::validate_builtin_finalizers(value.at("metadata"), &path, &mut errors);
    }
    match target.subresource.as_str() {
        "status" => stored.strategy.validate_status_update(value, before, &mut errors),
        "" | "scale" => {
            stored.strategy.validate(value, &mut errors);
            stored.strategy.validate_update(value, before, &mut errors);
        }
        other => crate::special::validate_subresource(stored, other, value, before, &mut errors),
    }
    invalid(stored, &target.name, &errors)?;
    Ok(stored.strategy.warnings(value, Some(before)))
}

/// Compares the resourceVersion of the update with the current one; true if the update has one.
fn check_version(row: &'static Resource, value: &Value, old: &Object) -> Result<bool, Status> {
    let name = old.name();
    let requested = value.path("metadata.resourceVersion").as_str().unwrap_or("");
    let parse_error = |error: std::num::ParseIntError| {
        let message = match error.kind() {
            std::num::IntErrorKind::PosOverflow => "value out of range",
            _ => "invalid syntax",
        };
        Status::failure(500, "", format!("strconv.ParseUint: parsing {requested:?}: {message}"))
    };
    let requested: u64 = if requested.is_empty() { 0 } else { requested.parse().map_err(parse_error)? };
    match requested {
        1.. => {
            if requested != old.revision {
                return Err(Status::conflict(row.group, row.plural, name, OBJECT_MODIFIED_MESSAGE));
            }
            Ok(true)
        }
        _ if strategy::requires_resource_version(stored_as(row)) => {
            let mut errors = ErrorList::default();
            errors.invalid(
                &Path::new("metadata.resourceVersion"),
                json!(0),
                "must be specified for an update",
            );
            // Upstream puts the resource here, not the kind.
            Err(Status::invalid(row.group, row.plural, name, &errors))
        }
        _ => Ok(false),
    }
}

/// Copies metadata that only the server sets from the stored object.
fn retain_server_metadata(value: &mut Value, before: &Value) {
    let old = before.at("metadata");
    let metadata = value.object_mut("metadata");
    for name in
        ["creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation", "selfLink"]
    {
        match old.get(name) {
            Some(stored_value) => drop(metadata.insert(name.into(), stored_value.clone())),
            None => drop(metadata.remove(name)),
        }
    }
    if metadata.get("uid").and_then(Value::as_str).unwrap_or("").is_empty() {
        metadata.insert("uid".into(), old.at("uid").clone());
    }
    metadata.insert("resourceVersion".into(), old.at("resourceVersion").clone());
}

/// Whether anything but metadata and status differs.
fn spec_differs(value: &Value, before: &Value) -> bool {
    fn rest(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
        let fields = value.as_object().into_iter().flatten();
        fields.filter(|(name, value)| !matches!(name.as_str(), "metadata" | "status") && !value.is_null())
    }
    rest(value).ne(rest(before))
}

/// Whether a terminating object has no finalizers left and its grace period is zero.
pub fn is_deletion_complete(value: &Value) -> bool {
    let metadata = value.at("metadata");
    metadata.has("deletionTimestamp")
        && metadata.items("finalizers").is_empty()
        && metadata.int("deletionGracePeriodSeconds").unwrap_or(0) == 0
        && value.path("spec.finalizers").as_array().is_none_or(Vec::is_empty)
}
