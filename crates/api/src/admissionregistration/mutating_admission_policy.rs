//! MutatingAdmissionPolicy: what is special about it.

use crate::kind::Kind;

pub struct MutatingAdmissionPolicy;

impl Kind for MutatingAdmissionPolicy {}
