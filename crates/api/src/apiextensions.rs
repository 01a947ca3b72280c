//! The kinds of the apiextensions group.

pub mod custom_resource_definition;
pub mod values;
