//! The kinds of the `discovery.k8s.io` group.

pub mod endpoint_slice;
