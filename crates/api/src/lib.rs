//! The built-in kinds: one table row and one module each, and the words the API speaks.
//!
//! An object is a [`serde_json::Value`] whose shape `schema` has already checked, so the rules here read
//! fields through [`json::Json`] and never fail on a wrong type. Pure: no I/O, no clock of its own.
//! Read [`resource::Resource`] (the table's row) and [`kind::Kind`] (what is special about a kind) first.

pub mod field;
pub mod json;
pub mod kind;
pub mod resource;
pub mod status;

pub use field::{Errors, Path};
pub use kind::Kind;
pub use resource::{Resource, RESOURCES};
pub use status::Status;
