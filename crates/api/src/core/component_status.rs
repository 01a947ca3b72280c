//! ComponentStatus: has no rules.

use crate::strategy::RestStrategy;

pub struct ComponentStatus;

impl RestStrategy for ComponentStatus {}
