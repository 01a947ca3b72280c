//! ClusterRole: what is special about it.

use crate::kind::Kind;

pub struct ClusterRole;

impl Kind for ClusterRole {}
