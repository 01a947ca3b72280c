//! CSIDriver: what is special about it.

use crate::kind::Kind;

pub struct CSIDriver;

impl Kind for CSIDriver {}
