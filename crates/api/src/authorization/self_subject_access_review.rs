//! SelfSubjectAccessReview: what is special about it.

use crate::kind::Kind;

pub struct SelfSubjectAccessReview;

impl Kind for SelfSubjectAccessReview {}
