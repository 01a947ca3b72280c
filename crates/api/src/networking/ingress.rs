//! Ingress: what is special about it.

use crate::kind::Kind;

pub struct Ingress;

impl Kind for Ingress {}
