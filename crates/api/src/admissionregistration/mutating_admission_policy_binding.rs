//! MutatingAdmissionPolicyBinding: what is special about it.

use crate::kind::Kind;

pub struct MutatingAdmissionPolicyBinding;

impl Kind for MutatingAdmissionPolicyBinding {}
