//! ResourceClaim: REST strategy and validation.

use std::collections::HashSet;

use serde_json::Value;

use super::claim::{
    RequestNames, validate_claim_spec, validate_request_reference, validate_request_references,
};
use super::{
    MAX_CONFIGS, string_value, validate_binding_conditions, validate_configuration, validate_driver,
    validate_label, validate_list, validate_pool, validate_raw_object, validate_uid, validate_unique_list,
};
use crate::core::pod::validate_node_selector;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::strategy::RestStrategy;
use crate::{meta, names};

const MAX_RESERVED_FOR: usize = 256;
const MAX_RESULTS: usize = 32;
const MAX_CONDITIONS: usize = 8;
const MAX_DATA_BYTES: usize = 10 * 1024;
const MAX_IPS: usize = 16;

pub struct ResourceClaim;

impl RestStrategy for ResourceClaim {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        validate_claim_spec(obj.at("spec"), &Path::new("spec"), errors);
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        // The spec is immutable, so the only error about a changed spec is that it changed.
        errors.0.retain(|error| !error.path.as_str().starts_with("spec"));
        meta::validate_immutable(new.at("spec"), old.at("spec"), &Path::new("spec"), errors);
    }

    fn validate_status_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        let known = RequestNames::from_devices(new.path("spec.devices"));
        let (status, before, path) = (new.at("status"), old.at("status"), Path::new("status"));
        let reserved = status.items("reservedFor");
        let at_reserved = path.child("reservedFor");
        let by_uid = |item: &Value| item.text("uid").to_owned();
        validate_unique_list(reserved, MAX_RESERVED_FOR, &at_reserved, errors, validate_consumer, by_uid);

        let allocation = status.at("allocation");
        let results = allocation.at("devices").items("results");
        let allocated: HashSet<String> = results.iter().map(device_id).collect();
        let check = |item: &Value, path: &Path, errors: &mut ErrorList| {
            validate_device_status(item, &allocated, path, errors);
        };
        validate_unique_list(
            status.items("devices"),
            usize::MAX,
            &path.child("devices"),
            errors,
            check,
            device_id,
        );

        let deleting = new.at("metadata").has("deletionTimestamp");
        if !reserved.is_empty() && allocation.is_null() {
            errors.forbidden(&at_reserved, "may not be specified when `allocated` is not set");
        } else if deleting && reserved.iter().any(|item| !before.items("reservedFor").contains(item)) {
            errors.forbidden(
                &at_reserved,
                "new entries may not be added while `deallocationRequested` or `deletionTimestamp` are set",
            );
        }
        let path = path.child("allocation");
        if !allocation.is_null() && before.has("allocation") {
            meta::validate_immutable(allocation, before.at("allocation"), &path, errors);
        } else if !allocation.is_null() {
            validate_allocation_result(allocation, &known, &path, errors);
        }
    }
}

/// Prepares an update through `/status`: drops the status of devices that are no longer allocated.
pub fn prepare_status(new: &mut Value, old: &Value) {
    let ids = |claim: &Value| -> HashSet<String> {
        claim.path("status.allocation.devices").items("results").iter().map(device_id).collect()
    };
    let (new_ids, old_ids) = (ids(new), ids(old));
    if let Some(devices) = new.pointer_mut("/status/devices").and_then(Value::as_array_mut) {
        devices.retain(|device| {
            let id = device_id(device);
            new_ids.contains(&id) || !old_ids.contains(&id)
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

fn validate_consumer(consumer: &Value, path: &Path, errors: &mut ErrorList) {
    for field in ["resource", "name", "uid"] {
        if consumer.text(field).is_empty() {
            errors.required(&path.child(field), "");
        }
    }
}

/// Validates driver, pool and device name.
fn validate_device_names(device: &Value, path: &Path, errors: &mut ErrorList) {
    validate_driver(device.text("driver"), &path.child("driver"), errors);
    validate_pool(device.text("pool"), &path.child("pool"), errors);
    validate_label(device.text("device"), &path.child("device"), errors);
}

fn validate_allocation_result(allocation: &Value, known: &RequestNames, path: &Path, errors: &mut ErrorList) {
    let (devices, at) = (allocation.at("devices"), path.child("devices"));
    validate_list(
        devices.items("results"),
        MAX_RESULTS,
        &at.child("results"),
        errors,
        |result, path, errors| {
            validate_request_reference(result.text("request"), known, &path.child("request"), errors);
            validate_device_names(result, path, errors);
            validate_binding_conditions(result, path, errors);
            if let Some(share) = result.at("shareID").as_str() {
                validate_uid(share, &path.child("shareID"), errors);
            }
        },
    );
    validate_list(
        devices.items("config"),
        2 * MAX_CONFIGS,
        &at.child("config"),
        errors,
        |config, path, errors| {
            match config.text("source") {
                "FromClaim" | "FromClass" => {}
                "" => errors.required(&path.child("source"), ""),
                other => errors.not_supported(&path.child("source"), other, &["FromClaim", "FromClass"]),
            }
            validate_request_references(config, known, path, errors);
            validate_configuration(config, path, errors);
        },
    );
    if allocation.has("nodeSelector") {
        validate_node_selector(errors, allocation.at("nodeSelector"), &path.child("nodeSelector"));
    }
}

fn validate_device_status(device: &Value, allocated: &HashSet<String>, path: &Path, errors: &mut ErrorList) {
    validate_device_names(device, path, errors);
    if let Some(share) = device.at("shareID").as_str() {
        validate_uid(share, &path.child("shareID"), errors);
    }
    let id = device_id(device);
    if !allocated.contains(&id) {
        errors.invalid(path, id, "must be an allocated device in the claim");
    }
    let conditions = device.items("conditions");
    if conditions.len() > MAX_CONDITIONS {
        errors.too_many(&path.child("conditions"), conditions.len(), MAX_CONDITIONS);
    }
    meta::validate_conditions(device.at("conditions"), &path.child("conditions"), errors);
    if device.has("data") {
        validate_raw_object(device.at("data"), MAX_DATA_BYTES, &path.child("data"), errors);
    }
    let (network, path) = (device.at("networkData"), path.child("networkData"));
    for (field, max) in [("interfaceName", 256), ("hardwareAddress", 128)] {
        if network.text(field).len() > max {
            errors.too_long(&path.child(field), max);
        }
    }
    let address = |item: &Value, path: &Path, errors: &mut ErrorList| {
        let text = item.as_str().unwrap_or("");
        errors.invalid_each(path, text, names::interface_address(text));
    };
    validate_unique_list(network.items("ips"), MAX_IPS, &path.child("ips"), errors, address, string_value);
}
