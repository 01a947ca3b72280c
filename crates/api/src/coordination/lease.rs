//! Lease: what is special about it.

use crate::kind::Kind;

pub struct Lease;

impl Kind for Lease {}
