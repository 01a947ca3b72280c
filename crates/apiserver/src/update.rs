//! PUT: an object in place of another, and the rules every change goes through.

use api::json::Json as _;
use api::{Errors, Path, Resource, Status};
use http::{Response, StatusCode};
use serde_json::{Value, json};

use crate::access;
use crate::admission::{Operation, Request};
use crate::body::Body;
use crate::codec;
use crate::create::{invalid, place, track};
use crate::door::Door;
use crate::object::Object;
use crate::registry::stored_as;
use crate::render::Renderer;
use crate::request::Target;
use crate::server::{Call, Server};
use crate::services::Claim;
use crate::strategy;
use crate::write::{MODIFIED, Outcome, WriteOptions, check_depth, dedup_owners, with_warnings};

/// How often a change is made again when others come first. Each try waits for the change that won.
const TRIES: usize = 200;

pub async fn update(
    server: &Server,
    call: &Call,
    target: &Target,
    door: Door,
    renderer: &Renderer,
) -> Result<Response<Body>, Status> {
    let row = target.resource;
    let options = WriteOptions::parse(call, "UpdateOptions")?;
    let media = codec::body_media(&call.headers)?;
    let decoded = codec::decode_row(media, &call.body, row, door, options.validation)?;
    let mut warnings = decoded.warnings;
    let mut value = decoded.value;
    check_name(&mut value, target)?;
    warnings.extend(dedup_owners(&mut value, ""));
    if door == Door::Main && server.current(target).await?.is_none() {
        if !strategy::created_by_put(stored_as(row)) || !value.at("metadata").text("uid").is_empty() {
            return Err(target.not_found());
        }
        access::authorize_creation(&server.rbac, &call.user, target).await?;
        let collection = Target { name: String::new(), ..target.clone() };
        value.object_mut("metadata").remove("resourceVersion");
        let (outcome, more) = server.create_object(&collection, value, &options, Some(call)).await?;
        warnings.extend(more);
        return Ok(with_warnings(door.rendered(renderer, StatusCode::CREATED, outcome), &warnings));
    }
    let make = |before: &Value| {
        check_uid(target, value.at("metadata").text("uid"), before)?;
        Ok(Change { value: door.merge(row, before, value.clone())?, tracked: false, again: false })
    };
    let (outcome, more) = server.change(target, &options, make).await?;
    warnings.extend(more);
    Ok(with_warnings(door.rendered(renderer, StatusCode::OK, outcome), &warnings))
}

/// The object must be the one the path names.
pub fn check_name(value: &mut Value, target: &Target) -> Result<(), Status> {
    place(value, target)?;
    let wanted = &target.name;
    match value.at("metadata").text("name") {
        name if name == wanted => Ok(()),
        "" => Err(Status::bad_request(format!(
            "the name of the object ({wanted} based on URL) was undeterminable: name must be provided"
        ))),
        name => Err(Status::bad_request(format!(
            "the name of the object ({name}) does not match the name on the URL ({wanted})"
        ))),
    }
}

/// A uid is a precondition: the object must be the very one the client has seen.
pub fn check_uid(target: &Target, said: &str, before: &Value) -> Result<(), Status> {
    let uid = before.at("metadata").text("uid");
    if said.is_empty() || said == uid {
        return Ok(());
    }
    let why = format!(
        "StorageError: invalid object, Code: 4, Key: {}, ResourceVersion: 0, AdditionalErrorMsg: Precondition failed: UID in precondition: {said}, UID in object meta: {uid}",
        target.key()
    );
    Err(Status::conflict(target.resource.group, target.resource.plural, &target.name, &why))
}

/// A new state for an object, in its stored version and with defaults set.
pub struct Change {
    pub value: Value,
    /// managedFields are already as they shall be.
    pub tracked: bool,
    /// The version in `value` is the server's own, not one the client insists on.
    pub again: bool,
}

impl Change {
    /// What the server makes of the object it has found.
    pub fn replace(value: Value) -> Change {
        Change { value, tracked: false, again: true }
    }
}

