//! Deployment: what is special about it.

use crate::kind::Kind;

pub struct Deployment;

impl Kind for Deployment {}
