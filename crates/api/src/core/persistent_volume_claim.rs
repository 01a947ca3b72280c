//! PersistentVolumeClaim: what is special about it.

use crate::kind::Kind;

pub struct PersistentVolumeClaim;

impl Kind for PersistentVolumeClaim {}
