//! Event: what is special about it.

use crate::kind::Kind;

pub struct Event;

impl Kind for Event {}
