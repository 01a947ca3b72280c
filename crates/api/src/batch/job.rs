//! Job: what is special about it.

use crate::kind::Kind;

pub struct Job;

impl Kind for Job {}
