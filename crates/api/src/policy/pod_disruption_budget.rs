//! PodDisruptionBudget: what is special about it.

use crate::kind::Kind;

pub struct PodDisruptionBudget;

impl Kind for PodDisruptionBudget {}
