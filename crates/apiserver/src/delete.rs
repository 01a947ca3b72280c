//! DELETE: now, after a grace period, or when the finalizers are done.

use std::sync::Arc;

use api::json::Json as _;
use api::status::Details;
use api::{Errors, Path, Resource, Status};
use http::{Response, StatusCode};
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use crate::access::User;
use crate::admission::{Operation, Request};
use crate::body::Body;
use crate::codec;
use crate::negotiate::Media;
use crate::options::ListOptions;
use crate::read;
use crate::registry::stored_as;
use crate::remarks::Remarks;
use crate::render::{Renderer, encoded};
use crate::request::Target;
use crate::server::{Call, Server};
use crate::strategy;
use crate::write::{MODIFIED, check_dry_run};

/// How often a deletion is tried again when something else changes the object first.
const TRIES: usize = 200;

#[derive(Clone, Debug, Default)]
pub struct DeleteOptions {
    pub grace: Option<i64>,
    pub dry_run: bool,
    /// `Orphan`, `Background`, `Foreground` or empty.
    pub propagation: String,
    /// The old word for `Background` was said, which is answered differently.
    pub old_background: bool,
    pub uid: String,
    pub resource_version: String,
    /// Who asks; `None` for the server itself.
    pub user: Option<User>,
    /// As they were given, for those who are asked about the deletion.
    pub given: Value,
    /// Everything of a collection is deleted, so that no object is named.
    pub collection: bool,
    /// What is told about it beyond the answer.
    pub remarks: Arc<Remarks>,
}

/// What became of the object.
pub enum Deleted {
    /// It is gone; this was its last state.
    Gone(Value),
    /// It waits for its grace period or its finalizers.
    Going(Value),
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
        Deleted::Gone(last) if !strategy::answered_with_object(stored_as(row)) => {
            Ok(encoded(StatusCode::OK, &renderer.format, success(row, &last)))
        }
        Deleted::Gone(last) => Ok(renderer.value(StatusCode::OK, codec::from_stored(row, last))),
        Deleted::Going(last) => {
            let code = if options.old_background { StatusCode::ACCEPTED } else { StatusCode::OK };
            Ok(renderer.value(code, codec::from_stored(row, last)))
        }
    }
}

fn success(row: &Resource, last: &Value) -> Value {
    let details = Details {
        name: last.path("metadata.name").as_str().unwrap_or("").to_owned(),
        group: row.group.to_owned(),
        kind: row.plural.to_owned(),
        uid: last.path("metadata.uid").as_str().unwrap_or("").to_owned(),
        ..Details::default()
    };
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details})
}

pub async fn delete_collection(
    server: &Server,
    call: &Call,
    target: &Target,
    renderer: &Renderer,
) -> Result<Response<Body>, Status> {
    if target.resource.verbs == api::table::Verbs::NoDeleteCollection {
        return Err(crate::server::method_not_allowed());
    }
    let options = DeleteOptions { collection: true, ..DeleteOptions::read(call)? };
    let list = ListOptions::parse(&call.query, target)?;
    let (objects, meta) = read::select(server, target, &list).await?;
    for object in &objects {
        let one = Target {
            namespace: if target.resource.namespaced { object.namespace().to_owned() } else { String::new() },
            name: object.name().to_owned(),
            ..target.clone()
        };
        match server.delete_object(&one, &options, call.now).await {
            Ok(_) => {}
            // Somebody else was faster.
            Err(status) if status.code == 404 => {}
            Err(status) => return Err(status),
        }
    }
    Ok(renderer.list(objects, &meta).await)
}

