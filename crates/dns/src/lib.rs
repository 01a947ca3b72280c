//! Names in a cluster: an authoritative server for the cluster's domain that hands everything else on to the host's
//! resolvers.
//!
//! [`answer`] says what a name means, purely, from what [`answer::View`] shows; there is no state of its own beside
//! the caches of the process. [`wire`] reads and writes messages, [`Server`] has the sockets, [`announce`] makes the
//! Service `kube-dns` by which pods find it, and [`nodes`] those nodes its endpoints that say they answer.

pub mod announce;
pub mod answer;
mod cache;
mod cluster;
mod forward;
mod metrics;
pub mod nodes;
mod server;
pub mod wire;

pub use metrics::Metrics;
pub use server::{ClientFilter, Config, Server};
