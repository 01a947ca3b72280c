//! Endpoints: what is special about it.

use crate::kind::Kind;

pub struct Endpoints;

impl Kind for Endpoints {}
