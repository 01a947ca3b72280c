//! CSIStorageCapacity: what is special about it.

use crate::kind::Kind;

pub struct CSIStorageCapacity;

impl Kind for CSIStorageCapacity {}
