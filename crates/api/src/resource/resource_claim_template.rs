//! ResourceClaimTemplate: what is special about it.

use crate::kind::Kind;

pub struct ResourceClaimTemplate;

impl Kind for ResourceClaimTemplate {}
