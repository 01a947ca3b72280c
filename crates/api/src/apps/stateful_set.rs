//! StatefulSet: what is special about it.

use crate::kind::Kind;

pub struct StatefulSet;

impl Kind for StatefulSet {}
