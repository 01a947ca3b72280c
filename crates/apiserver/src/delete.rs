//! The DELETE handlers: immediate removal, graceful deletion and deletion that waits for
//! finalizers.
//!
//! Counterpart upstream: `BeforeDelete` and `Store.Delete` in `k8s.io/apiserver/pkg/registry`.

use std::sync::Arc;

use api::json::JsonExt as _;
use api::status::StatusDetails;
use api::{ErrorList, Path, Resource, Status};
use http::{Response, StatusCode};
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use crate::access::User;
use crate::admission::{Operation, Request};
use crate::body::Body;
use crate::codec;
use crate::negotiate::MediaType;
use crate::options::ListOptions;
use crate::read;
use crate::registry::stored_as;
use crate::render::{Renderer, encode_response};
use crate::request::Target;
use crate::server::{Call, Server};
use crate::strategy;
use crate::warning_recorder::WarningRecorder;
use crate::write::{OBJECT_MODIFIED_MESSAGE, check_dry_run};

/// How often a deletion is retried when a concurrent write changes the object first.
const MAX_DELETE_ATTEMPTS: usize = 200;

#[derive(Clone, Debug, Default)]
pub struct DeleteOptions {
    pub grace: Option<i64>,
    pub dry_run: bool,
    /// `Orphan`, `Background`, `Foreground` or empty.
    pub propagation: String,
    /// The client sent the deprecated `orphanDependents: false`. The response is then 202, not 200.
    pub orphan_dependents_false: bool,
    pub uid: String,
    pub resource_version: String,
    /// The requesting user; `None` for the server itself.
    pub user: Option<User>,
    /// The options as the client sent them, for admission plugins and webhooks.
    pub raw_options: Value,
    /// A deletecollection request. Admission requests then carry no object name.
    pub collection: bool,
    /// Collects the warnings that are sent with the response.
    pub recorder: Arc<WarningRecorder>,
}

/// The result of a deletion.
pub enum DeleteResult {
    /// The object is removed; this is its last state.
    Deleted(Value),
    /// The object has a deletionTimestamp and waits for its grace period or its finalizers.
    Terminating(Value),
}

pub async fn delete(
    server: &Server,
    call: &Call,
    target: &Target,
    renderer: &Renderer,
) -> Result<Response<Body>, Status> {
    let options = DeleteOptions::read(call)?;
    let row = target.resource;
    match server.delete_object(target, &options, call.now).await? {
        DeleteResult::Deleted(last) if !strategy::return_deleted_object(stored_as(row)) => {
            Ok(encode_response(StatusCode::OK, &renderer.format, success_status(row, &last)))
        }
        DeleteResult::Deleted(last) => Ok(renderer.value(StatusCode::OK, codec::from_stored(row, last))),
        DeleteResult::Terminating(last) => {
            let code = if options.orphan_dependents_false { StatusCode::ACCEPTED } else { StatusCode::OK };
            Ok(renderer.value(code, codec::from_stored(row, last)))
        }
    }
}

fn success_status(row: &Resource, last: &Value) -> Value {
    let details = StatusDetails {
        name: last.path("metadata.name").as_str().unwrap_or("").to_owned(),
        group: row.group.to_owned(),
        kind: row.plural.to_owned(),
        uid: last.path("metadata.uid").as_str().unwrap_or("").to_owned(),
        ..StatusDetails::default()
    };
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details})
}

pub async fn delete_collection(
    server: &Server,
    call: &Call,
    target: &Target,
    renderer: &Renderer,
) -> Result<Response<Body>, Status> {
    if target.resource.verbs == api::resource_table::Verbs::NoDeleteCollection {
        return Err(crate::server::method_not_allowed());
    }
    let options = DeleteOptions { collection: true, ..DeleteOptions::read(call)? };
    let list = ListOptions::parse(&call.query, target)?;
    let (objects, meta) = read::select_objects(server, target, &list).await?;
    for object in &objects {
        let one = Target {
            namespace: if target.resource.namespaced { object.namespace().to_owned() } else { String::new() },
            name: object.name().to_owned(),
            ..target.clone()
        };
        match server.delete_object(&one, &options, call.now).await {
            Ok(_) => {}
            // A concurrent request deleted the object first.
            Err(status) if status.code == 404 => {}
            Err(status) => return Err(status),
        }
    }
    Ok(renderer.list(objects, &meta).await)
}

