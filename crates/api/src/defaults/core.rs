//! Defaults of the core group, except Pods.

use serde_json::{Value, json};

use super::DefaultRule::{Apply, Set};
use super::DefaultValue::Text;
use super::pod::set_absent;
use super::{TypeDefaults, is_zero};
use crate::json::JsonExt;

/// Three hours, the default timeout of ClientIP session affinity.
const SESSION_AFFINITY_TIMEOUT_SECONDS: i64 = 10800;

pub(super) const TYPE_DEFAULTS: &[TypeDefaults] = &[
    TypeDefaults { ty: "core.v1.ReplicationController", rules: &[Apply(replication_controller)] },
    TypeDefaults { ty: "core.v1.Service", rules: &[Apply(service)] },
    TypeDefaults { ty: "core.v1.EndpointPort", rules: &[Set("protocol", Text("TCP"))] },
    TypeDefaults { ty: "core.v1.Secret", rules: &[Set("type", Text("Opaque"))] },
    TypeDefaults { ty: "core.v1.PersistentVolumeStatus", rules: &[Set("phase", Text("Pending"))] },
    // PersistentVolumeSpec has no rules, because VolumeAttachments contain it, too.
    TypeDefaults { ty: "core.v1.PersistentVolume", rules: &[Apply(persistent_volume)] },
    TypeDefaults { ty: "core.v1.PersistentVolumeClaimStatus", rules: &[Set("phase", Text("Pending"))] },
    TypeDefaults { ty: "core.v1.PersistentVolumeClaimSpec", rules: &[Set("volumeMode", Text("Filesystem"))] },
    TypeDefaults { ty: "core.v1.Namespace", rules: &[Apply(namespace)] },
    TypeDefaults { ty: "core.v1.NamespaceStatus", rules: &[Set("phase", Text("Active"))] },
    TypeDefaults { ty: "core.v1.NodeStatus", rules: &[Apply(node_status)] },
    TypeDefaults { ty: "core.v1.LimitRangeItem", rules: &[Apply(limit_range_item)] },
];

/// Defaults selector and labels to the labels of the template.
fn replication_controller(rc: &mut Value) {
    let labels = rc.path("spec.template.metadata.labels").clone();
    if labels.as_object().is_none_or(|labels| labels.is_empty()) {
        return;
    }
    if rc.path("spec.selector").as_object().is_none_or(|selector| selector.is_empty()) {
        rc["spec"].set("selector", labels.clone());
    }
    inherit_labels(rc, labels);
}

/// Defaults the labels of an object to those of its template.
fn inherit_labels(object: &mut Value, labels: Value) {
    let has_labels = object.path("metadata.labels").as_object().is_some_and(|labels| !labels.is_empty());
    if !has_labels && labels.as_object().is_some_and(|labels| !labels.is_empty()) {
        object.object_mut("metadata").insert("labels".to_owned(), labels);
    }
}

fn service(service: &mut Value) {
    service.object_mut("spec");
    let spec = &mut service["spec"];
    session_affinity(spec);
    if spec.text("type").is_empty() {
        spec.set("type", "ClusterIP");
    }
    for port in spec.get_mut("ports").and_then(Value::as_array_mut).into_iter().flatten() {
        if is_zero(port.at("targetPort")) {
            port.set("targetPort", port.int("port").unwrap_or(0));
        }
    }
    let kind = spec.text("type").to_owned();
    let in_cluster = matches!(kind.as_str(), "ClusterIP" | "NodePort" | "LoadBalancer");
    let external = in_cluster && (kind != "ClusterIP" || !spec.items("externalIPs").is_empty());
    if external && spec.text("externalTrafficPolicy").is_empty() {
        spec.set("externalTrafficPolicy", "Cluster");
    }
    if in_cluster {
        spec.set_default("internalTrafficPolicy", "Cluster");
    }
    if kind == "LoadBalancer" {
        spec.set_default("allocateLoadBalancerNodePorts", true);
        let ingress = service.pointer_mut("/status/loadBalancer/ingress").and_then(Value::as_array_mut);
        for ingress in ingress.into_iter().flatten().filter(|ingress| !ingress.text("ip").is_empty()) {
            ingress.set_default("ipMode", "VIP");
        }
    }
}

fn session_affinity(spec: &mut Value) {
    if spec.text("sessionAffinity").is_empty() {
        spec.set("sessionAffinity", "None");
    }
    match spec.text("sessionAffinity") {
        "None" => {
            if let Some(map) = spec.as_object_mut() {
                map.remove("sessionAffinityConfig");
            }
        }
        "ClientIP" if spec.path("sessionAffinityConfig.clientIP.timeoutSeconds").is_null() => {
            spec.set(
                "sessionAffinityConfig",
                json!({"clientIP": {"timeoutSeconds": SESSION_AFFINITY_TIMEOUT_SECONDS}}),
            );
        }
        _ => {}
    }
}

fn persistent_volume(volume: &mut Value) {
    volume.object_mut("spec");
    let spec = &mut volume["spec"];
    if spec.text("persistentVolumeReclaimPolicy").is_empty() {
        spec.set("persistentVolumeReclaimPolicy", "Retain");
    }
    spec.set_default("volumeMode", "Filesystem");
}

/// Sets the label by which selectors match a single namespace.
fn namespace(namespace: &mut Value) {
    let name = namespace.path("metadata.name").clone();
    if name.as_str().is_some_and(|name| !name.is_empty()) {
        namespace.object_mut("metadata");
        namespace["metadata"].object_mut("labels").insert("kubernetes.io/metadata.name".to_owned(), name);
    }
}

fn node_status(status: &mut Value) {
    if !status.has("allocatable") && status.has("capacity") {
        status.set("allocatable", status.at("capacity").clone());
    }
}

/// For containers, the default limit is the maximum, and the default request is the default limit or
/// the minimum.
fn limit_range_item(item: &mut Value) {
    if item.text("type") != "Container" {
        return;
    }
    for (field, from) in [("default", "max"), ("defaultRequest", "default"), ("defaultRequest", "min")] {
        let entries = item.at(from).as_object().cloned().unwrap_or_default();
        set_absent(item, field, &entries);
    }
}
