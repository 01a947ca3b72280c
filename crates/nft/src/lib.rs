//! A model of an nftables table: fragments with owners, and the batches of changes to make the kernel
//! match.
//!
//! A [`Ruleset`] holds the fragments that owners (Services, pods, ...) have put into it. Putting or
//! removing a fragment adds exactly the differences to the next [`Batch`]. The cost depends on the size
//! of the change and not of the table, and the table never has to be read back. A batch is encoded as
//! netlink messages ([`netlink`]) or as `nft` syntax ([`render`]). [`trace`] evaluates the rules for a
//! packet, for tests. [`foreign`] handles tables of other programs. Does not know Services, sockets or
//! the clock.

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
