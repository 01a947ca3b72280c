//! The core group, but for Pods.

use serde_json::{Value, json};

use super::Constant::Text;
use super::Rule::{Fill, Set};
use super::pod::fill_absent;
use super::{Row, is_zero};
use crate::json::Json;

/// Three hours, of a Service's client IP affinity.
const AFFINITY_SECONDS: i64 = 10800;

pub(super) const ROWS: &[Row] = &[
    Row { ty: "core.v1.ReplicationController", rules: &[Fill(replication_controller)] },
    Row { ty: "core.v1.Service", rules: &[Fill(service)] },
    Row { ty: "core.v1.EndpointPort", rules: &[Set("protocol", Text("TCP"))] },
    Row { ty: "core.v1.Secret", rules: &[Set("type", Text("Opaque"))] },
    Row { ty: "core.v1.PersistentVolumeStatus", rules: &[Set("phase", Text("Pending"))] },
    // Not on PersistentVolumeSpec, which a VolumeAttachment holds as well.
    Row { ty: "core.v1.PersistentVolume", rules: &[Fill(persistent_volume)] },
    Row { ty: "core.v1.PersistentVolumeClaimStatus", rules: &[Set("phase", Text("Pending"))] },
    Row { ty: "core.v1.PersistentVolumeClaimSpec", rules: &[Set("volumeMode", Text("Filesystem"))] },
    Row { ty: "core.v1.Namespace", rules: &[Fill(namespace)] },
    Row { ty: "core.v1.NamespaceStatus", rules: &[Set("phase", Text("Active"))] },
    Row { ty: "core.v1.NodeStatus", rules: &[Fill(node_status)] },
    Row { ty: "core.v1.LimitRangeItem", rules: &[Fill(limit_range_item)] },
];

/// Selector and labels are those of the template.
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

/// An object without labels gets those of its template.
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
        spec.default_to("internalTrafficPolicy", "Cluster");
    }
    if kind == "LoadBalancer" {
        spec.default_to("allocateLoadBalancerNodePorts", true);
        let ingress = service.pointer_mut("/status/loadBalancer/ingress").and_then(Value::as_array_mut);
        for ingress in ingress.into_iter().flatten().filter(|ingress| !ingress.text("ip").is_empty()) {
            ingress.default_to("ipMode", "VIP");
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
            spec.set("sessionAffinityConfig", json!({"clientIP": {"timeoutSeconds": AFFINITY_SECONDS}}));
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
    spec.default_to("volumeMode", "Filesystem");
}

/// The label by which selectors can name one namespace.
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

/// For containers, the maximum is the default limit, and that or the minimum the default request.
fn limit_range_item(item: &mut Value) {
    if item.text("type") != "Container" {
        return;
    }
    for (field, from) in [("default", "max"), ("defaultRequest", "default"), ("defaultRequest", "min")] {
        let entries = item.at(from).as_object().cloned().unwrap_or_default();
        fill_absent(item, field, &entries);
    }
}
