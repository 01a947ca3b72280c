//! ConfigMap: what is special about it.

use crate::kind::Kind;

pub struct ConfigMap;

impl Kind for ConfigMap {}
