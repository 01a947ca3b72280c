//! SelfSubjectReview: what is special about it.

use crate::strategy::RestStrategy;

pub struct SelfSubjectReview;

impl RestStrategy for SelfSubjectReview {}
