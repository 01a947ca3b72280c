//! VolumeAttachment: what is special about it.

use crate::kind::Kind;

pub struct VolumeAttachment;

impl Kind for VolumeAttachment {}
