//! ClusterRoleBinding: what is special about it.

use crate::kind::Kind;

pub struct ClusterRoleBinding;

impl Kind for ClusterRoleBinding {}
