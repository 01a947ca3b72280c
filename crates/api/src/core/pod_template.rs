//! PodTemplate: what is special about it.

use crate::kind::Kind;

pub struct PodTemplate;

impl Kind for PodTemplate {}
