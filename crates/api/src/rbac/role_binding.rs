//! RoleBinding: grants a Role or ClusterRole in a namespace.

use serde_json::Value;

use crate::field::ErrorList;
use crate::strategy::{NameFormat, RestStrategy};

pub struct RoleBinding;

impl RestStrategy for RoleBinding {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        super::validate_binding(obj, true, &["Role", "ClusterRole"], errors);
    }

    fn validate_update(&self, new: &Value, old: &Value, errors: &mut ErrorList) {
        super::validate_role_ref_unchanged(new, old, errors);
    }

    fn name_format(&self) -> NameFormat {
        NameFormat::PathSegment
    }
}
