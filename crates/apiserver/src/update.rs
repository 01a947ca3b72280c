//! PUT: an object in place of another, and the rules every change goes through.

use api::json::Json as _;
use api::{Errors, Path, Resource, Status};
use http::{Response, StatusCode};
use serde_json::{Value, json};

use crate::body::Body;
use crate::codec;
use crate::create::{has_status, invalid, place, track};
use crate::door::Door;
use crate::object::Object;
use crate::options::parse_version;
use crate::registry::stored_as;
use crate::render::Renderer;
use crate::request::Target;
use crate::server::{Call, Server};
use crate::services::Claim;
use crate::write::{MODIFIED, Outcome, WriteOptions, with_warnings};

/// Kinds that a PUT may also make (upstream's `AllowCreateOnUpdate`).
const CREATED_BY_PUT: &[(&str, &str)] = &[
    ("", "endpoints"),
    ("", "events"),
    ("events.k8s.io", "events"),
    ("", "limitranges"),
    ("", "services"),
    ("coordination.k8s.io", "leases"),
    ("node.k8s.io", "runtimeclasses"),
    ("rbac.authorization.k8s.io", "clusterrolebindings"),
    ("rbac.authorization.k8s.io", "clusterroles"),
    ("rbac.authorization.k8s.io", "rolebindings"),
    ("rbac.authorization.k8s.io", "roles"),
];

/// Kinds whose updates must name the version they replace (no `AllowUnconditionalUpdate` upstream).
const ALWAYS_CONDITIONAL: &[(&str, &str)] = &[
    ("admissionregistration.k8s.io", "mutatingadmissionpolicies"),
    ("admissionregistration.k8s.io", "mutatingadmissionpolicybindings"),
    ("admissionregistration.k8s.io", "mutatingwebhookconfigurations"),
    ("admissionregistration.k8s.io", "validatingadmissionpolicies"),
    ("admissionregistration.k8s.io", "validatingadmissionpolicybindings"),
    ("admissionregistration.k8s.io", "validatingwebhookconfigurations"),
    ("apiextensions.k8s.io", "customresourcedefinitions"),
    ("apiregistration.k8s.io", "apiservices"),
    ("coordination.k8s.io", "leases"),
    ("node.k8s.io", "runtimeclasses"),
    ("policy", "poddisruptionbudgets"),
    ("storage.k8s.io", "csidrivers"),
    ("storage.k8s.io", "csinodes"),
    ("storage.k8s.io", "csistoragecapacities"),
    ("storage.k8s.io", "volumeattachments"),
];

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
    let decoded = codec::decode(media, &call.body, door.kind(row), options.validation)?;
    let mut warnings = decoded.warnings;
    let mut value = decoded.value;
    check_name(&mut value, target)?;
    if door == Door::Main && server.current(target).await?.is_none() {
        let put_makes = CREATED_BY_PUT.contains(&(row.group, row.plural));
        if !put_makes || !value.path("metadata.uid").as_str().unwrap_or("").is_empty() {
            return Err(target.not_found());
        }
        let collection = Target { name: String::new(), ..target.clone() };
        value.object_mut("metadata").remove("resourceVersion");
        let (outcome, more) = server.create_object(&collection, value, &options, Some(call)).await?;
        warnings.extend(more);
        return Ok(with_warnings(door.rendered(renderer, StatusCode::CREATED, outcome), &warnings));
    }
    let make = |before: &Value| Ok(Change::replace(door.merge(row, before, value.clone())?));
    let (outcome, more) = server.change(target, &options, make).await?;
    warnings.extend(more);
    Ok(with_warnings(door.rendered(renderer, StatusCode::OK, outcome), &warnings))
}

/// The object must be the one the path names.
pub fn check_name(value: &mut Value, target: &Target) -> Result<(), Status> {
    place(value, target)?;
    let metadata = value.object_mut("metadata");
    match metadata.get("name").and_then(Value::as_str).unwrap_or("") {
        "" => drop(metadata.insert("name".into(), target.name.clone().into())),
        name if name == target.name => {}
        name => {
            return Err(Status::bad_request(format!(
                "the name of the object ({name}) does not match the name on the URL ({})",
                target.name
            )));
        }
    }
    Ok(())
}

/// A new state for an object, in its stored version and with defaults set.
pub struct Change {
    pub value: Value,
    /// managedFields are already worked out (server-side apply).
    pub tracked: bool,
}

impl Change {
    pub fn replace(value: Value) -> Change {
        Change { value, tracked: false }
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
        loop {
            let old = self.current(target).await?.ok_or_else(|| target.not_found())?;
            let before = old.value();
            let Change { mut value, tracked } = make(&before)?;
            let conditional = check_version(row, &value, &old)?;
            let client_fields = value.path("metadata.managedFields").clone();
            let claim = match target.subresource.as_str() {
                "" => self.allocations.claim(self, stored, &mut value, Some(&before)).await?,
                _ => Claim::default(),
            };
            self.prepare(stored, &mut value, &before, &target.subresource);
            let warnings = self.validate_change(target, &value, &before)?;
            if tracked {
                value.object_mut("metadata").insert("managedFields".into(), client_fields);
            } else {
                track(row, Some(&before), &mut value, &client_fields, options, &target.subresource)?;
            }
            if options.dry_run {
                return Ok((Outcome::Imagined(value), warnings));
            }
            if unchanged(&value, &before) {
                return Ok((Outcome::Stored(old), warnings));
            }
            if is_finished(&value) {
                if self.remove(&old).await?.is_some() {
                    drop(claim);
                    self.allocations.release(self, stored, &value).await;
                    return Ok((Outcome::Imagined(value), warnings));
                }
            } else if let Some(object) = self.put(row, value, Some(&old)).await? {
                Box::pin(claim.keep(self, &object.value())).await;
                return Ok((Outcome::Stored(object), warnings));
            }
            if conditional {
                return Err(Status::conflict(row.group, row.plural, &target.name, MODIFIED));
            }
        }
    }

