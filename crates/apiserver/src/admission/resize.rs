//! PodResizeValidator: a resized pod must fit the allocatable resources of its node.
//! NodeDeclaredFeatureValidator: updates of a bound pod may only use features that its node
//! declares.

use api::Status;
use api::field::quote;
use api::json::JsonExt as _;
use api::resources;
use api::status::StatusCause;
use schema::quantity::Quantity;
use serde_json::Value;

use super::{Cluster, Operation, Request};

pub fn validate(request: &Request<'_>, pod: &Value, cluster: &dyn Cluster) -> Result<(), Status> {
    let resize = (request.row.group, request.row.plural, request.subresource) == ("", "pods", "resize");
    let name = pod.at("spec").text("nodeName");
    let Some(old) = request.old.filter(|_| resize && request.operation == Operation::Update) else {
        return Ok(());
    };
    if name.is_empty() || old.at("spec") == pod.at("spec") {
        return Ok(());
    }
    let Some(node) = cluster.get("", "nodes", "", name) else {
        return Err(request.forbidden(format!("node {} not found", quote(name))));
    };
    let deny = |message: String, reason: &str| {
        let mut status = request.forbidden(message);
        let cause = StatusCause { reason: reason.to_owned(), message: String::new(), field: String::new() };
        status.details.get_or_insert_default().causes.push(cause);
        Err(status)
    };
    if let Some(os) = node.label("kubernetes.io/os").filter(|os| *os != "linux") {
        let message =
            format!("pod resize is only supported on linux nodes, node {} is {}", quote(name), quote(os));
        return deny(message, "UnsupportedPlatform");
    }
    let allocatable = resources::resource_list(node.value().at("status"), "allocatable");
    let requested = resources::pod_resources(pod.at("spec"), "requests");
    let of = |list: &resources::ResourceList, name: &str| {
        list.get(name).copied().unwrap_or_else(|| Quantity::new(0, schema::quantity::Format::DecimalSI))
    };
    let number = |name: &str, quantity: Quantity| match name {
        "cpu" => quantity.milli(),
        _ => quantity.value(),
    };
    let insufficient: Vec<String> = ["cpu", "memory"]
        .into_iter()
        .filter(|name| of(&requested, name) > of(&allocatable, name))
        .map(|name| {
            let (requested, allocatable) =
                (number(name, of(&requested, name)), number(name, of(&allocatable, name)));
            format!("{name}, requested: {requested}, allocatable: {allocatable}")
        })
        .collect();
    if insufficient.is_empty() {
        return Ok(());
    }
    deny(
        format!("node didn't have enough allocatable resources: {}", insufficient.join("; ")),
        "NodeCapacity",
    )
}

/// NodeDeclaredFeatureValidator.
pub fn validate_declared_features(
    request: &Request<'_>,
    pod: &Value,
    cluster: &dyn Cluster,
) -> Result<(), Status> {
    let pods = (request.row.group, request.row.plural) == ("", "pods");
    let applies =
        pods && matches!(request.subresource, "" | "resize") && request.operation == Operation::Update;
    let Some(old) = request.old.filter(|_| applies) else { return Ok(()) };
    let (spec, before) = (pod.at("spec"), old.at("spec"));
    let name = spec.text("nodeName");
    // The generation changes with every change of the spec.
    if name.is_empty() || pod.path("metadata.generation") == old.path("metadata.generation") {
        return Ok(());
    }
    let containers = before.items("initContainers").iter().zip(spec.items("initContainers"));
    let mut ordinary = containers.filter(|(old, _)| old.text("restartPolicy") != "Always");
    let needs = [
        ("InPlacePodLevelResourcesVerticalScaling", before.at("resources") != spec.at("resources")),
        (
            "InPlacePodVerticalScalingInitContainers",
            ordinary.any(|(old, new)| old.at("resources") != new.at("resources")),
        ),
    ];
    let needs: Vec<&str> = needs.into_iter().filter(|(_, needed)| *needed).map(|(name, _)| name).collect();
    if needs.is_empty() {
        return Ok(());
    }
    let Some(node) = cluster.get("", "nodes", "", name) else {
        return Err(request.forbidden(format!("node {} not found", quote(name))));
    };
    let node = node.value();
    let known = node.at("status").items("declaredFeatures");
    let missing: Vec<&str> =
        needs.into_iter().filter(|need| !known.iter().any(|feature| feature == need)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let missing = missing.join(", ");
    Err(request.forbidden(format!(
        "pod update requires features {missing} which are not available on node {}",
        quote(name)
    )))
}
