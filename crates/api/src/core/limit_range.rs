//! LimitRange: what is special about it.

use crate::kind::Kind;

pub struct LimitRange;

impl Kind for LimitRange {}
