//! Dispatches subresource requests: views of the object, and actions on it.

use std::sync::Arc;

use api::json::JsonExt as _;
use api::{ErrorList, Status};
use http::{Response, StatusCode};
use serde_json::{Value, json};

use crate::body::Body;
use crate::codec;
use crate::kubelets::{self, StreamSubresource};
use crate::options::{ResourceVersionMatch, parse_version};
use crate::render::encode_response;
use crate::request::Target;
use crate::server::{Call, Server, method_not_allowed};
use crate::subresource_view::SubresourceView;
use crate::update::{ObjectChange, check_uid};
use crate::write::{WriteOptions, WriteResult};

pub async fn handle(server: &Arc<Server>, call: &Call, target: &Target) -> Result<Response<Body>, Status> {
    if let Some(view) = SubresourceView::from_subresource(&target.subresource) {
        return handle_view(server, call, target, view).await;
    }
    if matches!(target.subresource.as_str(), "exec" | "attach" | "portforward" | "proxy") {
        crate::connect::admit(server, call, target).await?;
    }
    match (target.subresource.as_str(), call.method.as_str()) {
        ("binding", "POST") => bind(server, call, target).await,
        ("eviction", "POST") => crate::eviction::evict(server, call, target).await,
        ("log", _) => kubelets::log(server, call, target).await,
        ("exec", _) => kubelets::stream(server, call, target, StreamSubresource::Exec).await,
        ("attach", _) => kubelets::stream(server, call, target, StreamSubresource::Attach).await,
        ("portforward", _) => kubelets::stream(server, call, target, StreamSubresource::PortForward).await,
        ("proxy", _) => crate::proxy::handle(server, call, target).await,
        ("token", "POST") => crate::tokens::issue(server, call, target).await,
        _ => Err(method_not_allowed()),
    }
}

/// Reads or updates the part of the object that the view shows.
async fn handle_view(
    server: &Server,
    call: &Call,
    target: &Target,
    view: SubresourceView,
) -> Result<Response<Body>, Status> {
    let renderer = call.renderer(target)?;
    match call.method.as_str() {
        "GET" | "HEAD" if view != SubresourceView::Finalize => {
            let version = parse_version(call.query.get("resourceVersion"))?;
            server
                .wait_until_fresh(
                    version.map_or(ResourceVersionMatch::MostRecent, ResourceVersionMatch::NotOlderThan),
                )
                .await?;
            let object = server.find(target).ok_or_else(|| target.not_found())?;
            let object = server.convert_for_request(target.resource, object).await?;
            Ok(view.render(&renderer, StatusCode::OK, WriteResult::Stored(object)))
        }
        "PUT" => crate::update::update(server, call, target, view, &renderer).await,
        "PATCH" if view != SubresourceView::Finalize => {
            crate::patch_handler::patch(server, call, target, view, &renderer).await
        }
        _ => Err(method_not_allowed()),
    }
}

/// Binds a pod to a node, for the scheduler.
pub async fn bind(server: &Server, call: &Call, target: &Target) -> Result<Response<Body>, Status> {
    let options = WriteOptions::parse(call, "CreateOptions")?;
    let media = codec::body_media(&call.headers)?;
    let mut binding = codec::decode(media, &call.body, ("", "v1", "Binding"), options.validation)?.value;
    crate::create::set_namespace(&mut binding, target)?;
    let pods = api::resource_table::find_resource("", "v1", "pods").expect("pods are in the resource table");
    let name = binding.at("metadata").text("name").to_owned();
    if !target.name.is_empty() && name != target.name {
        return Err(Status::bad_request("name in URL does not match name in Binding object"));
    }
    let pod = Target {
        name: name.clone(),
        subresource: "binding".into(),
        ..Target::collection(pods, &target.namespace)
    };
    server.admit_subresource_create(&pod, &mut binding, &options).await?;
    let mut errors = ErrorList::default();
    api::core::binding::validate_binding(&binding, &mut errors);
    if !errors.is_empty() {
        return Err(Status::failure(500, "", errors.to_string()));
    }
    let now = options.timestamp();
    let make = |before: &Value| {
        check_uid(&pod, binding.at("metadata").text("uid"), before)?;
        let mut value = bind_pod(before, &binding, &now)
            .map_err(|reason| Status::conflict("", "pods/binding", &name, &reason))?;
        // A resourceVersion in the binding is a precondition on the pod.
        let version = binding.at("metadata").at("resourceVersion");
        if !version.is_null() {
            value.object_mut("metadata").insert("resourceVersion".into(), version.clone());
        }
        Ok(ObjectChange { value, managed_fields_set: true, retry_on_conflict: true })
    };
    server.update_object(&pod, &options, make).await?;
    Ok(encode_response(StatusCode::CREATED, &call.format, success()))
}

pub fn success() -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201})
}

fn bind_pod(before: &Value, binding: &Value, now: &str) -> Result<Value, String> {
    let (metadata, spec) = (before.at("metadata"), before.at("spec"));
    let name = metadata.text("name");
    if metadata.has("deletionTimestamp") {
        return Err(format!("pod {name} is being deleted, cannot be assigned to a host"));
    }
    if !spec.text("nodeName").is_empty() {
        return Err(format!("pod {name} is already assigned to node {:?}", spec.text("nodeName")));
    }
    if !spec.items("schedulingGates").is_empty() {
        return Err(format!("pod {name} has non-empty .spec.schedulingGates"));
    }
    let mut pod = before.clone();
    pod.object_mut("spec").insert("nodeName".into(), binding.at("target").at("name").clone());
    pod.object_mut("status").remove("nominatedNodeName");
    for field in ["annotations", "labels"] {
        for (key, value) in binding.at("metadata").entries(field) {
            pod["metadata"].object_mut(field).insert(key.to_owned(), value.clone());
        }
    }
    let scheduled = json!({"type": "PodScheduled", "status": "True", "lastProbeTime": null});
    set_condition(&mut pod, scheduled, now);
    Ok(pod)
}

/// Replaces the condition of the same type. lastTransitionTime changes only with the status.
pub fn set_condition(object: &mut Value, mut condition: Value, now: &str) {
    let status = object.object_mut("status");
    let list = status.entry("conditions").or_insert_with(|| json!([]));
    let Some(list) = list.as_array_mut() else { return };
    let old = list.iter_mut().find(|old| old.text("type") == condition.text("type"));
    let since = match &old {
        Some(old) if old.text("status") == condition.text("status") => old.at("lastTransitionTime").clone(),
        _ => now.into(),
    };
    condition.set("lastTransitionTime", since);
    match old {
        Some(old) => *old = condition,
        None => list.push(condition),
    }
}
