//! The kinds of the coordination group.

pub mod lease;
