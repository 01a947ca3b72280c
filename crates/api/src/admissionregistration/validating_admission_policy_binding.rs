//! ValidatingAdmissionPolicyBinding: binds a policy to resources, parameters and validation actions.

use std::collections::HashSet;

use serde_json::Value;

use super::policy;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::strategy::RestStrategy;

const ACTIONS: [&str; 3] = ["Audit", "Deny", "Warn"];

pub struct ValidatingAdmissionPolicyBinding;

impl RestStrategy for ValidatingAdmissionPolicyBinding {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let (spec, path) = (obj.at("spec"), Path::new("spec"));
        policy::validate_binding_spec(spec, &path, errors);
        actions(spec.at("validationActions"), &path.child("validationActions"), errors);
    }
}

fn actions(actions: &Value, path: &Path, errors: &mut ErrorList) {
    let list = actions.as_array().map_or(&[][..], Vec::as_slice);
    let mut seen = HashSet::new();
    for (i, action) in list.iter().enumerate() {
        let name = action.as_str().unwrap_or("");
        if !ACTIONS.contains(&name) {
            errors.not_supported(&path.index(i), name, &ACTIONS);
        }
        if !seen.insert(name) {
            errors.duplicate(&path.index(i), name);
        }
    }
    let has = |name: &str| list.iter().any(|action| action == name);
    if has("Deny") && has("Warn") {
        errors.invalid(
            path,
            actions.clone(),
            "must not contain both Deny and Warn (repeating the same validation failure information in the API response and headers serves no purpose)",
        );
    }
    if list.is_empty() {
        errors.required(path, "at least one validation action is required");
    }
}
