//! Secret: what is special about it.

use crate::kind::Kind;

pub struct Secret;

impl Kind for Secret {}
