//! The patch types of the API: JSON patch, JSON merge patch, strategic merge patch and server-side
//! apply, with the field ownership that the last one requires.
//!
//! Works on `serde_json::Value` with the types of a [`schema::Table`]. Does not know kinds, HTTP or
//! storage: errors have the text for the client, and the caller chooses the status. After an error the
//! document may be partially modified and must be discarded. Start reading at [`apply::apply`] and
//! [`apply::track`].

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
