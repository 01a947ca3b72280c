//! EndpointSlice: what is special about it.

use crate::kind::Kind;

pub struct EndpointSlice;

impl Kind for EndpointSlice {}
