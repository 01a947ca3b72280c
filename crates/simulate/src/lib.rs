//! Simulated nodes: Node objects that stay alive without a machine, and pods whose lifecycle is
//! simulated and which never run.
//!
//! They are used to try and to measure everything above the kubelet: scheduling, controllers,
//! rollouts. The lifecycle of a pod follows from its spec and its start time ([`pod_lifecycle`],
//! pure), so a simulation that is restarted continues as if nothing had happened.

mod nodes;
mod pod_lifecycle;
mod pods;

use reconcile::Ctx;

/// The configuration of a simulation.
#[derive(Clone, Debug)]
pub struct Config {
    /// The number of nodes to create.
    pub nodes: u32,
    /// Record the events of a kubelet about containers. Costs three writes per pod.
    pub events: bool,
}

/// The label of a simulated node. Nodes without it are ignored.
pub use api::core::node::SIMULATE_NODE_LABEL;
/// An annotation on a simulated node that stops its heartbeats, as if its machine had failed.
pub const DOWN_ANNOTATION: &str = "simulate.skiff/down";

/// An annotation on a simulated node: a comma-separated list of images that it cannot pull.
pub const MISSING_IMAGES_ANNOTATION: &str = "simulate.skiff/missing-images";

/// Simulates nodes and their pods until the context's shutdown.
pub async fn run(ctx: Ctx, config: Config) {
    let ctx = Ctx { events: ctx.events.from("kubelet"), ..ctx };
    tokio::join!(nodes::run(ctx.clone(), config.nodes), pods::run(ctx, config.events));
}
