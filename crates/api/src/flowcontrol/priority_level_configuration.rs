//! PriorityLevelConfiguration: what is special about it.

use crate::kind::Kind;

pub struct PriorityLevelConfiguration;

impl Kind for PriorityLevelConfiguration {}
