//! ResourceSlice: what is special about it.

use crate::kind::Kind;

pub struct ResourceSlice;

impl Kind for ResourceSlice {}
