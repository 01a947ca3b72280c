//! PersistentVolume: what is special about it.

use crate::kind::Kind;

pub struct PersistentVolume;

impl Kind for PersistentVolume {}