impl DeleteOptions {
    /// From the body or, as old clients send them, the query.
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
        let (user, remarks) = (Some(call.user.clone()), call.remarks.clone());
        Ok(DeleteOptions { user, remarks, ..options })
    }

    pub fn from_value(value: &Value) -> Result<DeleteOptions, Status> {
        let mut errors = Errors::default();
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
            old_background: orphan == Some(false),
            dry_run: !dry_run.is_empty(),
            propagation: match orphan {
                Some(true) => "Orphan".to_owned(),
                Some(false) => "Background".to_owned(),
                None => propagation.to_owned(),
            },
            uid: value.path("preconditions.uid").as_str().unwrap_or("").to_owned(),
            resource_version: value.path("preconditions.resourceVersion").as_str().unwrap_or("").to_owned(),
            user: None,
            given: value.clone(),
            collection: false,
            remarks: Arc::default(),
        })
    }
}

fn decode(call: &Call) -> Result<Value, Status> {
    let table = schema::kubernetes();
    let ty = table
        .named("io.k8s.apimachinery.pkg.apis.meta.v1.DeleteOptions")
        .ok_or_else(|| Status::internal("no type is known for DeleteOptions"))?;
    let bad = |error: String| Status::bad_request(error);
    let decoded = match codec::body_media(&call.headers)? {
        Media::Json => {
            schema::from_json(table, ty, &call.body).map_err(|error| bad(error.to_string()))?.value
        }
        Media::Yaml => {
            let json = codec::read_yaml(&call.body).map_err(bad)?.json;
            schema::from_json(table, ty, &json).map_err(|error| bad(error.to_string()))?.value
        }
        Media::Protobuf => {
            let envelope = schema::protobuf::open(&call.body).map_err(|error| bad(error.to_string()))?;
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
    ) -> Result<Deleted, Status> {
        let stored = stored_as(target.resource);
        let mut marked = None;
        for _ in 0..TRIES {
            let mut old = match (self.current(target).await?, marked.take()) {
                (Some(old), _) => old,
                // Somebody who saw that it is to go was faster.
                (None, Some(last)) => return Ok(Deleted::Gone(last)),
                (None, None) => return Err(target.not_found()),
            };
            let before = self.value_of(target.resource, &old).await?;
            check_preconditions(stored, options, &before)?;
            let user = options.user.as_ref();
            let request = Request::new(target, Operation::Delete, &Value::Null, Some(&before), user);
            let request = request.deleting(options);
            self.admit(&request, &mut Value::Null).await?;
            self.ask_validating(&request, &Value::Null).await?;
            let (mark, gone) = match plan(stored, &before, options, now) {
                // Already on its way, and no faster way was asked for.
                Plan::Wait => return Ok(Deleted::Going(before)),
                Plan::Remove => (None, true),
                Plan::Mark(after) => (Some(after), false),
                Plan::MarkAndRemove(after) => (Some(after), true),
            };
            if options.dry_run {
                let last = mark.unwrap_or(before);
                return Ok(if gone { Deleted::Gone(last) } else { Deleted::Going(last) });
            }
            if let Some(after) = mark.filter(|after| *after != before) {
                match self.put(target.resource, after, Some(&old)).await? {
                    Some(object) => old = object,
                    None => continue,
                }
            }
            if !gone {
                return Ok(Deleted::Going(self.value_of(target.resource, &old).await?));
            }
            let mut last = self.value_of(target.resource, &old).await?;
            let claim = self.allocations.giving_back(self, stored, &last).await;
            if let Some(revision) = self.remove(&old).await? {
                Box::pin(claim.keep(self, &last)).await;
                last.object_mut("metadata").insert("resourceVersion".into(), revision.to_string().into());
                return Ok(Deleted::Gone(last));
            }
            marked = Some(last);
        }
        let row = target.resource;
        Err(Status::conflict(row.group, row.plural, &target.name, MODIFIED))
    }
}

pub fn check_preconditions(stored: &Resource, options: &DeleteOptions, before: &Value) -> Result<(), Status> {
    let meta = before.at("metadata");
    let fields = [
        ("UID", &options.uid, meta.text("uid"), "deleted and then recreated"),
        ("ResourceVersion", &options.resource_version, meta.text("resourceVersion"), "modified"),
    ];
    for (field, said, found, fate) in fields {
        if said.is_empty() || said == found {
            continue;
        }
        let name = meta.text("name");
        if strategy::is(stored, "", "namespaces") {
            let why = format!(
                "Precondition failed: {field} in precondition: {said}, {field} in object meta: {found}"
            );
            return Err(Status::conflict("", "namespaces", name, &why));
        }
        let why = format!(
            "the {field} in the precondition ({said}) does not match the {field} in record ({found}). The object might have been {fate}"
        );
        // Upstream names the kind here, not the resource.
        return Err(Status::conflict(stored.group, stored.kind, name, &why));
    }
    Ok(())
}

/// What a request to delete does to an object.
#[derive(Debug, PartialEq)]
enum Plan {
    /// Nothing: it is on its way already.
    Wait,
    Mark(Value),
    /// Those who watch a pod see that it was to go at once before it goes.
    MarkAndRemove(Value),
    Remove,
}

fn plan(stored: &Resource, before: &Value, options: &DeleteOptions, now: Timestamp) -> Plan {
    let mut after = before.clone();
    let already = before.at("metadata").has("deletionTimestamp");
    if strategy::is(stored, "", "namespaces") {
        if !already {
            set_propagation(after.object_mut("metadata"), &options.propagation);
            after.object_mut("metadata").insert("deletionTimestamp".into(), timestamp(now));
            after.object_mut("status").insert("phase".into(), "Terminating".into());
            return Plan::Mark(after);
        }
        if !before.at("spec").items("finalizers").is_empty() {
            return Plan::Wait;
        }
    }
    let grace = if strategy::is(stored, "", "pods") {
        match grace(before, options.grace, now) {
            Grace::Pending => return Plan::Wait,
            Grace::None => None,
            Grace::Until(end, seconds) => Some((end, seconds)),
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
        // Nobody collects what Events leave behind.
        _ if strategy::is(stored, "", "events") => set_propagation(metadata, "Background"),
        named => set_propagation(metadata, named),
    }
    let held = metadata.get("finalizers").and_then(Value::as_array).is_some_and(|list| !list.is_empty());
    if grace.is_none() && !held {
        return Plan::Remove;
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
    if held || seconds > 0 { Plan::Mark(after) } else { Plan::MarkAndRemove(after) }
}

enum Grace {
    /// It has a grace period that is not to be cut short.
    Pending,
    /// Its grace period is over.
    None,
    Until(Timestamp, i64),
}

/// A pod's grace period is set once and may only become shorter.
fn grace(pod: &Value, asked: Option<i64>, now: Timestamp) -> Grace {
    let after = |start: Timestamp, seconds: i64| {
        start.checked_add(SignedDuration::from_secs(seconds)).unwrap_or(start)
    };
    let Some(end) = deletion_time(pod) else {
        let seconds = api::core::pod::grace_period(pod, asked);
        return Grace::Until(after(now, seconds), seconds);
    };
    let left = match pod.at("metadata").int("deletionGracePeriodSeconds").unwrap_or(0) {
        ..0 => 1,
        left => left,
    };
    let asked = asked.map(|asked| if asked < 0 { 1 } else { asked });
    match asked {
        _ if left == 0 => Grace::None,
        Some(asked) if asked < left => match after(after(end, -left), asked) {
            end if end >= now => Grace::Until(end, asked),
            _ => Grace::Until(now, asked.min(1)),
        },
        _ => Grace::Pending,
    }
}

fn deletion_time(object: &Value) -> Option<Timestamp> {
    object.at("metadata").at("deletionTimestamp").as_str()?.parse().ok()
}

fn timestamp(time: Timestamp) -> Value {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string().into()
}

/// How dependents are treated is written down as a finalizer, for the garbage collector.
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
        let found = match plan(row, &before, &options, now) {
            Plan::Wait => "wait".to_owned(),
            Plan::Remove => "gone".to_owned(),
            Plan::Mark(after) => mark(after),
            Plan::MarkAndRemove(after) => mark(after) + " gone",
        };
        assert_eq!(found, expected);
    }

    fn with(grace: Option<i64>, propagation: &str) -> DeleteOptions {
        DeleteOptions { grace, propagation: propagation.into(), ..DeleteOptions::default() }
    }

    #[test]
    fn finalizers_and_propagation() {
        let plain = json!({"metadata": {"name": "a"}});
        let held = json!({"metadata": {"name": "a", "finalizers": ["x/y"]}});
        let going = json!({"metadata": {"name": "a", "finalizers": ["x/y"],
            "deletionTimestamp": "2025-01-01T00:00:00Z", "deletionGracePeriodSeconds": 0}});
        check("configmaps", plain.clone(), with(None, ""), "gone");
        check("configmaps", held.clone(), with(None, ""), "2026-01-01T00:00:10Z 0 [\"x/y\"]");
        check("configmaps", going.clone(), with(None, ""), "2025-01-01T00:00:00Z 0 [\"x/y\"]");
        check("configmaps", plain.clone(), with(None, "Orphan"), "2026-01-01T00:00:10Z 0 [\"orphan\"]");
        check(
            "configmaps",
            going,
            with(None, "Foreground"),
            "2025-01-01T00:00:00Z 0 [\"x/y\",\"foregroundDeletion\"]",
        );
        let orphaning = json!({"metadata": {"name": "a", "finalizers": ["orphan"]}});
        check("configmaps", orphaning.clone(), with(None, "Background"), "gone");
        check("configmaps", orphaning, with(None, ""), "2026-01-01T00:00:10Z 0 [\"orphan\"]");
        check("jobs", plain.clone(), with(None, ""), "2026-01-01T00:00:10Z 0 [\"orphan\"]");
        check("jobs", plain.clone(), with(None, "Background"), "gone");
        check("events", plain, with(None, "Orphan"), "gone");
    }

    #[test]
    fn grace_periods() {
        let spec = json!({"nodeName": "n", "terminationGracePeriodSeconds": 30});
        let running = json!({"metadata": {"name": "a"}, "spec": spec, "status": {"phase": "Running"}});
        check("pods", running.clone(), with(None, ""), "2026-01-01T00:00:40Z 30 null");
        check("pods", running.clone(), with(Some(-5), ""), "2026-01-01T00:00:11Z 1 null");
        check("pods", running, with(Some(0), ""), "2026-01-01T00:00:10Z 0 null gone");
        let waiting = json!({"metadata": {"name": "a"}, "spec": {"terminationGracePeriodSeconds": 30}});
        check("pods", waiting, with(None, ""), "2026-01-01T00:00:10Z 0 null gone");
        let going = |grace: i64, end: &str| {
            json!({"metadata": {"name": "a", "deletionTimestamp": end, "deletionGracePeriodSeconds": grace},
                "spec": spec})
        };
        let going = going(60, "2026-01-01T00:01:00Z");
        check("pods", going.clone(), with(None, ""), "wait");
        check("pods", going.clone(), with(Some(60), ""), "wait");
        check("pods", going.clone(), with(Some(20), ""), "2026-01-01T00:00:20Z 20 null");
        check("pods", going.clone(), with(Some(5), ""), "2026-01-01T00:00:10Z 1 null");
        check("pods", going, with(Some(0), ""), "2026-01-01T00:00:10Z 0 null gone");
    }

    #[test]
    fn namespaces_go_in_two_steps() {
        let active = json!({"metadata": {"name": "a"}, "spec": {"finalizers": ["kubernetes"]}});
        check("namespaces", active, with(None, ""), "2026-01-01T00:00:10Z null null");
        let going = json!({"metadata": {"name": "a", "deletionTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"finalizers": ["kubernetes"]}});
        check("namespaces", going, with(None, ""), "wait");
        let done = json!({"metadata": {"name": "a", "deletionTimestamp": "2026-01-01T00:00:00Z"}});
        check("namespaces", done, with(None, ""), "gone");
    }
}
