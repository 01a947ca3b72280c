//! TokenReview: what is special about it.

use crate::kind::Kind;

pub struct TokenReview;

impl Kind for TokenReview {}
