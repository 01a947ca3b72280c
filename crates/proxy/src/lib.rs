//! Services on a node: turns Services and their EndpointSlices into one nftables table of our own.
//!
//! [`plan`] says what one Service needs ([`skeleton`] what is there anyway); [`run`] listens, puts plans into an
//! [`nft::Ruleset`], with what [`policy`] says of NetworkPolicies beside them, and hands what changed to a [`Firewall`]. The kernel is never asked what it has: at start, and
//! after a failure, the table is made anew in one batch.

mod conntrack;
mod firewall;
mod forwarding;
mod health;
mod host_ports;
pub mod plan;
pub mod policy;
pub mod routes;
mod run;
pub mod skeleton;
mod socket;

pub use firewall::{Firewall, FirewallError, Kernel, Nft, TABLE};
pub use forwarding::{pass_loopback, prepare};
pub use run::{Config, run, run_alone};
