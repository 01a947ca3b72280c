//! CustomResourceDefinition: what is special about it.

use crate::kind::Kind;

pub struct CustomResourceDefinition;

impl Kind for CustomResourceDefinition {}
