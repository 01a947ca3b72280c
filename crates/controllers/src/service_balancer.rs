//! Services of type LoadBalancer: asks the cloud to bring traffic to them, and says in their status where from.
//!
//! Without a cloud the nodes themselves do ([`nodes`]), as in k3s. One Service is looked at at a time, so that no two
//! get the same address or port.

pub mod nodes;
mod plan;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{LoadBalancerStatus, Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use reconcile::cloud::{Around, Cloud, CloudError};
use reconcile::{Changed, Controller, Ctx, Error, Key, Next, Object, Patch};
use serde_json::json;

use plan::Wanted;

/// Keeps a Service until what was made for it outside the cluster is gone.
const CLEANUP: &str = "service.kubernetes.io/load-balancer-cleanup";

/// Why a Service is not balanced.
#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error(transparent)]
    Api(#[from] Error),
    #[error("load balancer")]
    Cloud(#[source] CloudError),
}

pub async fn run(ctx: Ctx) {
    let Some(cloud) = ctx.settings.cloud.0.clone().filter(|cloud| cloud.balancer().is_some()) else { return };
    let ctx = Ctx {
        client: ctx.client.acting_as("service-controller"),
        events: ctx.events.from("service-controller"),
        ..ctx
    };
    let controller = Controller::new("service", &ctx);
    let known = ctx.caches.services().clone();
    controller.on(ctx.caches.services(), move |changed: &Changed<'_, Service>, enqueue| {
        let concerned = [changed.before, changed.after].into_iter().flatten();
        if !concerned.clone().any(|service| plan::is_balanced(service)) {
            return;
        }
        enqueue(changed.newest().key());
        // What one gives up another may have been waiting for.
        if changed.before.is_some_and(|before| !plan::addresses(before).is_empty()) {
            let waiting =
                |service: &&Arc<Service>| plan::is_balanced(service) && plan::addresses(service).is_empty();
            known.all().iter().filter(waiting).for_each(|service| enqueue(service.key()));
        }
    });
    let known = ctx.caches.services().clone();
    controller.on(ctx.caches.nodes(), move |changed: &Changed<'_, Node>, enqueue| {
        let suited = |node: Option<&Arc<Node>>| {
            node.filter(|node| plan::takes_traffic(node)).map(|node| plan::reached_at(node))
        };
        if suited(changed.before) != suited(changed.after) {
            known
                .all()
                .iter()
                .filter(|service| plan::is_balanced(service))
                .for_each(|service| enqueue(service.key()));
        }
    });
    let known = ctx.caches.services().clone();
    controller.on(ctx.caches.endpoint_slices(), move |changed: &Changed<'_, EndpointSlice>, enqueue| {
        let slice = changed.newest();
        let Some(name) = slice.label("kubernetes.io/service-name") else { return };
        let key = Key::new(slice.namespace(), name);
        if known.get(&key).is_some_and(|service| plan::is_balanced(&service) && plan::is_local(&service)) {
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

async fn reconcile(ctx: &Ctx, cloud: &dyn Cloud, key: &Key) -> Result<Next, Failed> {
    let Some(service) = ctx.caches.services().get(key) else { return Ok(Next::Forget) };
    let Some(balancer) = cloud.balancer() else { return Ok(Next::Change) };
    let held = service.metadata.finalizers.iter().flatten().any(|name| name == CLEANUP);
    match plan::wanted(&service) {
        Wanted::Nothing => {}
        Wanted::Removed => {
            if held || !plan::addresses(&service).is_empty() {
                ctx.events.normal(&*service, "DeletingLoadBalancer", "Deleting load balancer");
                if let Err(error) = balancer.remove(&service).await {
                    let message =
                        format!("Error syncing load balancer: failed to delete load balancer: {error}");
                    ctx.events.warning(&*service, "SyncLoadBalancerFailed", message);
                    return Err(Failed::Cloud(error));
                }
                write(ctx, &service, &LoadBalancerStatus::default(), held.then_some(false)).await?;
                ctx.events.normal(&*service, "DeletedLoadBalancer", "Deleted load balancer");
            }
        }
        Wanted::Balanced => {
            let around = around(ctx, &service);
            if around.nodes.is_empty() {
                let message = "There are no available nodes for LoadBalancer";
                ctx.events.warning(&*service, "UnAvailableLoadBalancer", message);
            }
            if balancer.needs_cleanup() && !held {
                let now = service.status.as_ref().and_then(|status| status.load_balancer.clone());
                write(ctx, &service, &now.unwrap_or_default(), Some(true)).await?;
            }
            let status = match balancer.ensure(&service, &around).await {
                Ok(status) => status,
                Err(error) => {
                    let message =
                        format!("Error syncing load balancer: failed to ensure load balancer: {error}");
                    ctx.events.warning(&*service, "SyncLoadBalancerFailed", message);
                    return Err(Failed::Cloud(error));
                }
            };
            let before =
                plan::ingress(service.status.as_ref().and_then(|status| status.load_balancer.as_ref()));
            if before == plan::ingress(Some(&status)) {
                return Ok(Next::Change);
            }
            let first = before.is_empty();
            if first {
                ctx.events.normal(&*service, "EnsuringLoadBalancer", "Ensuring load balancer");
            }
            write(ctx, &service, &status, None).await?;
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
    Ok(Next::Change)
}

fn around(ctx: &Ctx, service: &Service) -> Around {
    let mut nodes = ctx.caches.nodes().all();
    nodes.retain(|node| plan::takes_traffic(node));
    let mut others = ctx.caches.services().all();
    others.retain(|other| other.key() != service.key() && plan::is_balanced(other));
    let slices = ctx.caches.endpoint_slices().indexed("service", &service.key().to_string());
    let serving: BTreeSet<String> = slices.iter().flat_map(|slice| plan::serving(slice)).collect();
    Around { nodes, serving, others }
}

/// Writes where the Service is reached, and whether it has to be cleaned up after.
async fn write(
    ctx: &Ctx,
    service: &Service,
    status: &LoadBalancerStatus,
    held: Option<bool>,
) -> Result<(), Error> {
    let mut patch = json!({"status": {"loadBalancer": {"ingress": status.ingress}}});
    if let Some(held) = held {
        let mut finalizers = service.metadata.finalizers.clone().unwrap_or_default();
        finalizers.retain(|name| name != CLEANUP);
        if held {
            finalizers.push(CLEANUP.into());
        }
        patch["metadata"] =
            json!({"finalizers": finalizers, "resourceVersion": service.metadata.resource_version});
    }
    match ctx.patch_status::<Service>(&service.key(), &Patch::Merge(patch)).await {
        Err(error) if error.is_not_found() => Ok(()),
        other => other.map(drop),
    }
}
