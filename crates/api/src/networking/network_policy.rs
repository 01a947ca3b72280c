//! NetworkPolicy: what is special about it.

use crate::kind::Kind;

pub struct NetworkPolicy;

impl Kind for NetworkPolicy {}
