//! DeviceClass: what is special about it.

use crate::kind::Kind;

pub struct DeviceClass;

impl Kind for DeviceClass {}
