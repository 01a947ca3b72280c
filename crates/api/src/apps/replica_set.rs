//! ReplicaSet: what is special about it.

use crate::kind::Kind;

pub struct ReplicaSet;

impl Kind for ReplicaSet {}
