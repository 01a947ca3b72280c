//! ReplicationController: what is special about it.

use crate::kind::Kind;

pub struct ReplicationController;

impl Kind for ReplicationController {}
