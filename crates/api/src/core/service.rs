//! Service: what is special about it.

use crate::kind::Kind;

pub struct Service;

impl Kind for Service {}
