//! The kinds of the node group.

pub mod runtime_class;
