//! SelfSubjectRulesReview: what is special about it.

use crate::kind::Kind;

pub struct SelfSubjectRulesReview;

impl Kind for SelfSubjectRulesReview {}
