//! ResourceSlice: the devices of a driver on one or several nodes.

use std::collections::HashMap;

use serde_json::Value;

use super::device::{validate_counters, validate_device};
use super::{validate_driver, validate_label, validate_pool, validate_unique_list};
use crate::core::pod::validate_node_selector;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::strategy::RestStrategy;
use crate::{meta, names};

const MAX_DEVICES: usize = 128;
/// The limit with taints or shared counters, which make devices larger and allocation slower.
const MAX_DEVICES_WITH_TAINTS_OR_COUNTERS: usize = 64;
const MAX_COUNTER_SETS: usize = 8;

pub struct ResourceSlice;

impl RestStrategy for ResourceSlice {
    fn prepare(&self, new: &mut Value) {
        drop_disabled_fields(new);
    }

    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        validate_slice_spec(obj.at("spec"), None, errors);
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        // Validates the spec again with the old object, in upstream's order.
        errors.0.retain(|error| !error.path.as_str().starts_with("spec"));
        validate_slice_spec(new.at("spec"), Some(old.at("spec")), errors);
    }

    fn selectable_fields(&self, obj: &Value) -> Vec<(&'static str, String)> {
        let spec = obj.at("spec");
        vec![
            ("spec.nodeName", spec.text("nodeName").to_owned()),
            ("spec.driver", spec.text("driver").to_owned()),
        ]
    }

    fn warnings(&self, new: &Value, _old: Option<&Value>) -> Vec<String> {
        let driver = new.at("spec").text("driver");
        if driver == driver.to_lowercase() {
            return Vec::new();
        }
        vec![format!(
            "spec.driver: driver names should be lowercase; {driver:?} contains uppercase characters"
        )]
    }
}

/// Sets `timeAdded` of device taints. `now` is an RFC 3339 time. Called together with the other defaults.
pub fn set_taint_time(slice: &mut Value, now: &str) {
    let devices = slice.pointer_mut("/spec/devices").and_then(Value::as_array_mut);
    for device in devices.into_iter().flatten() {
        let taints = device.get_mut("taints").and_then(Value::as_array_mut);
        taints.into_iter().flatten().for_each(|taint| taint.set_default("timeAdded", now));
    }
}

/// Drops the fields of disabled features.
fn drop_disabled_fields(slice: &mut Value) {
    let devices = slice.pointer_mut("/spec/devices").and_then(Value::as_array_mut);
    for device in devices.into_iter().flatten().filter_map(Value::as_object_mut) {
        device.remove("nodeAllocatableResourceMappings");
        let attributes = device.get_mut("attributes").and_then(Value::as_object_mut);
        for attribute in attributes.into_iter().flat_map(|map| map.values_mut()) {
            if let Some(attribute) = attribute.as_object_mut() {
                ["bools", "ints", "strings", "versions"].iter().for_each(|list| {
                    attribute.remove(*list);
                });
            }
        }
    }
}

fn validate_slice_spec(spec: &Value, old: Option<&Value>, errors: &mut ErrorList) {
    let path = Path::new("spec");
    validate_driver(spec.text("driver"), &path.child("driver"), errors);
    let (pool, at_pool) = (spec.at("pool"), path.child("pool"));
    validate_pool(pool.text("name"), &at_pool.child("name"), errors);
    let count = pool.int("resourceSliceCount").unwrap_or(0);
    if count <= 0 {
        errors.invalid(&at_pool.child("resourceSliceCount"), count, "must be greater than zero");
    }
    if let Some(generation) = pool.int("generation").filter(|generation| *generation < 0) {
        let message = "must be greater than or equal to zero";
        errors.invalid(&at_pool.child("generation"), generation, message);
    }
    if let Some(old) = old {
        for field in ["pool.name", "driver", "nodeName"] {
            meta::validate_immutable(spec.path(field), old.path(field), &path.child(field), errors);
        }
    }
    validate_node_selection(spec, &path, errors);
    if spec.has("sharedCounters") && spec.has("devices") {
        errors.invalid(&path, "", "only one of `sharedCounters` or `devices` is allowed");
    }

    let devices = spec.items("devices");
    let has_taints_or_counters =
        |device: &Value| !device.items("taints").is_empty() || !device.items("consumesCounters").is_empty();
    let max = if devices.iter().any(has_taints_or_counters) {
        MAX_DEVICES_WITH_TAINTS_OR_COUNTERS
    } else {
        MAX_DEVICES
    };
    let before: HashMap<&str, &Value> = old
        .map_or(&[][..], |old| old.items("devices"))
        .iter()
        .map(|device| (device.text("name"), device))
        .collect();
    let check = |item: &Value, path: &Path, errors: &mut ErrorList| {
        let before = before.get(item.text("name")).copied();
        validate_device(item, before, spec.flag("perDeviceNodeSelection"), path, errors);
    };
    let name = |item: &Value| item.text("name").to_owned();
    validate_unique_list(devices, max, &path.child("devices"), errors, check, name);
    let sets = spec.items("sharedCounters");
    validate_unique_list(
        sets,
        MAX_COUNTER_SETS,
        &path.child("sharedCounters"),
        errors,
        validate_counter_set,
        name,
    );
}

fn validate_counter_set(set: &Value, path: &Path, errors: &mut ErrorList) {
    let name = set.text("name");
    if name.is_empty() {
        errors.required(&path.child("name"), "");
    } else {
        validate_label(name, &path.child("name"), errors);
    }
    validate_counters(set, path, errors);
}

/// Validates the node selection of a slice: one of four alternatives.
fn validate_node_selection(spec: &Value, path: &Path, errors: &mut ErrorList) {
    const EXACTLY_ONE_REQUIRED: &str =
        "exactly one of `nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection` is required";
    let mut specified = Vec::new();
    if let Some(name) = spec.at("nodeName").as_str() {
        let path = path.child("nodeName");
        if name.is_empty() {
            errors.invalid(&path, name, "must be either unset or set to a non-empty string");
        } else {
            specified.push("`nodeName`");
            errors.invalid_each(&path, name, names::dns1123_subdomain(name));
        }
    }
    if spec.has("nodeSelector") {
        specified.push("`nodeSelector`");
        let (selector, path) = (spec.at("nodeSelector"), path.child("nodeSelector"));
        validate_node_selector(errors, selector, &path);
        if selector.items("nodeSelectorTerms").len() != 1 {
            let terms = selector.at("nodeSelectorTerms").clone();
            let message = "must have exactly one node selector term";
            errors.invalid(&path.child("nodeSelectorTerms"), terms, message);
        }
    }
    for (field, shown) in [("allNodes", "`allNodes`"), ("perDeviceNodeSelection", "`perDeviceNodeSelection`")]
    {
        match spec.at(field) {
            Value::Bool(true) => specified.push(shown),
            Value::Bool(false) => {
                errors.invalid(&path.child(field), false, "must be either unset or set to true");
            }
            _ => {}
        }
    }
    match specified.len() {
        0 => errors.required(path, EXACTLY_ONE_REQUIRED),
        1 => {}
        _ => {
            let message = format!("{EXACTLY_ONE_REQUIRED}, but multiple fields are set");
            errors.invalid(path, format!("{{{}}}", specified.join(", ")), &message);
        }
    }
}
