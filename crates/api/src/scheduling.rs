//! The kinds of the `scheduling.k8s.io` group.

pub mod priority_class;
