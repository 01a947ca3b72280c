//! ComponentStatus: what is special about it.

use crate::kind::Kind;

pub struct ComponentStatus;

impl Kind for ComponentStatus {}
