//! CRI v1 protobuf messages (`k8s.io/cri-api`), limited to the fields that a kubelet uses.
//!
//! The field numbers are written by hand. Generating the structs from `api.proto` would need a protobuf
//! compiler on every build machine (ADR 7).

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

/// A request or response without fields.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Empty {}

/// A request that names only a pod sandbox or container. All such CRI requests carry the ID in field 1.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Id {
    #[prost(string, tag = 1)]
    pub id: String,
}

/// `PodSandboxStateValue` and `ContainerStateValue`: the optional state of a filter.
#[derive(Clone, PartialEq, prost::Message)]
pub struct StateValue {
    #[prost(int32, tag = 1)]
    pub state: i32,
}

/// Response of `Exec`, `Attach` and `PortForward`: the URL of the streaming server.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Url {
    #[prost(string, tag = 1)]
    pub url: String,
}
