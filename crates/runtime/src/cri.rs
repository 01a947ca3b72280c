//! The messages of CRI v1, as far as a kubelet uses them: names and numbers are the protocol's own.
//!
//! Kept as structs with their field numbers rather than generated at build time, which would need a
//! protobuf compiler on every machine that builds this.

mod container;
mod image;
mod node;
mod sandbox;
mod stats;

pub use container::*;
pub use image::*;
pub use node::*;
pub use sandbox::*;
pub use stats::*;

/// Answers and questions that say nothing.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Empty {}

/// Which pod or container, and nothing else: requests that only name it share field number 1.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Id {
    #[prost(string, tag = 1)]
    pub id: String,
}

/// A state that may be missing, be it a pod's or a container's.
#[derive(Clone, PartialEq, prost::Message)]
pub struct StateValue {
    #[prost(int32, tag = 1)]
    pub state: i32,
}

/// Where to stream to or from.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Url {
    #[prost(string, tag = 1)]
    pub url: String,
}
