//! ValidatingAdmissionPolicyBinding: what is special about it.

use crate::kind::Kind;

pub struct ValidatingAdmissionPolicyBinding;

impl Kind for ValidatingAdmissionPolicyBinding {}
