//! Validates downward API and projected volumes.

use std::collections::BTreeSet;

use serde_json::Value;

use super::env::{VOLUME_FIELDS, validate_field_ref, validate_resource_field_ref};
use super::rules::{required, validate_file_mode, validate_non_reserved_path};
use super::volumes::validate_key_to_path;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;

const CONFLICT: &str = "conflicting duplicate paths";

pub(super) fn validate_downward_api(e: &mut ErrorList, source: &Value, path: &Path) {
    validate_file_mode(e, source, path, "defaultMode");
    for file in source.items("items") {
        downward_file(e, file, path);
    }
}

fn downward_file(e: &mut ErrorList, file: &Value, path: &Path) {
    required(e, file, path, "path");
    validate_non_reserved_path(e, &path.child("path"), file.text("path"));
    match (file.has("fieldRef"), file.has("resourceFieldRef")) {
        (true, has_resource_field_ref) => {
            validate_field_ref(e, file.at("fieldRef"), &path.child("fieldRef"), VOLUME_FIELDS);
            if has_resource_field_ref {
                let message = "fieldRef and resourceFieldRef can not be specified simultaneously";
                e.invalid(path, "resource", message);
            }
        }
        (false, true) => {
            validate_resource_field_ref(
                e,
                file.at("resourceFieldRef"),
                &path.child("resourceFieldRef"),
                true,
            );
        }
        (false, false) => e.required(path, "one of fieldRef and resourceFieldRef is required"),
    }
    validate_file_mode(e, file, path, "mode");
}

/// Validates a projected volume. Sources for cluster trust bundles and pod certificates have been
/// dropped before (see [`prepare`](super::prepare)).
pub(super) fn validate_projected(e: &mut ErrorList, volume: &Value, path: &Path) {
    validate_file_mode(e, volume, path, "defaultMode");
    let mut taken: BTreeSet<&str> = BTreeSet::new();
    for (i, source) in volume.items("sources").iter().enumerate() {
        let at = path.child("sources").index(i);
        let mut count = 0;
        for field in ["secret", "configMap"] {
            let from = source.at(field);
            if from.is_null() {
                continue;
            }
            count += 1;
            required(e, from, &at.child(field), "name");
            for (j, item) in from.items("items").iter().enumerate() {
                validate_key_to_path(e, item, &at.child(field).child("items").index(j));
                let target = item.text("path");
                if !target.is_empty() && !taken.insert(target) {
                    e.invalid(path, from.text("name"), CONFLICT);
                }
            }
        }
        if source.has("downwardAPI") {
            count += 1;
            for file in source.at("downwardAPI").items("items") {
                downward_file(e, file, &at.child("downwardAPI"));
                let target = file.text("path");
                if !target.is_empty() && !taken.insert(target) {
                    e.invalid(path, target, CONFLICT);
                }
            }
        }
        if source.has("serviceAccountToken") {
            count += 1;
            validate_token(e, source.at("serviceAccountToken"), &at.child("serviceAccountToken"), path);
        }
        if count > 1 {
            e.forbidden(&at, "may not specify more than 1 volume type per source");
        }
    }
}

fn validate_token(e: &mut ErrorList, token: &Value, path: &Path, volume: &Path) {
    let seconds = token.int("expirationSeconds").unwrap_or(0);
    if seconds < 600 {
        let message = "may not specify a duration less than 10 minutes";
        e.invalid(&path.child("expirationSeconds"), seconds, message);
    }
    if seconds > 1 << 32 {
        let message = "may not specify a duration larger than 2^32 seconds";
        e.invalid(&path.child("expirationSeconds"), seconds, message);
    }
    // Upstream's path is that of the volume, not that of the source.
    match token.text("path") {
        "" => e.required(&volume.child("path"), ""),
        target => validate_non_reserved_path(e, &volume.child("path"), target),
    }
}
