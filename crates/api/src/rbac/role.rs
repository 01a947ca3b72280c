//! Role: what is special about it.

use crate::kind::Kind;

pub struct Role;

impl Kind for Role {}
