//! The scheduler: chooses a node for every pod that has none, as upstream's does, and binds it.
//!
//! [`state`] is what it knows, [`framework`] where plugins take part, [`plugins`] upstream's plugins,
//! [`queue`] the pods that wait, [`algorithm`] the choice itself, [`engine`] all of them together as a machine
//! that turns events into actions. All of these are plain functions of what they are given: no clock, no I/O,
//! randomness from a seed. [`run`] listens and acts.
//!
//! Start reading at [`algorithm::Algorithm::schedule`] and [`engine::Engine::step`].

pub mod algorithm;
pub mod bind;
pub mod config;
pub mod engine;
pub mod extender;
pub mod framework;
pub mod metrics;
pub mod object_waiter;
pub mod plugins;
pub mod queue;
pub mod run;
pub mod state;

#[cfg(test)]
mod testing;