impl DeleteOptions {
    /// Parses the options from the body or, as old clients send them, from the query.
    pub fn read(call: &Call) -> Result<DeleteOptions, Status> {
        let mut value = match call.body.is_empty() {
            true => json!({}),
            false => decode(call)?,
        };
        if call.body.is_empty() {
            if let Some(seconds) = call.query.int("gracePeriodSeconds")? {
                value["gracePeriodSeconds"] = json!(seconds);
            }
            if let Some(orphan) = call.query.flag("orphanDependents") {
                value["orphanDependents"] = json!(orphan);
            }
            let policy = call.query.get("propagationPolicy");
            if !policy.is_empty() {
                value["propagationPolicy"] = json!(policy);
            }
            let dry_run: Vec<&str> = call.query.all("dryRun").collect();
            if !dry_run.is_empty() {
                value["dryRun"] = json!(dry_run);
            }
        } else if call.query.has("dryRun") && value.items("dryRun").is_empty() {
            value["dryRun"] = json!(call.query.all("dryRun").collect::<Vec<_>>());
        }
        let options = DeleteOptions::from_value(&value)?;
        let (user, recorder) = (Some(call.user.clone()), call.recorder.clone());
        Ok(DeleteOptions { user, recorder, ..options })
    }

    pub fn from_value(value: &Value) -> Result<DeleteOptions, Status> {
        let mut errors = ErrorList::default();
        let propagation = value.text("propagationPolicy");
        let orphan = value.at("orphanDependents").as_bool();
        if !propagation.is_empty() && orphan.is_some() {
            errors.invalid(
                &Path::new("propagationPolicy"),
                propagation,
                "orphanDependents and deletionPropagation cannot be both set",
            );
        }
        if !matches!(propagation, "" | "Foreground" | "Background" | "Orphan") {
            errors.not_supported(
                &Path::new("propagationPolicy"),
                propagation,
                &["Foreground", "Background", "Orphan", "nil"],
            );
        }
        let dry_run: Vec<&str> = value.items("dryRun").iter().filter_map(Value::as_str).collect();
        check_dry_run(&dry_run, &mut errors);
        if !errors.is_empty() {
            return Err(Status::invalid("meta.k8s.io", "DeleteOptions", "", &errors));
        }
        Ok(DeleteOptions {
            grace: value.int("gracePeriodSeconds"),
            orphan_dependents_false: orphan == Some(false),
            dry_run: !dry_run.is_empty(),
            propagation: match orphan {
                Some(true) => "Orphan".to_owned(),
                Some(false) => "Background".to_owned(),
                None => propagation.to_owned(),
            },
            uid: value.path("preconditions.uid").as_str().unwrap_or("").to_owned(),
            resource_version: value.path("preconditions.resourceVersion").as_str().unwrap_or("").to_owned(),
            user: None,
            raw_options: value.clone(),
            collection: false,
            recorder: Arc::default(),
        })
    }
}

fn decode(call: &Call) -> Result<Value, Status> {
    let table = schema::kubernetes();
    let ty = table
        .type_by_name("io.k8s.apimachinery.pkg.apis.meta.v1.DeleteOptions")
        .ok_or_else(|| Status::internal("the schema has no type DeleteOptions"))?;
    let bad = |error: String| Status::bad_request(error);
    let decoded = match codec::body_media(&call.headers)? {
        MediaType::Json => {
            schema::from_json(table, ty, &call.body).map_err(|error| bad(error.to_string()))?.value
        }
        MediaType::Yaml => {
            let json = codec::read_yaml(&call.body).map_err(bad)?.json;
            schema::from_json(table, ty, &json).map_err(|error| bad(error.to_string()))?.value
        }
        MediaType::Protobuf => {
            let envelope =
                schema::protobuf::decode_envelope(&call.body).map_err(|error| bad(error.to_string()))?;
            schema::protobuf::from_protobuf(table, ty, envelope.raw)
                .map_err(|error| bad(error.to_string()))?
        }
    };
    Ok(decoded)
}

