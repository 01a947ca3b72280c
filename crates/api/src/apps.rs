//! The kinds of the `apps` group.

pub mod controller_revision;
pub mod daemon_set;
pub mod deployment;
pub mod replica_set;
pub mod stateful_set;
pub(crate) mod workload;

#[cfg(test)]
mod tests;
