//! SelfSubjectAccessReview: checks whether the current user may perform an action.

use serde_json::Value;

use crate::field::ErrorList;
use crate::json::JsonExt;
use crate::strategy::RestStrategy;

pub struct SelfSubjectAccessReview;

impl RestStrategy for SelfSubjectAccessReview {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        super::validate_attributes(obj.at("spec"), errors);
        super::validate_selectors(obj.at("spec"), errors);
        super::require_empty_metadata(obj, &[], "must be empty", errors);
    }
}
