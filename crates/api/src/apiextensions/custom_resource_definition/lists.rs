//! Validates `x-kubernetes-list-type`, `x-kubernetes-list-map-keys` and `x-kubernetes-map-type`.

use std::collections::HashSet;

use serde_json::Value;

use crate::field::{ErrorList, Path};
use crate::json::JsonExt;

fn require_type(schema: &Value, expected: &str, keyword: &str, path: &Path, errors: &mut ErrorList) {
    let kind = schema.text("type");
    let message = format!("must be {expected} if {keyword} is specified");
    if kind.is_empty() {
        errors.required(&path.child("type"), &message);
    } else if kind != expected {
        errors.invalid(&path.child("type"), kind, &message);
    }
}

pub(super) fn validate_map_type(schema: &Value, path: &Path, errors: &mut ErrorList) {
    const KEYWORD: &str = "x-kubernetes-map-type";
    let Some(kind) = schema.at(KEYWORD).as_str() else { return };
    require_type(schema, "object", KEYWORD, path, errors);
    if !matches!(kind, "atomic" | "granular") {
        errors.not_supported(&path.child(KEYWORD), kind, &["atomic", "granular"]);
    }
}

pub(super) fn validate_list_type(schema: &Value, path: &Path, errors: &mut ErrorList) {
    const KEYWORD: &str = "x-kubernetes-list-type";
    const KEYS: &str = "x-kubernetes-list-map-keys";
    let list_type = schema.at(KEYWORD).as_str();
    let item = schema.at("items");
    if list_type.is_some() {
        let before = errors.0.len();
        require_type(schema, "array", KEYWORD, path, errors);
        if errors.0.len() == before && list_type == Some("set") {
            atomic_items(item, &path.child("items"), errors);
        }
    }
    if let Some(kind) = list_type.filter(|kind| !matches!(*kind, "atomic" | "set" | "map")) {
        errors.not_supported(&path.child(KEYWORD), kind, &["atomic", "set", "map"]);
    }
    let keys = schema.items(KEYS);
    if !keys.is_empty() && list_type != Some("map") {
        const MESSAGE: &str = "must be map if x-kubernetes-list-map-keys is non-empty";
        match list_type {
            None => errors.required(&path.child(KEYWORD), MESSAGE),
            Some(kind) => errors.invalid(&path.child(KEYWORD), kind, MESSAGE),
        }
    }
    if list_type == Some("map") {
        if keys.is_empty() {
            errors.required(&path.child(KEYS), "must not be empty if x-kubernetes-list-type is map");
        }
        map_items(item, schema.at(KEYS), path, errors);
    }
    if matches!(list_type, Some("map" | "set")) && item.is_object() {
        validate_set_or_map_items(schema, item, path, errors);
    }
}

/// Items of a set are compared as a whole, so they must be atomic.
fn atomic_items(item: &Value, path: &Path, errors: &mut ErrorList) {
    const MESSAGE: &str = "must be atomic as item of a list with x-kubernetes-list-type=set";
    let (list, map) = (item.at("x-kubernetes-list-type"), item.at("x-kubernetes-map-type"));
    match item.text("type") {
        "array" if !list.is_null() && list != "atomic" => {
            errors.invalid(&path.child("x-kubernetes-list-type"), list.clone(), MESSAGE);
        }
        // Upstream prints the list type here, too.
        "object" if map != "atomic" => {
            errors.invalid(&path.child("x-kubernetes-map-type"), list.clone(), MESSAGE);
        }
        _ => {}
    }
}

fn map_items(item: &Value, keys: &Value, path: &Path, errors: &mut ErrorList) {
    let at_items = path.child("items");
    if item.is_null() {
        errors.required(&at_items, "must have a schema if x-kubernetes-list-type is map");
        return;
    }
    if item.is_array() {
        let message = "must only have a single schema if x-kubernetes-list-type is map";
        errors.invalid(&at_items, item.clone(), message);
        return;
    }
    if item.text("type") != "object" {
        let message = "must be object if parent array's x-kubernetes-list-type is map";
        errors.invalid(&at_items.child("type"), item.text("type"), message);
        return;
    }
    let at_keys = path.child("x-kubernetes-list-map-keys");
    let list = keys.as_array().map_or(&[][..], Vec::as_slice);
    let mut seen = HashSet::new();
    // Each error message contains the whole list, so report each kind of error only once.
    let (mut unknown, mut twice) = (false, false);
    for key in list {
        let name = key.as_str().unwrap_or("");
        let property = item.at("properties").at(name);
        if property.is_null() {
            if !unknown {
                errors.invalid(&at_keys, keys.clone(), "entries must all be names of item properties");
            }
            unknown = true;
        } else if matches!(property.text("type"), "array" | "object") {
            let path = at_items.child("properties").key(name).child("type");
            let message = "must be a scalar type if parent array's x-kubernetes-list-type is map";
            errors.invalid(&path, item.text("type"), message);
        }
        if !seen.insert(name) && !twice {
            errors.invalid(&at_keys, keys.clone(), "must not contain duplicate entries");
            twice = true;
        }
    }
}

/// Items of sets and maps must not be nullable, and the keys of a map must be required or have a default.
fn validate_set_or_map_items(schema: &Value, item: &Value, path: &Path, errors: &mut ErrorList) {
    let kind = schema.text("x-kubernetes-list-type");
    let path = path.child("items");
    if item.flag("nullable") {
        let message = format!("cannot be nullable when x-kubernetes-list-type is {kind}");
        errors.forbidden(&path.child("nullable"), &message);
    }
    if kind != "map" {
        return;
    }
    let required: HashSet<&str> = item.items("required").iter().filter_map(Value::as_str).collect();
    for key in schema.items("x-kubernetes-list-map-keys") {
        let name = key.as_str().unwrap_or("");
        let property = item.at("properties").at(name);
        if property.is_null() {
            continue;
        }
        let path = path.child("properties").key(name);
        if !required.contains(name) && !property.has("default") {
            errors.required(
                &path.child("default"),
                "this property is in x-kubernetes-list-map-keys, so it must have a default or be a required property",
            );
        }
        if property.flag("nullable") {
            errors.forbidden(
                &path.child("nullable"),
                "this property is in x-kubernetes-list-map-keys, so it cannot be nullable",
            );
        }
    }
}