impl Server {
    pub async fn delete_object(
        &self,
        target: &Target,
        options: &DeleteOptions,
        now: Timestamp,
    ) -> Result<DeleteResult, Status> {
        let stored = stored_as(target.resource);
        let mut last_state = None;
        for _ in 0..MAX_DELETE_ATTEMPTS {
            let mut old = match (self.current(target).await?, last_state.take()) {
                (Some(old), _) => old,
                // The object was marked for removal in an earlier attempt, and a concurrent request
                // removed it.
                (None, Some(last)) => return Ok(DeleteResult::Deleted(last)),
                (None, None) => return Err(target.not_found()),
            };
            let before = self.value_of(target.resource, &old).await?;
            check_preconditions(stored, options, &before)?;
            let user = options.user.as_ref();
            let request = Request::new(target, Operation::Delete, &Value::Null, Some(&before), user);
            let request = request.with_delete_options(options);
            self.mutate(&request, &mut Value::Null).await?;
            self.dispatch_validating(&request, &Value::Null).await?;
            let (mark, remove_now) = match plan_delete(stored, &before, options, now) {
                // Already terminating, and the request does not shorten the grace period.
                DeletePlan::AlreadyTerminating => return Ok(DeleteResult::Terminating(before)),
                DeletePlan::Remove => (None, true),
                DeletePlan::MarkTerminating(after) => (Some(after), false),
                DeletePlan::MarkTerminatingAndRemove(after) => (Some(after), true),
            };
            if options.dry_run {
                let last = mark.unwrap_or(before);
                return Ok(if remove_now {
                    DeleteResult::Deleted(last)
                } else {
                    DeleteResult::Terminating(last)
                });
            }
            if let Some(after) = mark.filter(|after| *after != before) {
                match self.put(target.resource, after, Some(&old)).await? {
                    Some(object) => old = object,
                    None => continue,
                }
            }
            if !remove_now {
                return Ok(DeleteResult::Terminating(self.value_of(target.resource, &old).await?));
            }
            let mut last = self.value_of(target.resource, &old).await?;
            let claim = self.allocations.claim_release(self, stored, &last).await;
            if let Some(revision) = self.remove(&old).await? {
                Box::pin(claim.commit(self, &last)).await;
                last.object_mut("metadata").insert("resourceVersion".into(), revision.to_string().into());
                return Ok(DeleteResult::Deleted(last));
            }
            last_state = Some(last);
        }
        let row = target.resource;
        Err(Status::conflict(row.group, row.plural, &target.name, OBJECT_MODIFIED_MESSAGE))
    }
}

pub fn check_preconditions(stored: &Resource, options: &DeleteOptions, before: &Value) -> Result<(), Status> {
    let meta = before.at("metadata");
    let fields = [
        ("UID", &options.uid, meta.text("uid"), "deleted and then recreated"),
        ("ResourceVersion", &options.resource_version, meta.text("resourceVersion"), "modified"),
    ];
    for (field, expected, found, likely_cause) in fields {
        if expected.is_empty() || expected == found {
            continue;
        }
        let name = meta.text("name");
        if strategy::is(stored, "", "namespaces") {
            let message = format!(
                "Precondition failed: {field} in precondition: {expected}, {field} in object meta: {found}"
            );
            return Err(Status::conflict("", "namespaces", name, &message));
        }
        let message = format!(
            "the {field} in the precondition ({expected}) does not match the {field} in record ({found}). The object might have been {likely_cause}"
        );
        // Upstream names the kind here, not the resource.
        return Err(Status::conflict(stored.group, stored.kind, name, &message));
    }
    Ok(())
}

/// What a delete request does to an object.
#[derive(Debug, PartialEq)]
enum DeletePlan {
    /// Nothing: the object is terminating already.
    AlreadyTerminating,
    MarkTerminating(Value),
    /// Writes deletionTimestamp with a zero grace period before the removal, so that watchers of a
    /// pod see why it disappears.
    MarkTerminatingAndRemove(Value),
    Remove,
}

