//! LocalSubjectAccessReview: checks whether a user may perform an action in this namespace.

use serde_json::Value;

use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::strategy::RestStrategy;

pub struct LocalSubjectAccessReview;

impl RestStrategy for LocalSubjectAccessReview {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let spec = obj.at("spec");
        super::validate_attributes(spec, errors);
        super::validate_subject(spec, errors);
        super::validate_selectors(spec, errors);
        super::require_empty_metadata(obj, &["namespace"], "must be empty except for namespace", errors);
        let namespace = spec.at("resourceAttributes").text("namespace");
        if spec.has("resourceAttributes") && namespace != obj.at("metadata").text("namespace") {
            let path = Path::new("spec.resourceAttributes.namespace");
            errors.invalid(&path, namespace, "must match metadata.namespace");
        }
        if spec.has("nonResourceAttributes") {
            let given = super::internal_format(spec.at("nonResourceAttributes"));
            let path = Path::new("spec.nonResourceAttributes");
            errors.invalid(&path, given, "disallowed on this kind of request");
        }
    }
}
