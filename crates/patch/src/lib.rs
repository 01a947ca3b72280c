//! The four ways a client changes part of an object: JSON patch, JSON merge patch, strategic merge patch
//! and server-side apply, and the record of who set which field that the last one needs.
//!
//! Works on `serde_json::Value` by the shapes in a [`schema::Table`]. Knows no kinds, no HTTP and no
//! storage: errors carry the text a client sees, the caller picks the status. After an error the document
//! may be half changed and is to be thrown away. Read [`apply::apply`] and [`apply::track`] first.

pub mod apply;
pub mod go;
mod json_patch;
mod merge;
mod strategic;
#[cfg(test)]
mod test_schema;

pub use json_patch::{JsonPatchError, json_patch};
pub use merge::merge_patch;
pub use strategic::{StrategicError, strategic};
