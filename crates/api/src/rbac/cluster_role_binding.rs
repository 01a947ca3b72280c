//! ClusterRoleBinding: grants a ClusterRole everywhere.

use serde_json::Value;

use crate::field::Errors;
use crate::kind::{Kind, NameRule};

pub struct ClusterRoleBinding;

impl Kind for ClusterRoleBinding {
    fn validate(&self, obj: &Value, errors: &mut Errors) {
        super::binding(obj, false, &["ClusterRole"], errors);
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut Errors) {
        super::same_role(new, old, errors);
    }

    fn name_rule(&self) -> NameRule {
        NameRule::PathSegment
    }
}
