//! VolumeAttributesClass: what is special about it.

use crate::kind::Kind;

pub struct VolumeAttributesClass;

impl Kind for VolumeAttributesClass {}
