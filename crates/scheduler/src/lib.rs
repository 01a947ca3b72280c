//! The scheduler: chooses a node for every pod that has none, as upstream's does, and binds it.
//!
//! [`state`] is what it knows, [`framework`] where plugins take part, [`plugins`] upstream's plugins,
//! [`queue`] the pods that wait, [`algorithm`] the choice itself. All of these are plain functions of what
//! they are given: no clock, no I/O, randomness from a seed. Knows nothing of how the API is spoken to.
//!
//! Start reading at [`algorithm::Algorithm::schedule`].

pub mod algorithm;
pub mod bind;
pub mod board;
pub mod config;
pub mod framework;
pub mod plugins;
pub mod queue;
pub mod state;

#[cfg(test)]
mod testing;
