//! The scheduler: assigns pods to nodes as kube-scheduler does.
//!
//! [`state`] is the cache of the cluster, [`framework`] defines the extension points, [`plugins`] are
//! upstream's in-tree plugins, [`queue`] is the scheduling queue, [`algorithm`] selects a node, and
//! [`engine`] combines them to a state machine that turns events into actions. All of them are deterministic:
//! no clock, no I/O, and random numbers from a seed. [`run`] connects the engine to the API server.
//!
//! Start reading at [`algorithm::Algorithm::schedule`] and [`engine::Engine::schedule_one`].

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
