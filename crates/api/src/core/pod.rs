//! Pod: what is special about it.

use crate::kind::Kind;

pub struct Pod;

impl Kind for Pod {}
