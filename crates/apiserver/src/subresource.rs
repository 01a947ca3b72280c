//! Subresources: the doors that are views of the object, and those that do something with it.

use api::json::Json as _;
use api::{Errors, Status};
use http::{Response, StatusCode};
use serde_json::{Value, json};

use crate::body::Body;
use crate::codec;
use crate::create::invalid;
use crate::delete::DeleteOptions;
use crate::door::Door;
use crate::options::{Version, parse_version};
use crate::render::encoded;
use crate::request::Target;
use crate::server::{Call, Server, method_not_allowed};
use crate::update::Change;
use crate::write::{Outcome, WriteOptions};

pub async fn answer(server: &Server, call: &Call, target: &Target) -> Result<Response<Body>, Status> {
    if let Some(door) = Door::named(&target.subresource) {
        return through(server, call, target, door).await;
    }
    match (target.subresource.as_str(), call.method.as_str()) {
        ("binding", "POST") => bind(server, call, target).await,
        ("eviction", "POST") => evict(server, call, target).await,
        ("log" | "exec" | "attach" | "portforward" | "proxy", _) => Err(no_node(server, target).await),
        ("token", "POST") => Err(no_tokens(server, target).await),
        _ => Err(method_not_allowed()),
    }
}

/// Reads or changes the part of the object that a door shows.
async fn through(
    server: &Server,
    call: &Call,
    target: &Target,
    door: Door,
) -> Result<Response<Body>, Status> {
    let renderer = call.renderer(target)?;
    match call.method.as_str() {
        "GET" | "HEAD" if door != Door::Finalize => {
            let version = parse_version(call.query.get("resourceVersion"))?;
            server.fresh(version.map_or(Version::MostRecent, Version::NotOlderThan)).await?;
            let object = server.find(target).ok_or_else(|| target.not_found())?;
            Ok(door.rendered(&renderer, StatusCode::OK, Outcome::Stored(object)))
        }
        "PUT" => crate::update::update(server, call, target, door, &renderer).await,
        "PATCH" if door != Door::Finalize => {
            crate::patching::patch(server, call, target, door, &renderer).await
        }
        _ => Err(method_not_allowed()),
    }
}

/// Puts a pod onto a node: what the scheduler does.
pub async fn bind(server: &Server, call: &Call, target: &Target) -> Result<Response<Body>, Status> {
    let options = WriteOptions::parse(call, "CreateOptions")?;
    let media = codec::body_media(&call.headers)?;
    let binding = codec::decode(media, &call.body, ("", "v1", "Binding"), options.validation)?.value;
    let pods = api::table::find("", "v1", "pods").expect("pods are in the table");
    let said = binding.path("metadata.name").as_str().unwrap_or("");
    let name = if target.name.is_empty() { said } else { &target.name };
    if !target.name.is_empty() && !said.is_empty() && said != target.name {
        return Err(Status::bad_request("name in URL does not match name in Binding object"));
    }
    let pod = Target { name: name.to_owned(), ..Target::collection(pods, &target.namespace) };
    let mut errors = Errors::default();
    api::core::binding::validate_binding(&binding, &mut errors);
    invalid(api::table::find("", "v1", "bindings").unwrap_or(pods), name, &errors)?;
    let now = options.timestamp();
    let whole = Target { subresource: "binding".into(), ..pod.clone() };
    server
        .change(&whole, &options, |before| bound(before, &binding, &now, name).map(Change::replace))
        .await?;
    let status =
        json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201});
    Ok(encoded(StatusCode::CREATED, &call.format, status))
}

fn bound(before: &Value, binding: &Value, now: &str, name: &str) -> Result<Value, Status> {
    let conflict = |why: &str| Err(Status::conflict("", "pods/binding", name, why));
    let (metadata, sent) = (before.at("metadata"), binding.at("metadata"));
    if metadata.has("deletionTimestamp") {
        return conflict(&format!("pod {name} is being deleted, cannot be assigned to a host"));
    }
    if !sent.text("uid").is_empty() && sent.text("uid") != metadata.text("uid") {
        return conflict(&format!(
            "Precondition failed: UID in precondition: {}, UID in object meta: {}",
            sent.text("uid"),
            metadata.text("uid")
        ));
    }
    let node = before.at("spec").text("nodeName");
    if !node.is_empty() {
        return conflict(&format!("pod {name} is already assigned to node {node:?}"));
    }
    if !before.at("spec").items("schedulingGates").is_empty() {
        return conflict(&format!("pod {name} has non-empty .spec.schedulingGates"));
    }
    let mut pod = before.clone();
    pod.object_mut("spec").insert("nodeName".into(), binding.at("target").at("name").clone());
    for field in ["annotations", "labels"] {
        for (key, value) in sent.entries(field) {
            if let Some(entries) = pod["metadata"].object_mut(field).into() {
                let entries: &mut serde_json::Map<String, Value> = entries;
                entries.insert(key.to_owned(), value.clone());
            }
        }
    }
    let mut conditions: Vec<Value> = pod.path("status.conditions").as_array().cloned().unwrap_or_default();
    conditions.retain(|condition| condition.text("type") != "PodScheduled");
    conditions.push(json!({
        "type": "PodScheduled", "status": "True", "lastProbeTime": null, "lastTransitionTime": now,
    }));
    pod.object_mut("status").insert("conditions".into(), conditions.into());
    Ok(pod)
}

