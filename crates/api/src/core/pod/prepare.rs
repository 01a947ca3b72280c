//! Prepares a pod before validation: sets the initial status and drops fields of disabled features.

use serde_json::{Value, json};

use super::qos::qos_class;
use super::security;
use crate::json::JsonExt;

/// Sets the initial status: pending, with the QoS class.
pub(super) fn prepare_for_create(pod: &mut Value) {
    let mut status = json!({"phase": "Pending", "qosClass": qos_class(pod)});
    if !pod.at("spec").items("schedulingGates").is_empty() {
        status["conditions"] = json!([{
            "type": "PodScheduled",
            "status": "False",
            "reason": "SchedulingGated",
            "message": "Scheduling is blocked due to non-empty scheduling gates",
            "lastProbeTime": null,
            "lastTransitionTime": pod.path("metadata.creationTimestamp"),
        }]);
    }
    if let Some(pod) = pod.as_object_mut() {
        pod.insert("status".to_owned(), status);
    }
    if let Some(spec) = pod.get_mut("spec") {
        drop_disabled_fields(spec);
    }
    merge_label_keys(pod);
    sync_app_armor(pod);
}

/// Drops the fields of features that are off by default upstream.
pub(crate) fn drop_disabled_fields(spec: &mut Value) {
    let Some(fields) = spec.as_object_mut() else { return };
    fields.remove("schedulingGroup");
    for list in ["initContainers", "containers", "ephemeralContainers"] {
        for container in list_mut(spec, list) {
            if let Some(lifecycle) = container.get_mut("lifecycle").and_then(Value::as_object_mut) {
                lifecycle.remove("stopSignal");
            }
        }
    }
    for volume in list_mut(spec, "volumes") {
        let Some(projected) = volume.get_mut("projected") else { continue };
        for source in list_mut(projected, "sources") {
            if let Some(source) = source.as_object_mut() {
                source.remove("clusterTrustBundle");
                source.remove("podCertificate");
            }
        }
    }
}

fn list_mut<'a>(object: &'a mut Value, field: &str) -> impl Iterator<Item = &'a mut Value> {
    object.get_mut(field).and_then(Value::as_array_mut).into_iter().flatten()
}

/// Merges `matchLabelKeys` and `mismatchLabelKeys` into the label selectors.
fn merge_label_keys(pod: &mut Value) {
    let labels = pod.path("metadata.labels").clone();
    let Some(spec) = pod.get_mut("spec") else { return };
    for side in ["podAffinity", "podAntiAffinity"] {
        let Some(rules) = spec.get_mut("affinity").and_then(|affinity| affinity.get_mut(side)) else {
            continue;
        };
        for term in list_mut(rules, "preferredDuringSchedulingIgnoredDuringExecution") {
            if let Some(term) = term.get_mut("podAffinityTerm") {
                merge_keys(term, &labels);
            }
        }
        for term in list_mut(rules, "requiredDuringSchedulingIgnoredDuringExecution") {
            merge_keys(term, &labels);
        }
    }
    for constraint in list_mut(spec, "topologySpreadConstraints") {
        merge_keys(constraint, &labels);
    }
}

fn merge_keys(term: &mut Value, labels: &Value) {
    if !term.has("labelSelector") {
        return;
    }
    let mut expressions = Vec::new();
    for (field, operator) in [("matchLabelKeys", "In"), ("mismatchLabelKeys", "NotIn")] {
        for key in term.items(field).iter().filter_map(Value::as_str) {
            if let Some(value) = labels.get(key) {
                expressions.push(json!({"key": key, "operator": operator, "values": [value]}));
            }
        }
    }
    if expressions.is_empty() {
        return;
    }
    let all = term.object_mut("labelSelector").entry("matchExpressions").or_insert(Value::Null);
    if !all.is_array() {
        *all = Value::Array(Vec::new());
    }
    if let Some(all) = all.as_array_mut() {
        all.extend(expressions);
    }
}

/// Sets AppArmor fields from the legacy annotations.
fn sync_app_armor(pod: &mut Value) {
    if pod.path("spec.os").text("name") == "windows" {
        return;
    }
    let own = pod.path("spec.securityContext.appArmorProfile").clone();
    let annotations = pod.path("metadata.annotations").clone();
    let Some(spec) = pod.get_mut("spec") else { return };
    for list in ["initContainers", "containers", "ephemeralContainers"] {
        for container in list_mut(spec, list) {
            let key = security::app_armor_annotation(container);
            if container.path("securityContext.appArmorProfile").is_null()
                && let Some(annotation_value) = annotations.get(&key).and_then(Value::as_str)
                && let Some(profile) =
                    app_armor_from_annotation(annotation_value).filter(|profile| *profile != own)
            {
                container.object_mut("securityContext").insert("appArmorProfile".to_owned(), profile);
            }
        }
    }
}

/// The AppArmor profile of an annotation value; `None` for an unknown value.
pub(super) fn app_armor_from_annotation(annotation_value: &str) -> Option<Value> {
    match annotation_value {
        "unconfined" => Some(json!({"type": "Unconfined"})),
        "runtime/default" => Some(json!({"type": "RuntimeDefault"})),
        _ => {
            let local = annotation_value.strip_prefix("localhost/")?;
            let is_valid = !local.is_empty() && local.trim() == local && local.len() <= 4095;
            is_valid.then(|| json!({"type": "Localhost", "localhostProfile": local}))
        }
    }
}
