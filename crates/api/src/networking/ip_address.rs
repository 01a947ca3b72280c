//! IPAddress: what is special about it.

use crate::kind::Kind;

pub struct IPAddress;

impl Kind for IPAddress {}
