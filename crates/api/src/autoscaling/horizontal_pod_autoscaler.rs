//! HorizontalPodAutoscaler: what is special about it.

use crate::kind::Kind;

pub struct HorizontalPodAutoscaler;

impl Kind for HorizontalPodAutoscaler {}
