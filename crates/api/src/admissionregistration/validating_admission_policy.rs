//! ValidatingAdmissionPolicy: what is special about it.

use crate::kind::Kind;

pub struct ValidatingAdmissionPolicy;

impl Kind for ValidatingAdmissionPolicy {}
