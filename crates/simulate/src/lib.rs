//! Nodes without machines: Node objects that stay alive and pods whose lives are played, never run.
//!
//! Everything above the kubelet can be tried and measured with it: scheduling, controllers, rollouts. A
//! pod's whole life follows from its spec and the time it began ([`life`], pure), so a simulation that is
//! killed and started again goes on as if nothing had happened.

mod nodes;
mod pod_lifecycle;
mod pods;

use reconcile::Ctx;

/// What is simulated.
#[derive(Clone, Debug)]
pub struct Config {
    /// How many nodes to make.
    pub nodes: u32,
    /// Tell what a kubelet would tell about containers. Costs three writes a pod.
    pub events: bool,
}

/// Marks a node as simulated. Without it a node is nobody's business here.
pub use api::core::node::SIMULATE_NODE_LABEL;
/// An annotation on a simulated node that makes it fall silent, as if its machine had died.
pub const DOWN_ANNOTATION: &str = "simulate.skiff/down";

/// An annotation on a simulated node: images, separated by commas, that it cannot get.
pub const MISSING_IMAGES_ANNOTATION: &str = "simulate.skiff/missing-images";

/// Plays nodes and their pods until the context's shutdown.
pub async fn run(ctx: Ctx, config: Config) {
    let ctx = Ctx { events: ctx.events.from("kubelet"), ..ctx };
    tokio::join!(nodes::run(ctx.clone(), config.nodes), pods::run(ctx, config.events));
}
