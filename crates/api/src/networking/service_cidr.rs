//! ServiceCIDR: what is special about it.

use crate::kind::Kind;

pub struct ServiceCIDR;

impl Kind for ServiceCIDR {}
