//! Service controller: lets the cloud provider create load balancers for Services of type LoadBalancer, and
//! writes their addresses to the status.
//!
//! Without a cloud provider the nodes act as load balancers ([`nodes`]), as in k3s. There is only one
//! worker, so that no two Services are assigned the same address or port.
//!
//! Upstream: `staging/src/k8s.io/cloud-provider/controllers/service`.

pub mod nodes;
mod plan;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{LoadBalancerStatus, Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use reconcile::cloud::{Cloud, CloudError, LoadBalancerContext};
use reconcile::{Controller, Ctx, Error, Key, Object, ObjectUpdate, Patch, ReconcileAction};
use serde_json::json;

use plan::LoadBalancerOperation;

/// The finalizer that keeps a Service until its load balancer is deleted.
const CLEANUP_FINALIZER: &str = "service.kubernetes.io/load-balancer-cleanup";

/// Why a load balancer could not be reconciled.
#[derive(Debug, thiserror::Error)]
enum BalancerError {
    #[error(transparent)]
    Api(#[from] Error),
    #[error("failed to reconcile load balancer")]
    Cloud(#[source] CloudError),
}

pub async fn run(ctx: Ctx) {
    let Some(cloud) = ctx.settings.cloud.0.clone().filter(|cloud| cloud.load_balancer().is_some()) else {
        return;
    };
    let ctx = Ctx {
        client: ctx.client.impersonate("service-controller"),
        events: ctx.events.from("service-controller"),
        ..ctx
    };
    let controller = Controller::new("service", &ctx);
    let known = ctx.caches.services().clone();
    controller.on(ctx.caches.services(), move |changed: &ObjectUpdate<'_, Service>, enqueue| {
        let states = [changed.before, changed.after].into_iter().flatten();
        if !states.clone().any(|service| plan::needs_balancer(service)) {
            return;
        }
        enqueue(changed.latest().key());
        // The Service may have released an address or port that another one is waiting for.
        if changed.before.is_some_and(|before| !plan::ingress_addresses(before).is_empty()) {
            let waiting = |service: &&Arc<Service>| {
                plan::needs_balancer(service) && plan::ingress_addresses(service).is_empty()
            };
            known.all().iter().filter(waiting).for_each(|service| enqueue(service.key()));
        }
    });
    let known = ctx.caches.services().clone();
    controller.on(ctx.caches.nodes(), move |changed: &ObjectUpdate<'_, Node>, enqueue| {
        let usable_addresses = |node: Option<&Arc<Node>>| {
            node.filter(|node| plan::include_node(node)).map(|node| plan::external_addresses(node))
        };
        if usable_addresses(changed.before) != usable_addresses(changed.after) {
            known
                .all()
                .iter()
                .filter(|service| plan::needs_balancer(service))
                .for_each(|service| enqueue(service.key()));
        }
    });
    let known = ctx.caches.services().clone();
    controller.on(ctx.caches.endpoint_slices(), move |changed: &ObjectUpdate<'_, EndpointSlice>, enqueue| {
        let slice = changed.latest();
        let Some(name) = slice.label("kubernetes.io/service-name") else { return };
        let key = Key::new(slice.namespace(), name);
        if known
            .get(&key)
            .is_some_and(|service| plan::needs_balancer(&service) && plan::is_local_traffic_policy(&service))
        {
            enqueue(key);
        }
    });
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let (ctx, cloud) = (work.clone(), cloud.clone());
        async move { reconcile(&ctx, &*cloud, &key).await }
    };
    controller.run(&ctx, 1, reconcile).await
}

