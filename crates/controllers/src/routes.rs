//! Route controller: creates routes between the pod networks of nodes in the cloud provider, and maintains
//! the `NetworkUnavailable` condition of nodes.
//!
//! Upstream: `staging/src/k8s.io/cloud-provider/controllers/route`.

mod plan;
#[cfg(test)]
mod tests;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, NodeCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use reconcile::cloud::CloudError;
use reconcile::{Controller, Ctx, Error, Key, Object, ObjectUpdate, Patch, ReconcileAction};
use serde_json::json;

use crate::node;

const NETWORK_UNAVAILABLE: &str = "NetworkUnavailable";

/// Why the routes could not be reconciled.
#[derive(Debug, thiserror::Error)]
enum RouteError {
    #[error(transparent)]
    Api(#[from] Error),
    #[error("failed to reconcile routes")]
    Cloud(#[from] CloudError),
}

pub async fn run(ctx: Ctx) {
    if ctx.settings.cloud.0.as_ref().is_none_or(|cloud| cloud.routes().is_none()) {
        return;
    }
    let ctx = Ctx {
        client: ctx.client.impersonate("route-controller"),
        events: ctx.events.from("route_controller"),
        ..ctx
    };
    let controller = Controller::new("Routes", &ctx);
    controller.on(ctx.caches.nodes(), |changed: &ObjectUpdate<'_, Node>, enqueue| {
        // The condition is compared, too, because a full status update by the kubelet may remove it.
        let current =
            |node: &Node| node::condition(node, NETWORK_UNAVAILABLE).map(|current| current.status.clone());
        let route_inputs = |node: &Node| (plan::routes(node, &[]), current(node));
        if changed.before.map(|node| route_inputs(node)) != changed.after.map(|node| route_inputs(node)) {
            enqueue(Key::new("", "routes"));
        }
    });
    let work = ctx.clone();
    let reconcile = move |_: Key| {
        let ctx = work.clone();
        async move { reconcile(&ctx).await }
    };
    controller.run(&ctx, 1, reconcile).await
}

/// Reconciles all routes at once, because stale routes can only be detected against all nodes.
async fn reconcile(ctx: &Ctx) -> Result<ReconcileAction, RouteError> {
    let cloud = ctx.settings.cloud.0.clone();
    let Some(routes) = cloud.as_ref().and_then(|cloud| cloud.routes()) else {
        return Ok(ReconcileAction::AwaitChange);
    };
    let nodes = ctx.caches.nodes().all();
    let existing = routes.list().await?;
    let plan = plan::plan(&nodes, &existing, &ctx.settings.cluster_cidrs);
    for route in &plan.delete {
        routes.delete(route).await?;
    }
    let mut failed = None;
    for route in &plan.create {
        if let Err(error) = routes.create(route).await {
            let node = nodes.iter().find(|node| node.name() == route.node);
            let message =
                format!("Could not create route for node {} {}: {error}", route.node, route.network);
            node.into_iter()
                .for_each(|node| ctx.events.warning(&**node, "FailedToCreateRoute", message.clone()));
            failed = Some((route.node.clone(), error));
        }
    }
    let now = ctx.clock.now();
    for node in &nodes {
        let has_route = failed.as_ref().is_none_or(|(name, _)| name != node.name())
            && !plan::routes(node, &ctx.settings.cluster_cidrs).is_empty();
        if let Some(condition) = condition(node, has_route, now) {
            let patch = json!({"status": {"conditions": [condition]}});
            match ctx.patch_status::<Node>(&node.key(), &Patch::Strategic(patch)).await {
                Err(error) if !error.is_not_found() => return Err(error.into()),
                _ => {}
            }
        }
    }
    match failed {
        Some((_, error)) => Err(error.into()),
        None => Ok(ReconcileAction::AwaitChange),
    }
}

/// The condition to set on a node, or `None` if it is up to date.
fn condition(node: &Node, has_route: bool, now: Timestamp) -> Option<NodeCondition> {
    let (status, reason, message) = match has_route {
        true => ("False", "RouteCreated", "RouteController created a route"),
        false => ("True", "NoRouteCreated", "RouteController failed to create a route"),
    };
    let current = node::condition(node, NETWORK_UNAVAILABLE);
    if current.is_some_and(|current| current.status == status && current.reason.as_deref() == Some(reason)) {
        return None;
    }
    Some(NodeCondition {
        type_: NETWORK_UNAVAILABLE.into(),
        status: status.into(),
        reason: Some(reason.into()),
        message: Some(message.into()),
        last_transition_time: Some(Time(now)),
        last_heartbeat_time: None,
    })
}
