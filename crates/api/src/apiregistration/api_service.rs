//! APIService: the server of a group and version, which is this server or an aggregated one.

use serde_json::{Value, json};

use crate::admissionregistration::client_config::validate_service_reference;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::names;
use crate::strategy::{NameFormat, RestStrategy};

const MAX_GROUP_PRIORITY: i64 = 20000;
const MAX_VERSION_PRIORITY: i64 = 1000;

pub struct APIService;

impl RestStrategy for APIService {
    fn prepare_for_create(&self, new: &mut Value) {
        new.set("status", json!({}));
        if new.at("spec").has("service") {
            return;
        }
        // Groups served by this server are always available.
        let mut condition = json!({
            "type": "Available",
            "status": "True",
            "reason": "Local",
            "message": "Local APIServices are always available",
        });
        let created = new.path("metadata.creationTimestamp").clone();
        if !created.is_null() {
            condition.set("lastTransitionTime", created);
        }
        new.set("status", json!({"conditions": [condition]}));
    }

    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let (spec, path) = (obj.at("spec"), Path::new("spec"));
        let (group, version) = (spec.text("group"), spec.text("version"));
        let (name, expected_name) = (obj.at("metadata").text("name"), format!("{version}.{group}"));
        if names::path_segment_name(name).is_empty() && name != expected_name {
            let message = format!("must be `spec.version+\".\"+spec.group`: {expected_name:?}");
            errors.invalid(&Path::new("metadata.name"), name, &message);
        }
        if group.is_empty() && version != "v1" {
            let detail = "only v1 may have an empty group and it better be legacy kube";
            errors.required(&path.child("group"), detail);
        }
        if !group.is_empty() {
            errors.invalid_each(&path.child("group"), group, names::dns1123_subdomain(group));
        }
        errors.invalid_each(&path.child("version"), version, names::dns1035_label(version));
        priority(spec, "groupPriorityMinimum", MAX_GROUP_PRIORITY, &path, errors);
        priority(spec, "versionPriority", MAX_VERSION_PRIORITY, &path, errors);
        service(spec, &path, errors);
    }

    fn validate_status_update(&self, new: &Value, _old: &Value, errors: &mut ErrorList) {
        let path = Path::new("status.conditions");
        for (i, condition) in new.at("status").items("conditions").iter().enumerate() {
            let status = condition.text("status");
            let known = ["True", "False", "Unknown"];
            if !known.contains(&status) {
                errors.not_supported(&path.index(i).child("status"), status, &known);
            }
        }
    }

    fn name_format(&self) -> NameFormat {
        NameFormat::PathSegment
    }
}

fn priority(spec: &Value, field: &str, max: i64, path: &Path, errors: &mut ErrorList) {
    let value = spec.int(field).unwrap_or(0);
    if !(1..=max).contains(&value) {
        errors.invalid(&path.child(field), value, &format!("must be positive and less than {max}"));
    }
}

fn service(spec: &Value, path: &Path, errors: &mut ErrorList) {
    let insecure = spec.flag("insecureSkipTLSVerify");
    let bundle = spec.text("caBundle");
    let (at_bundle, at_insecure) = (path.child("caBundle"), path.child("insecureSkipTLSVerify"));
    if !spec.has("service") {
        if !bundle.is_empty() {
            let padding = bundle.bytes().rev().take_while(|byte| *byte == b'=').count();
            let rendered = format!("{} bytes", (bundle.len() / 4 * 3).saturating_sub(padding));
            errors.invalid(&at_bundle, rendered, "local APIServices may not have a caBundle");
        }
        if insecure {
            let message = "local APIServices may not have insecureSkipTLSVerify";
            errors.invalid(&at_insecure, true, message);
        }
        return;
    }
    validate_service_reference(spec.at("service"), ["namespace", "name"], &path.child("service"), errors);
    if insecure && !bundle.is_empty() {
        errors.invalid(&at_insecure, true, "may not be true if caBundle is present");
    }
}
