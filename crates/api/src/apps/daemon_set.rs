//! DaemonSet: what is special about it.

use crate::kind::Kind;

pub struct DaemonSet;

impl Kind for DaemonSet {}