fn plan_delete(stored: &Resource, before: &Value, options: &DeleteOptions, now: Timestamp) -> DeletePlan {
    let mut after = before.clone();
    let already = before.at("metadata").has("deletionTimestamp");
    if strategy::is(stored, "", "namespaces") {
        if !already {
            set_propagation(after.object_mut("metadata"), &options.propagation);
            after.object_mut("metadata").insert("deletionTimestamp".into(), timestamp(now));
            after.object_mut("status").insert("phase".into(), "Terminating".into());
            return DeletePlan::MarkTerminating(after);
        }
        if !before.at("spec").items("finalizers").is_empty() {
            return DeletePlan::AlreadyTerminating;
        }
    }
    let grace = if strategy::is(stored, "", "pods") {
        match compute_grace_period(before, options.grace, now) {
            GracePeriod::Pending => return DeletePlan::AlreadyTerminating,
            GracePeriod::Expired => None,
            GracePeriod::Until(end, seconds) => Some((end, seconds)),
        }
    } else {
        None
    };
    if strategy::is(stored, "apiextensions.k8s.io", "customresourcedefinitions") && !already {
        api::apiextensions::custom_resource_definition::begin_deletion(&mut after, &timestamp(now));
    }
    let metadata = after.object_mut("metadata");
    let named = options.propagation.as_str();
    let has_policy = |metadata: &serde_json::Map<String, Value>| {
        let finalizers = metadata.get("finalizers").and_then(Value::as_array);
        finalizers.into_iter().flatten().any(|name| name == "orphan" || name == "foregroundDeletion")
    };
    match named {
        "" if has_policy(metadata) => {}
        "" => set_propagation(metadata, strategy::default_propagation(stored)),
        // The garbage collector does not track Events, so finalizers for dependents would never be
        // removed.
        _ if strategy::is(stored, "", "events") => set_propagation(metadata, "Background"),
        named => set_propagation(metadata, named),
    }
    let has_finalizers =
        metadata.get("finalizers").and_then(Value::as_array).is_some_and(|list| !list.is_empty());
    if grace.is_none() && !has_finalizers {
        return DeletePlan::Remove;
    }
    if !already && let Some(generation) = metadata.get("generation").and_then(Value::as_i64) {
        metadata.insert("generation".into(), (generation + 1).into());
    }
    let (end, seconds) = grace.unwrap_or_else(|| match deletion_time(before) {
        Some(time) if time <= now => (time, 0),
        _ => (now, 0),
    });
    metadata.insert("deletionTimestamp".into(), timestamp(end));
    metadata.insert("deletionGracePeriodSeconds".into(), seconds.into());
    if has_finalizers || seconds > 0 {
        DeletePlan::MarkTerminating(after)
    } else {
        DeletePlan::MarkTerminatingAndRemove(after)
    }
}

enum GracePeriod {
    /// The pod is terminating, and its grace period may not be extended.
    Pending,
    /// The grace period is over.
    Expired,
    Until(Timestamp, i64),
}

/// A pod's grace period is set once and can only be shortened afterwards.
fn compute_grace_period(pod: &Value, requested: Option<i64>, now: Timestamp) -> GracePeriod {
    let after = |start: Timestamp, seconds: i64| {
        start.checked_add(SignedDuration::from_secs(seconds)).unwrap_or(start)
    };
    let Some(end) = deletion_time(pod) else {
        let seconds = api::core::pod::grace_period(pod, requested);
        return GracePeriod::Until(after(now, seconds), seconds);
    };
    let left = match pod.at("metadata").int("deletionGracePeriodSeconds").unwrap_or(0) {
        ..0 => 1,
        left => left,
    };
    let requested = requested.map(|requested| if requested < 0 { 1 } else { requested });
    match requested {
        _ if left == 0 => GracePeriod::Expired,
        Some(requested) if requested < left => match after(after(end, -left), requested) {
            end if end >= now => GracePeriod::Until(end, requested),
            _ => GracePeriod::Until(now, requested.min(1)),
        },
        _ => GracePeriod::Pending,
    }
}

fn deletion_time(object: &Value) -> Option<Timestamp> {
    object.at("metadata").at("deletionTimestamp").as_str()?.parse().ok()
}

fn timestamp(time: Timestamp) -> Value {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string().into()
}

