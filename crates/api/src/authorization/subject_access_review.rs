//! SubjectAccessReview: what is special about it.

use crate::kind::Kind;

pub struct SubjectAccessReview;

impl Kind for SubjectAccessReview {}
