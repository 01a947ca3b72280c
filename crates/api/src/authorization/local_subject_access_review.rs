//! LocalSubjectAccessReview: what is special about it.

use crate::kind::Kind;

pub struct LocalSubjectAccessReview;

impl Kind for LocalSubjectAccessReview {}
