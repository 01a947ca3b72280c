//! The `scale` subresource of built-in workloads.

use serde_json::{Value, json};

use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::meta;
use crate::selector::LabelSelector;
use crate::strategy::NameFormat;

/// The `autoscaling/v1` Scale of a Deployment, ReplicaSet, StatefulSet or ReplicationController.
pub fn scale_of(object: &Value) -> Value {
    let meta = object.at("metadata");
    let mut scale = json!({"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": {}});
    for field in ["name", "namespace", "uid", "resourceVersion", "creationTimestamp"] {
        if meta.has(field) {
            scale["metadata"].set(field, meta.at(field).clone());
        }
    }
    let replicas = |value: &Value| value.int("replicas").unwrap_or(0);
    scale.set("spec", json!({}));
    if replicas(object.at("spec")) != 0 {
        scale["spec"].set("replicas", replicas(object.at("spec")));
    }
    scale.set("status", json!({"replicas": replicas(object.at("status"))}));
    let selector = selector(object.path("spec.selector")).to_string();
    if !selector.is_empty() {
        scale["status"].set("selector", selector);
    }
    scale
}

/// The selector of a ReplicationController is a plain map of labels.
fn selector(selector: &Value) -> LabelSelector {
    let plain = selector.as_object().is_some_and(|map| map.values().all(Value::is_string));
    if plain {
        LabelSelector::from_set(selector)
    } else {
        LabelSelector::from_value(selector).unwrap_or_default()
    }
}

/// Sets the replicas of a workload from a Scale. Other fields are not changed.
pub fn apply_scale(object: &mut Value, scale: &Value) {
    let replicas = scale.path("spec.replicas").as_i64().unwrap_or(0);
    object.object_mut("spec").insert("replicas".to_owned(), replicas.into());
}

/// Validates a Scale sent by a client.
pub fn validate_scale(scale: &Value, errors: &mut ErrorList) {
    meta::validate_object_meta(
        scale.at("metadata"),
        true,
        NameFormat::Subdomain,
        &Path::new("metadata"),
        errors,
    );
    meta::validate_non_negative(scale.path("spec.replicas"), &Path::new("spec.replicas"), errors);
}
