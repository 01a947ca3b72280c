//! PriorityClass: what is special about it.

use crate::kind::Kind;

pub struct PriorityClass;

impl Kind for PriorityClass {}
