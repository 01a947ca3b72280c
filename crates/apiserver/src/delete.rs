//! DELETE: now, after a grace period, or when the finalizers are done.

use api::json::Json as _;
use api::status::Details;
use api::{Errors, Path, Resource, Status};
use http::{Response, StatusCode};
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use crate::body::Body;
use crate::codec;
use crate::negotiate::Media;
use crate::options::ListOptions;
use crate::read;
use crate::registry::stored_as;
use crate::render::{Renderer, encoded};
use crate::request::Target;
use crate::server::{Call, Server};
use crate::update::is_finished;
use crate::write::parse_dry_run;

/// Kinds whose deletion is answered with the object itself (upstream's `ReturnDeletedObject`).
const ANSWERED_WITH_OBJECT: &[(&str, &str)] = &[
    ("", "namespaces"),
    ("", "persistentvolumeclaims"),
    ("", "persistentvolumes"),
    ("", "pods"),
    ("", "podtemplates"),
    ("", "resourcequotas"),
    ("", "serviceaccounts"),
    ("", "services"),
    ("resource.k8s.io", "deviceclasses"),
    ("resource.k8s.io", "resourceclaims"),
    ("resource.k8s.io", "resourceclaimtemplates"),
    ("resource.k8s.io", "resourceslices"),
    ("storage.k8s.io", "csidrivers"),
    ("storage.k8s.io", "csinodes"),
    ("storage.k8s.io", "storageclasses"),
    ("storage.k8s.io", "volumeattachments"),
    ("storage.k8s.io", "volumeattributesclasses"),
];

