//! IngressClass: what is special about it.

use crate::kind::Kind;

pub struct IngressClass;

impl Kind for IngressClass {}
