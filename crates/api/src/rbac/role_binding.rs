//! RoleBinding: what is special about it.

use crate::kind::Kind;

pub struct RoleBinding;

impl Kind for RoleBinding {}
