//! SelfSubjectAccessReview: may I do that?

use serde_json::Value;

use crate::field::Errors;
use crate::json::Json;
use crate::kind::Kind;

pub struct SelfSubjectAccessReview;

impl Kind for SelfSubjectAccessReview {
    fn validate(&self, obj: &Value, errors: &mut Errors) {
        super::attributes(obj.at("spec"), errors);
        super::selectors(obj.at("spec"), errors);
        super::no_metadata(obj, &[], "must be empty", errors);
    }
}
