//! The kinds of the flowcontrol group.

pub mod flow_schema;
pub mod priority_level_configuration;