#[derive(Clone, Debug, Default)]
pub struct DeleteOptions {
    pub grace: Option<i64>,
    pub dry_run: bool,
    /// `Orphan`, `Background`, `Foreground` or empty.
    pub propagation: String,
    pub uid: String,
    pub resource_version: String,
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
        Deleted::Gone(last) if !ANSWERED_WITH_OBJECT.contains(&(row.group, row.plural)) => {
            Ok(encoded(StatusCode::OK, &renderer.format, success(row, &last)))
        }
        Deleted::Gone(last) | Deleted::Going(last) => {
            Ok(renderer.value(StatusCode::OK, codec::from_stored(row, last)))
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
    let options = DeleteOptions::read(call)?;
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
    Ok(renderer.list(objects, &meta))
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
            for name in ["propagationPolicy"] {
                if !call.query.get(name).is_empty() {
                    value[name] = json!(call.query.get(name));
                }
            }
            let dry_run: Vec<&str> = call.query.all("dryRun").collect();
            if !dry_run.is_empty() {
                value["dryRun"] = json!(dry_run);
            }
        } else if call.query.has("dryRun") && value.items("dryRun").is_empty() {
            value["dryRun"] = json!(call.query.all("dryRun").collect::<Vec<_>>());
        }
        DeleteOptions::from_value(&value)
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
        if !errors.is_empty() {
            return Err(Status::invalid("meta.k8s.io", "DeleteOptions", "", &errors));
        }
        let dry_run = value.items("dryRun").iter().filter_map(Value::as_str);
        Ok(DeleteOptions {
            grace: value.int("gracePeriodSeconds"),
            dry_run: parse_dry_run(dry_run, "DeleteOptions")?,
            propagation: match orphan {
                Some(true) => "Orphan".to_owned(),
                Some(false) => "Background".to_owned(),
                None => propagation.to_owned(),
            },
            uid: value.path("preconditions.uid").as_str().unwrap_or("").to_owned(),
            resource_version: value.path("preconditions.resourceVersion").as_str().unwrap_or("").to_owned(),
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
            let json = codec::yaml_to_json(&call.body)?;
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
        loop {
            let old = self.current(target).await?.ok_or_else(|| target.not_found())?;
            let before = old.value();
            check_preconditions(target, options, &before)?;
            let Some(after) = plan(stored, &before, options, now) else {
                // Already on its way, and no faster way was asked for.
                return Ok(Deleted::Going(before));
            };
            let gone = is_finished(&after);
            if options.dry_run {
                return Ok(if gone { Deleted::Gone(after) } else { Deleted::Going(after) });
            }
            if gone {
                if let Some(revision) = self.remove(&old).await? {
                    Box::pin(self.allocations.release(self, stored, &after)).await;
                    let mut last = before;
                    last.object_mut("metadata").insert("resourceVersion".into(), revision.to_string().into());
                    return Ok(Deleted::Gone(last));
                }
            } else if let Some(object) = self.put(target.resource, after, Some(&old)).await? {
                return Ok(Deleted::Going(object.value()));
            }
        }
    }
}

fn check_preconditions(target: &Target, options: &DeleteOptions, before: &Value) -> Result<(), Status> {
    let row = target.resource;
    let conflict = |why: String| Err(Status::conflict(row.group, row.plural, &target.name, &why));
    let uid = before.path("metadata.uid").as_str().unwrap_or("");
    if !options.uid.is_empty() && options.uid != uid {
        return conflict(format!(
            "Precondition failed: UID in precondition: {}, UID in object meta: {uid}",
            options.uid
        ));
    }
    let version = before.path("metadata.resourceVersion").as_str().unwrap_or("");
    if !options.resource_version.is_empty() && options.resource_version != version {
        return conflict(format!(
            "Precondition failed: ResourceVersion in precondition: {}, ResourceVersion in object meta: {version}",
            options.resource_version
        ));
    }
    Ok(())
}

/// The object after the request to delete it; `None` when the request changes nothing.
fn plan(stored: &Resource, before: &Value, options: &DeleteOptions, now: Timestamp) -> Option<Value> {
    let mut after = before.clone();
    let grace = match (stored.group, stored.plural) {
        ("", "pods") => api::core::pod::grace_period(before, options.grace),
        _ => 0,
    };
    let metadata = after.object_mut("metadata");
    set_propagation(metadata, &options.propagation);
    let already = before.at("metadata").has("deletionTimestamp");
    let left = before.at("metadata").int("deletionGracePeriodSeconds").unwrap_or(0);
    if already && grace >= left && !(grace == 0 && left == 0 && is_finished(&after)) {
        return (after != *before).then_some(after);
    }
    let metadata = after.object_mut("metadata");
    if !already {
        let generation = metadata.get("generation").and_then(Value::as_i64).unwrap_or(0);
        if generation > 0 {
            metadata.insert("generation".into(), (generation + 1).into());
        }
    }
    let when = now.checked_add(SignedDuration::from_secs(grace)).unwrap_or(now);
    metadata.insert("deletionTimestamp".into(), when.strftime("%Y-%m-%dT%H:%M:%SZ").to_string().into());
    metadata.insert("deletionGracePeriodSeconds".into(), grace.into());
    if (stored.group, stored.plural) == ("", "namespaces") {
        metadata.remove("deletionGracePeriodSeconds");
        after.object_mut("status").insert("phase".into(), "Terminating".into());
    }
    Some(after)
}

/// How dependents are treated is written down as a finalizer, for the garbage collector.
fn set_propagation(metadata: &mut serde_json::Map<String, Value>, policy: &str) {
    if policy.is_empty() {
        return;
    }
    let mut finalizers: Vec<Value> =
        metadata.get("finalizers").and_then(Value::as_array).cloned().unwrap_or_default();
    let wanted = match policy {
        "Orphan" => Some("orphan"),
        "Foreground" => Some("foregroundDeletion"),
        _ => None,
    };
    finalizers.retain(|name| {
        !matches!(name.as_str(), Some("orphan" | "foregroundDeletion")) || name.as_str() == wanted
    });
    if let Some(wanted) = wanted
        && !finalizers.iter().any(|name| name == wanted)
    {
        finalizers.push(wanted.into());
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
        let row = api::table::find("", "v1", plural).unwrap();
        let now: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let found = match plan(row, &before, &options, now) {
            None => "nothing".to_owned(),
            Some(after) if is_finished(&after) => "gone".to_owned(),
            Some(after) => {
                let meta = after.at("metadata");
                format!(
                    "{} {} {}",
                    meta.text("deletionTimestamp"),
                    meta.at("deletionGracePeriodSeconds"),
                    meta.at("finalizers")
                )
            }
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn deletion() {
        let none = DeleteOptions::default;
        check("configmaps", json!({"metadata": {"name": "a"}}), none(), "gone");
        check(
            "configmaps",
            json!({"metadata": {"name": "a", "finalizers": ["x/y"]}}),
            none(),
            "2026-01-01T00:00:00Z 0 [\"x/y\"]",
        );
        check(
            "configmaps",
            json!({"metadata": {"name": "a", "finalizers": ["x/y"], "deletionTimestamp": "2025-01-01T00:00:00Z", "deletionGracePeriodSeconds": 0}}),
            none(),
            "nothing",
        );
        let orphan = DeleteOptions { propagation: "Orphan".into(), ..none() };
        check(
            "configmaps",
            json!({"metadata": {"name": "a"}}),
            orphan,
            "2026-01-01T00:00:00Z 0 [\"orphan\"]",
        );
        let running = json!({"metadata": {"name": "a"}, "spec": {"nodeName": "n", "terminationGracePeriodSeconds": 30}, "status": {"phase": "Running"}});
        check("pods", running.clone(), none(), "2026-01-01T00:00:30Z 30 null");
        check("pods", running, DeleteOptions { grace: Some(0), ..none() }, "gone");
        check(
            "pods",
            json!({"metadata": {"name": "a"}, "spec": {"terminationGracePeriodSeconds": 30}}),
            none(),
            "gone",
        );
        check(
            "namespaces",
            json!({"metadata": {"name": "a"}, "spec": {"finalizers": ["kubernetes"]}}),
            none(),
            "2026-01-01T00:00:00Z null null",
        );
    }
}