/// Deletes a pod if its disruption budget allows it.
async fn evict(server: &Server, call: &Call, target: &Target) -> Result<Response<Body>, Status> {
    let options = WriteOptions::parse(call, "CreateOptions")?;
    let media = codec::body_media(&call.headers)?;
    let eviction = codec::decode(media, &call.body, ("policy", "v1", "Eviction"), options.validation)?.value;
    let dry_run: Vec<&str> = call.query.all("dryRun").collect();
    let asked = api::policy::eviction::delete_options(&eviction, &target.name, &dry_run)?;
    let delete = DeleteOptions::from_value(&asked)?;
    let whole = Target { subresource: String::new(), ..target.clone() };
    let pod = server.current(&whole).await?.ok_or_else(|| target.not_found())?.value();
    if needs_budget(&pod) {
        spend_budget(server, &pod, target, delete.dry_run, &options).await?;
    }
    server.delete_object(&whole, &delete, call.now).await?;
    let status =
        json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201});
    Ok(encoded(StatusCode::CREATED, &call.format, status))
}

/// Pods that do no work any more, or none yet, are nobody's disruption.
fn needs_budget(pod: &Value) -> bool {
    !matches!(pod.at("status").text("phase"), "Succeeded" | "Failed" | "Pending")
        && !pod.at("metadata").has("deletionTimestamp")
}

async fn spend_budget(
    server: &Server,
    pod: &Value,
    target: &Target,
    dry_run: bool,
    options: &WriteOptions,
) -> Result<(), Status> {
    let row = api::table::find("policy", "v1", "poddisruptionbudgets").expect("budgets are in the table");
    let collection = Target::collection(row, &target.namespace);
    let budgets = server.shard(row).snapshot(&collection.key(), 0).objects;
    let matching: Vec<Value> = budgets
        .iter()
        .map(|budget| budget.value())
        .filter(|budget| {
            let selector = budget.path("spec.selector");
            !selector.is_null()
                && api::selector::LabelSelector::from_value(selector)
                    .is_ok_and(|selector| selector.matches_labels(pod.path("metadata.labels")))
        })
        .collect();
    let budget = match matching.as_slice() {
        [] => return Ok(()),
        [budget] => budget,
        _ => {
            return Err(Status::internal(
                "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.",
            ));
        }
    };
    let name = budget.at("metadata").text("name").to_owned();
    let pod_name = target.name.clone();
    let now = options.timestamp();
    let status_of = Target { name: name.clone(), subresource: "status".into(), ..collection };
    let spend = |before: &Value| {
        let status = before.at("status");
        let allowed = status.int("disruptionsAllowed").unwrap_or(0);
        let observed = status.int("observedGeneration").unwrap_or(0);
        if observed < before.at("metadata").int("generation").unwrap_or(0) {
            return Err(too_many(
                "Cannot evict pod as it would violate the pod's disruption budget.",
                &format!("The disruption budget {name} is still being processed by the server."),
            ));
        }
        if allowed <= 0 {
            let healthy = status.int("currentHealthy").unwrap_or(0);
            let desired = status.int("desiredHealthy").unwrap_or(0);
            return Err(too_many(
                "Cannot evict pod as it would violate the pod's disruption budget.",
                &format!(
                    "The disruption budget {name} needs {desired} healthy pods and has {healthy} currently"
                ),
            ));
        }
        let mut after = before.clone();
        let status = after.object_mut("status");
        status.insert("disruptionsAllowed".into(), (allowed - 1).into());
        let disrupted = after["status"].object_mut("disruptedPods");
        disrupted.insert(pod_name.clone(), now.clone().into());
        Ok(Change::replace(after))
    };
    let options = WriteOptions { dry_run, ..options.clone() };
    server.change(&status_of, &options, spend).await.map(drop)
}

fn too_many(message: &str, cause: &str) -> Status {
    let mut status = Status::failure(429, "TooManyRequests", message);
    status.details.get_or_insert_default().causes.push(api::status::Cause {
        reason: "DisruptionBudget".into(),
        message: cause.to_owned(),
        field: String::new(),
    });
    status
}

/// What logs, exec and the like answer while nothing runs pods.
async fn no_node(server: &Server, target: &Target) -> Status {
    match server.current(&Target { subresource: String::new(), ..target.clone() }).await {
        Err(status) => status,
        Ok(None) => target.not_found(),
        Ok(Some(object)) => {
            let node = object.value().path("spec.nodeName").as_str().unwrap_or("").to_owned();
            match (target.resource.plural, node.as_str()) {
                ("pods", "") => {
                    Status::bad_request(format!("pod {} does not have a host assigned", target.name))
                }
                ("pods", node) => Status::internal(format!(
                    "error dialing backend: no node agent is connected for node {node:?}"
                )),
                _ => {
                    let mut status = Status::failure(
                        503,
                        "ServiceUnavailable",
                        format!(
                            "no endpoints available for {} {:?}: no node agent is connected",
                            target.resource.singular(),
                            target.name
                        ),
                    );
                    status.details = Some(api::status::Details::default());
                    status
                }
            }
        }
    }
}

/// Tokens come with authentication by tokens; until then the request is refused, not faked.
async fn no_tokens(server: &Server, target: &Target) -> Status {
    match server.current(&Target { subresource: String::new(), ..target.clone() }).await {
        Err(status) => status,
        Ok(None) => target.not_found(),
        Ok(Some(_)) => Status::failure(
            501,
            "",
            "this server does not issue service account tokens; use a client certificate",
        ),
    }
}
