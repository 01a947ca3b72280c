//! The built-in kinds: one table row and one module each, and the words the API speaks.
//!
//! An object is a [`serde_json::Value`] whose shape `schema` has already checked, so the rules here read
//! fields through [`json::Json`] and never fail on a wrong type. Pure: no I/O, no clock of its own.
//! Read [`table::Resource`] (the table's row) and [`kind::Kind`] (what is special about a kind) first.

pub mod admissionregistration;
pub mod apiextensions;
pub mod apiregistration;
pub mod apps;
pub mod authentication;
pub mod authorization;
pub mod autoscaling;
pub mod batch;
pub mod certificates;
pub mod coordination;
pub mod core;
pub mod discovery;
pub mod events;
pub mod flowcontrol;
pub mod networking;
pub mod node;
pub mod policy;
pub mod rbac;
pub mod resource;
pub mod scheduling;
pub mod storage;

pub mod columns;
pub mod convert;
pub mod custom;
pub mod defaults;
pub mod field;
pub mod intstr;
pub mod json;
pub mod meta;
pub mod names;
pub mod quota;
pub mod resource_table;
pub mod resources;
pub mod selector;
pub mod status;
pub mod strategy;
pub mod time;

pub use schema::quantity;

pub use field::{ErrorList, Path};
pub use resource_table::{RESOURCES, Resource};
pub use status::Status;
pub use strategy::RestStrategy;
