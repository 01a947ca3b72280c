//! The kinds of the `authorization.k8s.io` group. They are evaluated and never stored.

pub mod local_subject_access_review;
pub mod self_subject_access_review;
pub mod self_subject_rules_review;
pub mod subject_access_review;

use serde_json::{Value, json};

use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::meta::{self, SelectorOptions};

/// Validates that exactly one of resource and non-resource attributes is set.
fn validate_attributes(spec: &Value, errors: &mut ErrorList) {
    let path = Path::new("spec");
    match (spec.has("resourceAttributes"), spec.has("nonResourceAttributes")) {
        (true, true) => errors.invalid(
            &path.child("nonResourceAttributes"),
            internal_format(spec.at("nonResourceAttributes")),
            "cannot be specified in combination with resourceAttributes",
        ),
        (false, false) => errors.invalid(
            &path.child("resourceAttributes"),
            Value::Null,
            "exactly one of nonResourceAttributes or resourceAttributes must be specified",
        ),
        _ => {}
    }
}

/// Non-resource attributes as upstream prints its internal type.
fn internal_format(attributes: &Value) -> Value {
    json!({"Path": attributes.text("path"), "Verb": attributes.text("verb")})
}

/// Validates that a user or group is given.
fn validate_subject(spec: &Value, errors: &mut ErrorList) {
    if spec.text("user").is_empty() && spec.items("groups").is_empty() {
        errors.invalid(&Path::new("spec.user"), "", "at least one of user or group must be specified");
    }
}

fn validate_selectors(spec: &Value, errors: &mut ErrorList) {
    for field in ["fieldSelector", "labelSelector"] {
        let selector = spec.at("resourceAttributes").at(field);
        if selector.is_null() {
            continue;
        }
        let path = Path::new("spec.resourceAttributes").child(field);
        let (raw, requirements) = (selector.text("rawSelector"), selector.items("requirements"));
        if !raw.is_empty() && !requirements.is_empty() {
            let message = "may not specified at the same time as requirements";
            errors.invalid(&path.child("rawSelector"), raw, message);
        }
        if raw.is_empty() && requirements.is_empty() {
            let detail = format!("when {path} is specified, requirements or rawSelector is required");
            errors.required(&path.child("requirements"), &detail);
        }
        let options = SelectorOptions { allow_unknown_operators: true, ..SelectorOptions::default() };
        for (i, requirement) in requirements.iter().enumerate() {
            let path = path.child("requirements").index(i);
            if field == "fieldSelector" {
                meta::validate_field_selector_requirement(requirement, &path, options, errors);
            } else {
                meta::validate_label_selector_requirement(requirement, &path, options, errors);
            }
        }
    }
}

/// Reviews must have empty metadata, except for the fields in `except`.
fn require_empty_metadata(obj: &Value, except: &[&str], message: &str, errors: &mut ErrorList) {
    let metadata = obj.at("metadata");
    let is_set = |(name, value): (&str, &Value)| {
        name != "managedFields"
            && !except.contains(&name)
            && !meta::semantic_equal(value, &Value::Null)
            && value != ""
    };
    if obj.entries("metadata").any(is_set) {
        errors.invalid(&Path::new("metadata"), metadata.clone(), message);
    }
}