async fn reconcile(ctx: &Ctx, cloud: &dyn Cloud, key: &Key) -> Result<ReconcileAction, BalancerError> {
    let Some(service) = ctx.caches.services().get(key) else { return Ok(ReconcileAction::Forget) };
    let Some(balancer) = cloud.load_balancer() else { return Ok(ReconcileAction::AwaitChange) };
    let has_finalizer = service.metadata.finalizers.iter().flatten().any(|name| name == CLEANUP_FINALIZER);
    match plan::load_balancer_operation(&service) {
        LoadBalancerOperation::Ignore => {}
        LoadBalancerOperation::Delete => {
            if has_finalizer || !plan::ingress_addresses(&service).is_empty() {
                ctx.events.normal(&*service, "DeletingLoadBalancer", "Deleting load balancer");
                if let Err(error) = balancer.remove(&service).await {
                    let message =
                        format!("Error syncing load balancer: failed to delete load balancer: {error}");
                    ctx.events.warning(&*service, "SyncLoadBalancerFailed", message);
                    return Err(BalancerError::Cloud(error));
                }
                patch_status(ctx, &service, &LoadBalancerStatus::default(), has_finalizer.then_some(false))
                    .await?;
                ctx.events.normal(&*service, "DeletedLoadBalancer", "Deleted load balancer");
            }
        }
        LoadBalancerOperation::Ensure => {
            let cluster_state = cluster_state(ctx, &service);
            if cluster_state.nodes.is_empty() {
                let message = "There are no available nodes for LoadBalancer";
                ctx.events.warning(&*service, "UnAvailableLoadBalancer", message);
            }
            if balancer.needs_cleanup() && !has_finalizer {
                let now = service.status.as_ref().and_then(|status| status.load_balancer.clone());
                patch_status(ctx, &service, &now.unwrap_or_default(), Some(true)).await?;
            }
            let status = match balancer.ensure(&service, &cluster_state).await {
                Ok(status) => status,
                Err(error) => {
                    let message =
                        format!("Error syncing load balancer: failed to ensure load balancer: {error}");
                    ctx.events.warning(&*service, "SyncLoadBalancerFailed", message);
                    return Err(BalancerError::Cloud(error));
                }
            };
            let before =
                plan::ingress_pairs(service.status.as_ref().and_then(|status| status.load_balancer.as_ref()));
            if before == plan::ingress_pairs(Some(&status)) {
                return Ok(ReconcileAction::AwaitChange);
            }
            let first = before.is_empty();
            if first {
                ctx.events.normal(&*service, "EnsuringLoadBalancer", "Ensuring load balancer");
            }
            patch_status(ctx, &service, &status, None).await?;
            match first {
                true => ctx.events.normal(&*service, "EnsuredLoadBalancer", "Ensured load balancer"),
                false => ctx.events.normal(
                    &*service,
                    "UpdatedLoadBalancer",
                    "Updated load balancer with new hosts",
                ),
            }
        }
    }
    Ok(ReconcileAction::AwaitChange)
}

fn cluster_state(ctx: &Ctx, service: &Service) -> LoadBalancerContext {
    let mut nodes = ctx.caches.nodes().all();
    nodes.retain(|node| plan::include_node(node));
    let mut others = ctx.caches.services().all();
    others.retain(|other| other.key() != service.key() && plan::needs_balancer(other));
    let slices = ctx.caches.endpoint_slices().indexed("service", &service.key().to_string());
    let serving: BTreeSet<String> =
        slices.iter().flat_map(|slice| plan::nodes_with_ready_endpoints(slice)).collect();
    LoadBalancerContext { nodes, serving, others }
}

/// Updates the load balancer status and, if `has_finalizer` is set, adds or removes the cleanup finalizer.
async fn patch_status(
    ctx: &Ctx,
    service: &Service,
    status: &LoadBalancerStatus,
    has_finalizer: Option<bool>,
) -> Result<(), Error> {
    let mut patch = json!({"status": {"loadBalancer": {"ingress": status.ingress}}});
    if let Some(has_finalizer) = has_finalizer {
        let mut finalizers = service.metadata.finalizers.clone().unwrap_or_default();
        finalizers.retain(|name| name != CLEANUP_FINALIZER);
        if has_finalizer {
            finalizers.push(CLEANUP_FINALIZER.into());
        }
        patch["metadata"] =
            json!({"finalizers": finalizers, "resourceVersion": service.metadata.resource_version});
    }
    match ctx.patch_status::<Service>(&service.key(), &Patch::Merge(patch)).await {
        Err(error) if error.is_not_found() => Ok(()),
        other => other.map(drop),
    }
}
