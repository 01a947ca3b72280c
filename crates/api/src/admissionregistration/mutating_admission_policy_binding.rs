//! MutatingAdmissionPolicyBinding: where a policy applies, and with which parameters.

use serde_json::Value;

use super::policy;
use crate::field::{Errors, Path};
use crate::json::Json;
use crate::kind::Kind;

pub struct MutatingAdmissionPolicyBinding;

impl Kind for MutatingAdmissionPolicyBinding {
    fn validate(&self, obj: &Value, errors: &mut Errors) {
        let (spec, path) = (obj.at("spec"), Path::new("spec"));
        policy::binding(spec, &path, errors);
        policy::mutating_operations(spec.at("matchResources"), &path.at("matchResources"), errors);
    }
}
