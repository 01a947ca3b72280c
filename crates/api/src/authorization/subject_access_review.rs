//! SubjectAccessReview: may this user do that?

use serde_json::Value;

use crate::field::Errors;
use crate::json::Json;
use crate::kind::Kind;

pub struct SubjectAccessReview;

impl Kind for SubjectAccessReview {
    fn validate(&self, obj: &Value, errors: &mut Errors) {
        super::attributes(obj.at("spec"), errors);
        super::subject(obj.at("spec"), errors);
        super::selectors(obj.at("spec"), errors);
        super::no_metadata(obj, &[], "must be empty", errors);
    }
}
