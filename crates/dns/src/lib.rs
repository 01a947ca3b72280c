//! The cluster DNS server: authoritative for the cluster domain, and a forwarder to the host's
//! resolvers for all other names.
//!
//! [`answer`] resolves names from the objects that [`answer::View`] provides, without I/O. [`wire`]
//! encodes and decodes messages, and [`Server`] owns the sockets. [`announce`] creates the Service
//! `kube-dns`, and [`nodes`] adds endpoints for annotated nodes. All state comes from the caches of
//! the process.
//!
//! Counterpart upstream: CoreDNS with the plugins kubernetes, forward and cache.

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
