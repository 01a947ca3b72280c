//! Namespace: what is special about it.

use crate::kind::Kind;

pub struct Namespace;

impl Kind for Namespace {}
