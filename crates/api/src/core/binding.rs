//! Binding: what is special about it.

use crate::kind::Kind;

pub struct Binding;

impl Kind for Binding {}
