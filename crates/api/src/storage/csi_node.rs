//! CSINode: what is special about it.

use crate::kind::Kind;

pub struct CSINode;

impl Kind for CSINode {}