impl Server {
    /// Replaces an object by what `make` makes of it, checked by the kind's rules. A change that did not
    /// insist on a version is made again when something else came first.
    pub async fn change(
        &self,
        target: &Target,
        options: &WriteOptions,
        make: impl Fn(&Value) -> Result<Change, Status>,
    ) -> Result<(Outcome, Vec<String>), Status> {
        let row = target.resource;
        let stored = stored_as(row);
        for _ in 0..TRIES {
            let old = self.current(target).await?.ok_or_else(|| target.not_found())?;
            let before = self.value_of(row, &old).await?;
            let Change { mut value, tracked, again } = make(&before)?;
            if let Some(user) = &options.user {
                crate::rbac::escalation::check(&self.rbac, user, target, &value, Some(&before)).await?;
            }
            let conditional = check_version(row, &value, &old)? && !again;
            if !tracked {
                // Owned is what was sent, not what the rules below put back or fill in.
                track(row, Some(&before), &mut value, options, &target.subresource)?;
            }
            let user = options.user.as_ref();
            let request =
                Request::new(target, Operation::Update, &value, Some(&before), user).writing(options);
            self.admit(&request, &mut value).await?;
            let mut claim = match target.subresource.as_str() {
                "" => self.allocations.claim(self, stored, &mut value, Some(&before)).await?,
                _ => Claim::default(),
            };
            prepare(stored, &mut value, &before, &target.subresource, &options.timestamp());
            check_depth(row, &value)?;
            let warnings = validate_change(target, &value, &before)?;
            self.judge(&request, &value).await?;
            self.admission.quotas.grant(self, &request, &value).await?;
            patch::apply::keep_times(&before, &mut value);
            if options.dry_run {
                return Ok((Outcome::Imagined(value), warnings));
            }
            if is_finished(&value) {
                drop(claim);
                let claim = self.allocations.giving_back(self, stored, &before).await;
                if let Some(revision) = self.remove(&old).await? {
                    Box::pin(claim.keep(self, &before)).await;
                    let metadata = value.object_mut("metadata");
                    metadata.insert("resourceVersion".into(), revision.to_string().into());
                    return Ok((Outcome::Imagined(value), warnings));
                }
            } else if value == before && !self.store.is_stale(&old.key) && self.is_stored_right(row, &old) {
                // Nothing changed, so nothing is written and nobody is told.
                return Ok((Outcome::Stored(old), warnings));
            } else if !claim.lock(self, &value).await? {
                // Another server gave it away at the same moment; something else is chosen.
                continue;
            } else if let Some(object) = self.put(row, value, Some(&old)).await? {
                claim.keep_for(self, &object).await;
                return Ok((Outcome::Stored(self.shown(row, object).await?), warnings));
            }
            if conditional {
                break;
            }
        }
        Err(Status::conflict(row.group, row.plural, &target.name, MODIFIED))
    }
}

/// What a change may not touch is put back; what follows from it is filled in.
fn prepare(stored: &Resource, value: &mut Value, before: &Value, subresource: &str, now: &str) {
    keep_metadata(value, before);
    if subresource == "status" {
        let status = value.at("status").clone();
        let sent = std::mem::replace(value, before.clone());
        value["status"] = status;
        let metadata = value.object_mut("metadata");
        for name in strategy::open_to_status(stored).iter().copied().chain(["managedFields", "uid"]) {
            match sent.at("metadata").get(name) {
                Some(new) => drop(metadata.insert(name.into(), new.clone())),
                None => drop(metadata.remove(name)),
            }
        }
        stored.rules.prepare_status(value, before);
        return crate::special::prepare_status(stored, value, before, now);
    }
    if strategy::has_status(stored) && matches!(subresource, "" | "finalize") {
        match before.get("status") {
            Some(status) => value["status"] = status.clone(),
            None => drop(value.as_object_mut().map(|fields| fields.remove("status"))),
        }
    }
    match subresource {
        // A binding is no change of the client's, and so none of the generation.
        "binding" => return,
        "finalize" => {}
        "approval" => crate::special::prepare_approval(value, before, now),
        _ => stored.rules.prepare_update(value, before),
    }
    crate::special::stamp(stored, value, now);
    let status_counts = stored.custom.is_some() && !strategy::has_status(stored);
    let differs = spec_differs(value, before) || status_counts && value.at("status") != before.at("status");
    if stored.generation && differs {
        let generation = before.path("metadata.generation").as_i64().unwrap_or(0) + 1;
        value.object_mut("metadata").insert("generation".into(), generation.into());
    }
}

