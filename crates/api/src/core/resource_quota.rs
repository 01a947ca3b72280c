//! ResourceQuota: what is special about it.

use crate::kind::Kind;

pub struct ResourceQuota;

impl Kind for ResourceQuota {}
