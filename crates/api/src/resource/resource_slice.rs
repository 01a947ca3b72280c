//! ResourceSlice: the devices a driver offers, on one node or several.

use std::collections::HashMap;

use serde_json::Value;

use super::device::{counters, device};
use super::{driver, each_once, label, pool};
use crate::core::pod::node_selector;
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::kind::Kind;
use crate::{meta, names};

const MAX_DEVICES: usize = 128;
/// With taints or shared counters, which make a device larger and allocation slower.
const MAX_ELABORATE_DEVICES: usize = 64;
const MAX_COUNTER_SETS: usize = 8;

pub struct ResourceSlice;

impl Kind for ResourceSlice {
    fn prepare(&self, new: &mut Value) {
        drop_disabled(new);
    }

    fn validate(&self, obj: &Value, errors: &mut Errors) {
        spec(obj.at("spec"), None, errors);
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut Errors) {
        // Once more, with an eye on what the stored object already had, in upstream's order.
        errors.0.retain(|complaint| !complaint.path.as_str().starts_with("spec"));
        spec(new.at("spec"), Some(old.at("spec")), errors);
    }

    fn selectable(&self, obj: &Value) -> Vec<(&'static str, String)> {
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

/// Taints are dated; `now` is an RFC 3339 time, for those that are not. To be called with the other defaults.
pub fn stamp_taints(slice: &mut Value, now: &str) {
    let devices = slice.pointer_mut("/spec/devices").and_then(Value::as_array_mut);
    for device in devices.into_iter().flatten() {
        let taints = device.get_mut("taints").and_then(Value::as_array_mut);
        taints.into_iter().flatten().for_each(|taint| taint.default_to("timeAdded", now));
    }
}

/// Fields of features that are off.
fn drop_disabled(slice: &mut Value) {
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

fn spec(spec: &Value, old: Option<&Value>, errors: &mut Errors) {
    let path = Path::new("spec");
    driver(spec.text("driver"), &path.at("driver"), errors);
    let (in_pool, at_pool) = (spec.at("pool"), path.at("pool"));
    pool(in_pool.text("name"), &at_pool.at("name"), errors);
    let count = in_pool.int("resourceSliceCount").unwrap_or(0);
    if count <= 0 {
        errors.invalid(&at_pool.at("resourceSliceCount"), count, "must be greater than zero");
    }
    if let Some(generation) = in_pool.int("generation").filter(|generation| *generation < 0) {
        let message = "must be greater than or equal to zero";
        errors.invalid(&at_pool.at("generation"), generation, message);
    }
    if let Some(old) = old {
        for field in ["pool.name", "driver", "nodeName"] {
            meta::immutable(spec.path(field), old.path(field), &path.at(field), errors);
        }
    }
    nodes(spec, &path, errors);
    if spec.has("sharedCounters") && spec.has("devices") {
        errors.invalid(&path, "", "only one of `sharedCounters` or `devices` is allowed");
    }

    let devices = spec.items("devices");
    let elaborate =
        |device: &Value| !device.items("taints").is_empty() || !device.items("consumesCounters").is_empty();
    let max = if devices.iter().any(elaborate) { MAX_ELABORATE_DEVICES } else { MAX_DEVICES };
    let before: HashMap<&str, &Value> = old
        .map_or(&[][..], |old| old.items("devices"))
        .iter()
        .map(|device| (device.text("name"), device))
        .collect();
    let check = |item: &Value, path: &Path, errors: &mut Errors| {
        let before = before.get(item.text("name")).copied();
        device(item, before, spec.flag("perDeviceNodeSelection"), path, errors);
    };
    let name = |item: &Value| item.text("name").to_owned();
    each_once(devices, max, &path.at("devices"), errors, check, name);
    let sets = spec.items("sharedCounters");
    each_once(sets, MAX_COUNTER_SETS, &path.at("sharedCounters"), errors, counter_set, name);
}

fn counter_set(set: &Value, path: &Path, errors: &mut Errors) {
    let name = set.text("name");
    if name.is_empty() {
        errors.required(&path.at("name"), "");
    } else {
        label(name, &path.at("name"), errors);
    }
    counters(set, path, errors);
}

/// On which nodes the devices are: said in one of four ways.
fn nodes(spec: &Value, path: &Path, errors: &mut Errors) {
    const ONE_OF: &str =
        "exactly one of `nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection` is required";
    let mut said = Vec::new();
    if let Some(name) = spec.at("nodeName").as_str() {
        let path = path.at("nodeName");
        if name.is_empty() {
            errors.invalid(&path, name, "must be either unset or set to a non-empty string");
        } else {
            said.push("`nodeName`");
            errors.invalid_each(&path, name, names::dns1123_subdomain(name));
        }
    }
    if spec.has("nodeSelector") {
        said.push("`nodeSelector`");
        let (selector, path) = (spec.at("nodeSelector"), path.at("nodeSelector"));
        node_selector(errors, selector, &path);
        if selector.items("nodeSelectorTerms").len() != 1 {
            let terms = selector.at("nodeSelectorTerms").clone();
            let message = "must have exactly one node selector term";
            errors.invalid(&path.at("nodeSelectorTerms"), terms, message);
        }
    }
    for (field, shown) in [("allNodes", "`allNodes`"), ("perDeviceNodeSelection", "`perDeviceNodeSelection`")]
    {
        match spec.at(field) {
            Value::Bool(true) => said.push(shown),
            Value::Bool(false) => {
                errors.invalid(&path.at(field), false, "must be either unset or set to true");
            }
            _ => {}
        }
    }
    match said.len() {
        0 => errors.required(path, ONE_OF),
        1 => {}
        _ => {
            let message = format!("{ONE_OF}, but multiple fields are set");
            errors.invalid(path, format!("{{{}}}", said.join(", ")), &message);
        }
    }
}
