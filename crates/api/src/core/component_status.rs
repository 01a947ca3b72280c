//! ComponentStatus: what is special about it.

use crate::strategy::RestStrategy;

pub struct ComponentStatus;

impl RestStrategy for ComponentStatus {}
