//! Firewall rules as data: one nftables table, who asked for which part of it, and what to change in the kernel.
//!
//! A [`Ruleset`] holds the parts that owners (Services, pods, ...) have asked for. Putting a part in or taking it
//! out adds to a [`Batch`] exactly what changes, so the cost follows the change and not the table, and nothing has
//! ever to be read back. A batch can be written as `nft` understands it ([`render`]) or as netlink messages
//! ([`netlink`]); [`trace`] says where a packet goes, for tests. [`foreign`] is about tables of other programs. Pure: knows no Services, no sockets, no clock.

mod batch;
pub mod foreign;
mod model;
mod net;
pub mod netlink;
pub mod render;
mod ruleset;
pub mod trace;
pub mod wire;

pub use batch::{Batch, Command};
pub use model::{
    BaseChain, ChainType, DataType, Field, Fragment, Hook, IpFamily, Key, MatchValue, Name, Proto, Rule, Set,
    Statement, Verdict, rule,
};
pub use net::IpNet;
pub use ruleset::Ruleset;
