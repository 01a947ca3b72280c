//! LocalSubjectAccessReview: may this user do that in this namespace?

use serde_json::Value;

use crate::field::{Errors, Path};
use crate::json::Json;
use crate::kind::Kind;

pub struct LocalSubjectAccessReview;

impl Kind for LocalSubjectAccessReview {
    fn validate(&self, obj: &Value, errors: &mut Errors) {
        let spec = obj.at("spec");
        super::attributes(spec, errors);
        super::subject(spec, errors);
        super::selectors(spec, errors);
        super::no_metadata(obj, &["namespace"], "must be empty except for namespace", errors);
        let asked = spec.at("resourceAttributes").text("namespace");
        if spec.has("resourceAttributes") && asked != obj.at("metadata").text("namespace") {
            let path = Path::new("spec.resourceAttributes.namespace");
            errors.invalid(&path, asked, "must match metadata.namespace");
        }
        if spec.has("nonResourceAttributes") {
            let given = super::inner_form(spec.at("nonResourceAttributes"));
            let path = Path::new("spec.nonResourceAttributes");
            errors.invalid(&path, given, "disallowed on this kind of request");
        }
    }
}
