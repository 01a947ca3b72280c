//! SelfSubjectReview: has no rules.

use crate::strategy::RestStrategy;

pub struct SelfSubjectReview;

impl RestStrategy for SelfSubjectReview {}