fn validate_change(target: &Target, value: &Value, before: &Value) -> Result<Vec<String>, Status> {
    let stored = stored_as(target.resource);
    let mut errors = Errors::default();
    let path = Path::new("metadata");
    let rule = stored.rules.name_rule();
    api::meta::validate_object_meta(value.at("metadata"), stored.namespaced, rule, &path, &mut errors);
    api::meta::validate_object_meta_update(value.at("metadata"), before.at("metadata"), &path, &mut errors);
    if crate::strategy::own_finalizers(stored) {
        api::meta::own_finalizers(value.at("metadata"), &path, &mut errors);
    }
    match target.subresource.as_str() {
        "status" => stored.rules.validate_status(value, before, &mut errors),
        "" | "scale" => {
            stored.rules.validate(value, &mut errors);
            stored.rules.validate_update(value, before, &mut errors);
        }
        other => crate::special::validate_subresource(stored, other, value, before, &mut errors),
    }
    invalid(stored, &target.name, &errors)?;
    Ok(stored.rules.warnings(value, Some(before)))
}

/// Compares the version the client wants to replace; true where it named one.
fn check_version(row: &'static Resource, value: &Value, old: &Object) -> Result<bool, Status> {
    let name = old.name();
    let said = value.path("metadata.resourceVersion").as_str().unwrap_or("");
    let unreadable = |error: std::num::ParseIntError| {
        let why = match error.kind() {
            std::num::IntErrorKind::PosOverflow => "value out of range",
            _ => "invalid syntax",
        };
        Status::failure(500, "", format!("strconv.ParseUint: parsing {said:?}: {why}"))
    };
    let said: u64 = if said.is_empty() { 0 } else { said.parse().map_err(unreadable)? };
    match said {
        1.. => {
            if said != old.revision {
                return Err(Status::conflict(row.group, row.plural, name, MODIFIED));
            }
            Ok(true)
        }
        _ if strategy::always_conditional(stored_as(row)) => {
            let mut errors = Errors::default();
            errors.invalid(
                &Path::new("metadata.resourceVersion"),
                json!(0),
                "must be specified for an update",
            );
            // Upstream names the resource here, not the kind.
            Err(Status::invalid(row.group, row.plural, name, &errors))
        }
        _ => Ok(false),
    }
}

/// Metadata that only the server sets is carried over from the stored object.
fn keep_metadata(value: &mut Value, before: &Value) {
    let old = before.at("metadata");
    let metadata = value.object_mut("metadata");
    for name in
        ["creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation", "selfLink"]
    {
        match old.get(name) {
            Some(kept) => drop(metadata.insert(name.into(), kept.clone())),
            None => drop(metadata.remove(name)),
        }
    }
    if metadata.get("uid").and_then(Value::as_str).unwrap_or("").is_empty() {
        metadata.insert("uid".into(), old.at("uid").clone());
    }
    metadata.insert("resourceVersion".into(), old.at("resourceVersion").clone());
}

/// Anything but metadata and status is different.
fn spec_differs(value: &Value, before: &Value) -> bool {
    fn rest(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
        let fields = value.as_object().into_iter().flatten();
        fields.filter(|(name, value)| !matches!(name.as_str(), "metadata" | "status") && !value.is_null())
    }
    rest(value).ne(rest(before))
}

/// A deletion that waited for finalizers, none of which is left.
pub fn is_finished(value: &Value) -> bool {
    let metadata = value.at("metadata");
    metadata.has("deletionTimestamp")
        && metadata.items("finalizers").is_empty()
        && metadata.int("deletionGracePeriodSeconds").unwrap_or(0) == 0
        && value.path("spec.finalizers").as_array().is_none_or(Vec::is_empty)
}
