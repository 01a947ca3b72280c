//! ResourceClaim: devices asked for, and once allocated which ones and for whom.

use std::collections::HashSet;

use serde_json::Value;

use super::claim::{RequestNames, request_reference, request_references, spec};
use super::{
    MAX_CONFIG, binding_conditions, configuration, driver, each, each_once, label, own_text, pool,
    raw_object, uid,
};
use crate::core::pod::node_selector;
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::kind::Kind;
use crate::{meta, names};

const MAX_RESERVED_FOR: usize = 256;
const MAX_RESULTS: usize = 32;
const MAX_CONDITIONS: usize = 8;
const MAX_DATA: usize = 10 * 1024;
const MAX_IPS: usize = 16;

pub struct ResourceClaim;

impl Kind for ResourceClaim {
    fn validate(&self, obj: &Value, errors: &mut Errors) {
        spec(obj.at("spec"), &Path::new("spec"), errors);
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut Errors) {
        // The only thing to say about a spec that differs is that it may not.
        errors.0.retain(|complaint| !complaint.path.as_str().starts_with("spec"));
        meta::immutable(new.at("spec"), old.at("spec"), &Path::new("spec"), errors);
    }

    fn validate_status(&self, new: &Value, old: &Value, errors: &mut Errors) {
        let known = RequestNames::of(new.path("spec.devices"));
        let (status, before, path) = (new.at("status"), old.at("status"), Path::new("status"));
        let reserved = status.items("reservedFor");
        let at_reserved = path.at("reservedFor");
        let by_uid = |item: &Value| item.text("uid").to_owned();
        each_once(reserved, MAX_RESERVED_FOR, &at_reserved, errors, consumer, by_uid);

        let allocation = status.at("allocation");
        let results = allocation.at("devices").items("results");
        let allocated: HashSet<String> = results.iter().map(device_id).collect();
        let check = |item: &Value, path: &Path, errors: &mut Errors| {
            device_status(item, &allocated, path, errors);
        };
        each_once(status.items("devices"), usize::MAX, &path.at("devices"), errors, check, device_id);

        let deleting = new.at("metadata").has("deletionTimestamp");
        if !reserved.is_empty() && allocation.is_null() {
            errors.forbidden(&at_reserved, "may not be specified when `allocated` is not set");
        } else if deleting && reserved.iter().any(|item| !before.items("reservedFor").contains(item)) {
            errors.forbidden(
                &at_reserved,
                "new entries may not be added while `deallocationRequested` or `deletionTimestamp` are set",
            );
        }
        let path = path.at("allocation");
        if !allocation.is_null() && before.has("allocation") {
            meta::immutable(allocation, before.at("allocation"), &path, errors);
        } else if !allocation.is_null() {
            allocation_result(allocation, &known, &path, errors);
        }
    }
}

/// Before an update through `/status`: what is told of devices that are no longer allocated is dropped.
pub fn prepare_status(new: &mut Value, old: &Value) {
    let ids = |claim: &Value| -> HashSet<String> {
        claim.path("status.allocation.devices").items("results").iter().map(device_id).collect()
    };
    let (now, before) = (ids(new), ids(old));
    if let Some(devices) = new.pointer_mut("/status/devices").and_then(Value::as_array_mut) {
        devices.retain(|device| {
            let id = device_id(device);
            now.contains(&id) || !before.contains(&id)
        });
    }
}

fn device_id(device: &Value) -> String {
    let id = ["driver", "pool", "device"].map(|field| device.text(field)).join("/");
    match device.text("shareID") {
        "" => id,
        share => format!("{id}/{share}"),
    }
}

fn consumer(consumer: &Value, path: &Path, errors: &mut Errors) {
    for field in ["resource", "name", "uid"] {
        if consumer.text(field).is_empty() {
            errors.required(&path.at(field), "");
        }
    }
}

/// Which device it is.
fn device_names(device: &Value, path: &Path, errors: &mut Errors) {
    driver(device.text("driver"), &path.at("driver"), errors);
    pool(device.text("pool"), &path.at("pool"), errors);
    label(device.text("device"), &path.at("device"), errors);
}

fn allocation_result(allocation: &Value, known: &RequestNames, path: &Path, errors: &mut Errors) {
    let (devices, at) = (allocation.at("devices"), path.at("devices"));
    each(devices.items("results"), MAX_RESULTS, &at.at("results"), errors, |result, path, errors| {
        request_reference(result.text("request"), known, &path.at("request"), errors);
        device_names(result, path, errors);
        binding_conditions(result, path, errors);
        if let Some(share) = result.at("shareID").as_str() {
            uid(share, &path.at("shareID"), errors);
        }
    });
    each(devices.items("config"), 2 * MAX_CONFIG, &at.at("config"), errors, |config, path, errors| {
        match config.text("source") {
            "FromClaim" | "FromClass" => {}
            "" => errors.required(&path.at("source"), ""),
            other => errors.not_supported(&path.at("source"), other, &["FromClaim", "FromClass"]),
        }
        request_references(config, known, path, errors);
        configuration(config, path, errors);
    });
    if allocation.has("nodeSelector") {
        node_selector(errors, allocation.at("nodeSelector"), &path.at("nodeSelector"));
    }
}

fn device_status(device: &Value, allocated: &HashSet<String>, path: &Path, errors: &mut Errors) {
    device_names(device, path, errors);
    if let Some(share) = device.at("shareID").as_str() {
        uid(share, &path.at("shareID"), errors);
    }
    let id = device_id(device);
    if !allocated.contains(&id) {
        errors.invalid(path, id, "must be an allocated device in the claim");
    }
    let conditions = device.items("conditions");
    if conditions.len() > MAX_CONDITIONS {
        errors.too_many(&path.at("conditions"), conditions.len(), MAX_CONDITIONS);
    }
    meta::conditions(device.at("conditions"), &path.at("conditions"), errors);
    if device.has("data") {
        raw_object(device.at("data"), MAX_DATA, &path.at("data"), errors);
    }
    let (network, path) = (device.at("networkData"), path.at("networkData"));
    for (field, max) in [("interfaceName", 256), ("hardwareAddress", 128)] {
        if network.text(field).len() > max {
            errors.too_long(&path.at(field), max);
        }
    }
    let address = |item: &Value, path: &Path, errors: &mut Errors| {
        let text = item.as_str().unwrap_or("");
        errors.invalid_each(path, text, names::interface_address(text));
    };
    each_once(network.items("ips"), MAX_IPS, &path.at("ips"), errors, address, own_text);
}
