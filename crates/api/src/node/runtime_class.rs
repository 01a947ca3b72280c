//! RuntimeClass: what is special about it.

use crate::kind::Kind;

pub struct RuntimeClass;

impl Kind for RuntimeClass {}
