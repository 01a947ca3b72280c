//! MutatingAdmissionPolicyBinding: binds a policy to resources and parameters.

use serde_json::Value;

use super::policy;
use crate::field::{ErrorList, Path};
use crate::json::JsonExt;
use crate::strategy::RestStrategy;

pub struct MutatingAdmissionPolicyBinding;

impl RestStrategy for MutatingAdmissionPolicyBinding {
    fn validate(&self, obj: &Value, errors: &mut ErrorList) {
        let (spec, path) = (obj.at("spec"), Path::new("spec"));
        policy::validate_binding_spec(spec, &path, errors);
        policy::validate_mutating_operations(
            spec.at("matchResources"),
            &path.child("matchResources"),
            errors,
        );
    }
}
