//! ControllerRevision: what is special about it.

use crate::kind::Kind;

pub struct ControllerRevision;

impl Kind for ControllerRevision {}