    /// What a change may not touch is put back; what follows from it is filled in.
    fn prepare(&self, stored: &Resource, value: &mut Value, before: &Value, subresource: &str) {
        keep_metadata(value, before);
        match subresource {
            "status" => {
                let status = value.at("status").clone();
                let metadata = value.at("metadata").clone();
                *value = before.clone();
                value["status"] = status;
                merge_status_metadata(stored, value, metadata);
            }
            _ => {
                if has_status(stored) && subresource.is_empty() {
                    match before.get("status") {
                        Some(status) => value["status"] = status.clone(),
                        None => drop(value.as_object_mut().map(|fields| fields.remove("status"))),
                    }
                }
                stored.rules.prepare_update(value, before);
                if stored.generation && spec_differs(value, before) {
                    let generation = before.path("metadata.generation").as_i64().unwrap_or(0) + 1;
                    value.object_mut("metadata").insert("generation".into(), generation.into());
                }
            }
        }
    }

    fn validate_change(&self, target: &Target, value: &Value, before: &Value) -> Result<Vec<String>, Status> {
        let stored = stored_as(target.resource);
        let mut errors = Errors::default();
        let path = Path::new("metadata");
        let rule = stored.rules.name_rule();
        api::meta::validate_object_meta(value.at("metadata"), stored.namespaced, rule, &path, &mut errors);
        api::meta::validate_object_meta_update(
            value.at("metadata"),
            before.at("metadata"),
            &path,
            &mut errors,
        );
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
}

/// Compares the version the client wants to replace; true where it named one.
fn check_version(row: &Resource, value: &Value, old: &Object) -> Result<bool, Status> {
    let name = old.name();
    let uid = value.path("metadata.uid").as_str().unwrap_or("");
    let said = value.path("metadata.resourceVersion").as_str().unwrap_or("");
    match parse_version(said)? {
        Some(revision) if revision != 0 => {
            if revision != old.revision {
                return Err(Status::conflict(row.group, row.plural, name, MODIFIED));
            }
            Ok(true)
        }
        _ if uid.is_empty() && ALWAYS_CONDITIONAL.contains(&(row.group, row.plural)) => {
            let mut errors = Errors::default();
            errors.invalid(
                &Path::new("metadata.resourceVersion"),
                json!(0),
                "must be specified for an update",
            );
            Err(Status::invalid(row.group, row.kind, name, &errors))
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
    for name in ["uid", "generateName"] {
        if !metadata.contains_key(name)
            && let Some(kept) = old.get(name)
        {
            metadata.insert(name.into(), kept.clone());
        }
    }
    metadata.insert("resourceVersion".into(), old.at("resourceVersion").clone());
}

/// A status update may also change finalizers, labels, annotations and owners where upstream lets it.
fn merge_status_metadata(stored: &Resource, value: &mut Value, sent: Value) {
    let kept = value.object_mut("metadata");
    let open: &[&str] = match (stored.group, stored.plural) {
        // Kubelets and controllers set these through /status.
        ("", "nodes" | "pods") | ("apps" | "batch", _) => {
            &["annotations", "labels", "finalizers", "ownerReferences"]
        }
        _ => &["annotations", "labels", "finalizers", "ownerReferences"],
    };
    for name in open {
        match sent.get(*name) {
            Some(new) => drop(kept.insert((*name).into(), new.clone())),
            None => drop(kept.remove(*name)),
        }
    }
    match sent.get("managedFields") {
        Some(fields) => drop(kept.insert("managedFields".into(), fields.clone())),
        None => drop(kept.remove("managedFields")),
    }
}

/// Anything but metadata and status is different.
fn spec_differs(value: &Value, before: &Value) -> bool {
    fn rest(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
        let fields = value.as_object().into_iter().flatten();
        fields.filter(|(name, value)| !matches!(name.as_str(), "metadata" | "status") && !value.is_null())
    }
    rest(value).ne(rest(before))
}

/// Nothing changed, so nothing is written and nobody is told. A managedFields time alone is no change.
fn unchanged(value: &Value, before: &Value) -> bool {
    value == before
}

/// A deletion that waited for finalizers, none of which is left.
pub fn is_finished(value: &Value) -> bool {
    let metadata = value.at("metadata");
    metadata.has("deletionTimestamp")
        && metadata.items("finalizers").is_empty()
        && metadata.int("deletionGracePeriodSeconds").unwrap_or(0) == 0
        && value.path("spec.finalizers").as_array().is_none_or(Vec::is_empty)
}
