//! SelfSubjectReview: what is special about it.

use crate::kind::Kind;

pub struct SelfSubjectReview;

impl Kind for SelfSubjectReview {}
