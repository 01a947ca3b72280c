//! The built-in kinds with their validation, defaults, conversions and printer columns, and the types
//! of the API machinery (Status, selectors, field errors).
//!
//! An object is a [`serde_json::Value`] that `schema` has decoded, so the code here reads fields
//! through [`json::JsonExt`] and does not handle wrong types. There is no I/O and no clock. Start with
//! [`resource_table::Resource`] (a row of the resource table) and [`strategy::RestStrategy`] (the rules
//! of a kind).

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
