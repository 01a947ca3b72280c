//! Plugins that are disabled by default.

use std::collections::BTreeSet;

use api::Status;
use api::json::JsonExt as _;
use api::quota::is_extended;
use serde_json::{Value, json};

use super::service_account::push;
use super::{Cluster, Operation, Request};

const HOSTNAME: &str = "kubernetes.io/hostname";
/// In upstream's order.
const CONTAINERS: [&str; 3] = ["initContainers", "containers", "ephemeralContainers"];

/// LimitPodHardAntiAffinityTopology: required pod anti-affinity only by host name.
pub fn hostname_anti_affinity(request: &Request<'_>, pod: &Value, _: &dyn Cluster) -> Result<(), Status> {
    if !request.is("", "pods") || request.operation == Operation::Delete {
        return Ok(());
    }
    let anti = pod.path("spec.affinity.podAntiAffinity");
    let terms = anti.items("requiredDuringSchedulingIgnoredDuringExecution");
    match terms.iter().map(|term| term.text("topologyKey")).find(|key| *key != HOSTNAME) {
        None => Ok(()),
        Some(key) => Err(request.forbidden(format!(
            "affinity.PodAntiAffinity.RequiredDuringScheduling has TopologyKey {key} but only key {HOSTNAME} is allowed"
        ))),
    }
}

/// AlwaysPullImages: sets the pull policy so that a pod cannot use a cached image without
/// credentials for it.
pub fn set_always_pull_images(request: &Request<'_>, pod: &mut Value, _: &dyn Cluster) -> Result<(), Status> {
    if !has_new_images(request, pod) {
        return Ok(());
    }
    let Some(spec) = pod.get_mut("spec") else { return Ok(()) };
    for field in CONTAINERS {
        for container in spec.get_mut(field).and_then(Value::as_array_mut).into_iter().flatten() {
            container.set("imagePullPolicy", "Always");
        }
    }
    for volume in spec.get_mut("volumes").and_then(Value::as_array_mut).into_iter().flatten() {
        if volume.has("image") {
            volume.object_mut("image").insert("pullPolicy".into(), "Always".into());
        }
    }
    Ok(())
}

pub fn validate_always_pull_images(
    request: &Request<'_>,
    pod: &Value,
    _: &dyn Cluster,
) -> Result<(), Status> {
    if !has_new_images(request, pod) {
        return Ok(());
    }
    let spec = pod.at("spec");
    let mut policies = Vec::new();
    for field in CONTAINERS {
        for (i, container) in spec.items(field).iter().enumerate() {
            policies.push((format!("spec.{field}[{i}].imagePullPolicy"), container.text("imagePullPolicy")));
        }
    }
    for (i, volume) in spec.items("volumes").iter().enumerate().filter(|(_, volume)| volume.has("image")) {
        policies.push((format!("spec.volumes[{i}].image.pullPolicy"), volume.at("image").text("pullPolicy")));
    }
    match policies.into_iter().find(|(_, policy)| *policy != "Always") {
        None => Ok(()),
        Some((path, policy)) => {
            Err(request
                .forbidden(format!("{path}: Unsupported value: {policy:?}: supported values: \"Always\"")))
        }
    }
}

/// Whether the request creates a pod or adds images to one.
fn has_new_images(request: &Request<'_>, pod: &Value) -> bool {
    if !request.is("", "pods") || request.operation == Operation::Delete {
        return false;
    }
    let Some(old) = request.old else { return true };
    let images = |pod: &Value| -> BTreeSet<String> {
        let containers = CONTAINERS.iter().flat_map(|field| pod.at("spec").items(field));
        containers.map(|container| container.text("image").to_owned()).collect()
    };
    !images(pod).is_subset(&images(old))
}

/// ExtendedResourceToleration: pods that request an extended resource tolerate the taint of that
/// name.
pub fn extended_resource_tolerations(
    request: &Request<'_>,
    pod: &mut Value,
    _: &dyn Cluster,
) -> Result<(), Status> {
    if !request.is("", "pods") || request.operation == Operation::Delete {
        return Ok(());
    }
    let containers = ["containers", "initContainers"];
    let containers = containers.iter().flat_map(|field| pod.at("spec").items(field));
    let names = containers.flat_map(|container| container.at("resources").entries("requests"));
    let names = names.map(|(name, _)| name).filter(|name| is_extended(name));
    let names: BTreeSet<String> = names.map(str::to_owned).collect();
    for name in names {
        let toleration = json!({"key": name, "operator": "Exists", "effect": "NoSchedule"});
        if !pod.at("spec").items("tolerations").contains(&toleration) {
            pod.object_mut("spec");
            push(&mut pod["spec"], "tolerations", toleration);
        }
    }
    Ok(())
}

/// DenyServiceExternalIPs: no external IPs may be added to a Service.
pub fn deny_external_ips(request: &Request<'_>, service: &Value, _: &dyn Cluster) -> Result<(), Status> {
    if !request.is("", "services") || request.operation == Operation::Delete {
        return Ok(());
    }
    let existing = request.old.map_or(&[][..], |old| old.at("spec").items("externalIPs"));
    match service.at("spec").items("externalIPs").iter().all(|ip| existing.contains(ip)) {
        true => Ok(()),
        false => Err(request.forbidden("Use of external IPs is denied by admission control")),
    }
}
