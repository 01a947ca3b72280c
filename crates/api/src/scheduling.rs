//! The kinds of the scheduling group.

pub mod priority_class;
