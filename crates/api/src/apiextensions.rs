//! The kinds of the `apiextensions.k8s.io` group.

pub mod custom_resource_definition;
pub mod values;
