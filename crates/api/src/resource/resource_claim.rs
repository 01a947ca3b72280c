//! ResourceClaim: what is special about it.

use crate::kind::Kind;

pub struct ResourceClaim;

impl Kind for ResourceClaim {}
