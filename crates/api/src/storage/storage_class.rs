//! StorageClass: what is special about it.

use crate::kind::Kind;

pub struct StorageClass;

impl Kind for StorageClass {}