/// Records the propagation policy as a finalizer for the garbage collector.
fn set_propagation(metadata: &mut serde_json::Map<String, Value>, policy: &str) {
    if policy.is_empty() {
        return;
    }
    let mut finalizers: Vec<Value> =
        metadata.get("finalizers").and_then(Value::as_array).cloned().unwrap_or_default();
    finalizers.retain(|name| !matches!(name.as_str(), Some("orphan" | "foregroundDeletion")));
    match policy {
        "Orphan" => finalizers.push("orphan".into()),
        "Foreground" => finalizers.push("foregroundDeletion".into()),
        _ => {}
    }
    if finalizers.is_empty() {
        metadata.remove("finalizers");
    } else {
        metadata.insert("finalizers".into(), finalizers.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(plural: &str, before: Value, options: DeleteOptions, expected: &str) {
        let row = api::RESOURCES.iter().find(|row| row.plural == plural).unwrap();
        let now: Timestamp = "2026-01-01T00:00:10Z".parse().unwrap();
        let mark = |after: Value| {
            let meta = after.at("metadata");
            format!(
                "{} {} {}",
                meta.text("deletionTimestamp"),
                meta.at("deletionGracePeriodSeconds"),
                meta.at("finalizers")
            )
        };
        let found = match plan_delete(row, &before, &options, now) {
            DeletePlan::AlreadyTerminating => "wait".to_owned(),
            DeletePlan::Remove => "gone".to_owned(),
            DeletePlan::MarkTerminating(after) => mark(after),
            DeletePlan::MarkTerminatingAndRemove(after) => mark(after) + " gone",
        };
        assert_eq!(found, expected);
    }

    fn delete_options(grace: Option<i64>, propagation: &str) -> DeleteOptions {
        DeleteOptions { grace, propagation: propagation.into(), ..DeleteOptions::default() }
    }

    #[test]
    fn sets_finalizers_by_propagation_policy() {
        let plain = json!({"metadata": {"name": "a"}});
        let with_finalizer = json!({"metadata": {"name": "a", "finalizers": ["x/y"]}});
        let terminating = json!({"metadata": {"name": "a", "finalizers": ["x/y"],
            "deletionTimestamp": "2025-01-01T00:00:00Z", "deletionGracePeriodSeconds": 0}});
        check("configmaps", plain.clone(), delete_options(None, ""), "gone");
        check(
            "configmaps",
            with_finalizer.clone(),
            delete_options(None, ""),
            "2026-01-01T00:00:10Z 0 [\"x/y\"]",
        );
        check(
            "configmaps",
            terminating.clone(),
            delete_options(None, ""),
            "2025-01-01T00:00:00Z 0 [\"x/y\"]",
        );
        check(
            "configmaps",
            plain.clone(),
            delete_options(None, "Orphan"),
            "2026-01-01T00:00:10Z 0 [\"orphan\"]",
        );
        check(
            "configmaps",
            terminating,
            delete_options(None, "Foreground"),
            "2025-01-01T00:00:00Z 0 [\"x/y\",\"foregroundDeletion\"]",
        );
        let orphan_finalizer = json!({"metadata": {"name": "a", "finalizers": ["orphan"]}});
        check("configmaps", orphan_finalizer.clone(), delete_options(None, "Background"), "gone");
        check(
            "configmaps",
            orphan_finalizer,
            delete_options(None, ""),
            "2026-01-01T00:00:10Z 0 [\"orphan\"]",
        );
        check("jobs", plain.clone(), delete_options(None, ""), "2026-01-01T00:00:10Z 0 [\"orphan\"]");
        check("jobs", plain.clone(), delete_options(None, "Background"), "gone");
        check("events", plain, delete_options(None, "Orphan"), "gone");
    }

    #[test]
    fn repeated_delete_cannot_extend_grace_period() {
        let spec = json!({"nodeName": "n", "terminationGracePeriodSeconds": 30});
        let running = json!({"metadata": {"name": "a"}, "spec": spec, "status": {"phase": "Running"}});
        check("pods", running.clone(), delete_options(None, ""), "2026-01-01T00:00:40Z 30 null");
        check("pods", running.clone(), delete_options(Some(-5), ""), "2026-01-01T00:00:11Z 1 null");
        check("pods", running, delete_options(Some(0), ""), "2026-01-01T00:00:10Z 0 null gone");
        let waiting = json!({"metadata": {"name": "a"}, "spec": {"terminationGracePeriodSeconds": 30}});
        check("pods", waiting, delete_options(None, ""), "2026-01-01T00:00:10Z 0 null gone");
        let terminating = |grace: i64, end: &str| {
            json!({"metadata": {"name": "a", "deletionTimestamp": end, "deletionGracePeriodSeconds": grace},
                "spec": spec})
        };
        let terminating = terminating(60, "2026-01-01T00:01:00Z");
        check("pods", terminating.clone(), delete_options(None, ""), "wait");
        check("pods", terminating.clone(), delete_options(Some(60), ""), "wait");
        check("pods", terminating.clone(), delete_options(Some(20), ""), "2026-01-01T00:00:20Z 20 null");
        check("pods", terminating.clone(), delete_options(Some(5), ""), "2026-01-01T00:00:10Z 1 null");
        check("pods", terminating, delete_options(Some(0), ""), "2026-01-01T00:00:10Z 0 null gone");
    }

    #[test]
    fn namespace_is_terminating_until_finalizers_are_removed() {
        let active = json!({"metadata": {"name": "a"}, "spec": {"finalizers": ["kubernetes"]}});
        check("namespaces", active, delete_options(None, ""), "2026-01-01T00:00:10Z null null");
        let terminating = json!({"metadata": {"name": "a", "deletionTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"finalizers": ["kubernetes"]}});
        check("namespaces", terminating, delete_options(None, ""), "wait");
        let done = json!({"metadata": {"name": "a", "deletionTimestamp": "2026-01-01T00:00:00Z"}});
        check("namespaces", done, delete_options(None, ""), "gone");
    }
}
