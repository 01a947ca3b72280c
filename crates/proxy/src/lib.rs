//! The service proxy of a node: implements Services, host ports and NetworkPolicies with an nftables
//! table, and routes to the pods of other nodes. Counterpart: kube-proxy in nftables mode
//! (`pkg/proxy/nftables`).
//!
//! [`plan`] computes the rules of one Service, [`base_ruleset`] those that are always present and
//! [`policy`] those of NetworkPolicies. [`run`](fn@run) watches the cluster, puts the results into an
//! [`nft::Ruleset`] and applies the changes with a [`Firewall`]. The table is never read back: at
//! startup, after a failure and after another program has deleted parts of it, it is written completely
//! in one batch. [`host_firewall`] makes the tables of other programs accept pod traffic.

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
