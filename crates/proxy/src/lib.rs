//! Services on a node: turns Services and their EndpointSlices into one nftables table of our own.
//!
//! [`plan`] says what one Service needs ([`skeleton`] what is there anyway); [`run`] listens, puts plans into an
//! [`nft::Ruleset`], with what [`policy`] says of NetworkPolicies beside them, and hands what changed to a [`Firewall`]. The kernel is never asked what it has: at start,
//! after a failure, and when somebody else has removed a part of it, the table is written as a whole in one batch.
//! [`host_firewall`] gets packets of pods through the tables of other programs.

pub mod base_ruleset;
mod conntrack;
mod firewall;
mod forwarding;
mod health;
pub mod host_firewall;
mod host_ports;
pub mod plan;
pub mod policy;
pub mod routes;
mod ruleset_monitor;
mod run;
mod socket;

pub use firewall::{Firewall, FirewallError, NetlinkFirewall, NftFirewall, TABLE};
pub use forwarding::{allow_loopback, enable_forwarding};
pub use run::{Config, run, run_standalone};
