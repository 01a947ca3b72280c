//! Node: what is special about it.

use crate::kind::Kind;

pub struct Node;

impl Kind for Node {}
