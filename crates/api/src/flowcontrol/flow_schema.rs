//! FlowSchema: what is special about it.

use crate::kind::Kind;

pub struct FlowSchema;

impl Kind for FlowSchema {}
