//! RoleBinding: grants a Role or ClusterRole inside one namespace.

use serde_json::Value;

use crate::field::Errors;
use crate::kind::{Kind, NameRule};

pub struct RoleBinding;

impl Kind for RoleBinding {
    fn validate(&self, obj: &Value, errors: &mut Errors) {
        super::binding(obj, true, &["Role", "ClusterRole"], errors);
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut Errors) {
        super::same_role(new, old, errors);
    }

    fn name_rule(&self) -> NameRule {
        NameRule::PathSegment
    }
}
