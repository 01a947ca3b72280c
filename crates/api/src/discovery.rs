//! The kinds of the discovery group.

pub mod endpoint_slice;
