//! EndpointSlice controller: maintains the EndpointSlices of Services with selectors.
//!
//! [`plan`](mod@plan) computes the endpoints, [`pack`] distributes them over slices and [`hints`] adds topology hints.
//!
//! Upstream: `pkg/controller/endpointslice` and `k8s.io/endpointslice`.

mod hints;
pub mod pack;
mod plan;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use parking_lot::Mutex;
use reconcile::{Controller, Ctx, Error, Key, Object, ObjectUpdate, ReconcileAction, keys};

use crate::backends::{self, TriggerTimeTracker};
use crate::node;
use hints::TrafficDistribution;
use pack::{MANAGED_BY, SERVICE_NAME, SliceChanges};
use plan::{MANAGER, ServiceSnapshot, plan};

const WORKERS: usize = 5;
const ZONE: &str = "topology.kubernetes.io/zone";

pub async fn run(ctx: Ctx) {
    let ctx = Ctx { events: ctx.events.from("endpoint-slice-controller"), ..ctx };
    let controller = Controller::new("endpoint_slice", &ctx);
    controller.on(ctx.caches.services(), keys::own::<Service>);
    controller.on(ctx.caches.pods(), backends::services_of(ctx.caches.services()));
    controller.on(ctx.caches.endpoint_slices(), enqueue_service_of_slice);
    controller.on(ctx.caches.nodes(), enqueue_services_of_node(&ctx));
    let slices = Arc::new(SliceReconciler {
        ctx: ctx.clone(),
        triggers: TriggerTimeTracker::default(),
        services_with_hints: Mutex::default(),
    });
    let reconcile = move |key: Key| {
        let slices = slices.clone();
        async move { slices.reconcile(&key).await }
    };
    controller.run(&ctx, WORKERS, reconcile).await
}

/// Enqueues the Service of a slice that this controller manages, before and after a change.
fn enqueue_service_of_slice(changed: &ObjectUpdate<'_, EndpointSlice>, enqueue: &mut dyn FnMut(Key)) {
    for slice in [changed.before, changed.after].into_iter().flatten() {
        if slice.label(MANAGED_BY) == Some(MANAGER)
            && let Some(service) = slice.label(SERVICE_NAME)
        {
            enqueue(Key::new(slice.namespace(), service));
        }
    }
}

/// Enqueues the Services of a node's pods if the node is added, removed or changes its zone. If its readiness
/// changes, the Services with proportional hints are enqueued, because their CPU shares change.
fn enqueue_services_of_node(
    ctx: &Ctx,
) -> impl Fn(&ObjectUpdate<'_, Node>, &mut dyn FnMut(Key)) + Send + Sync + use<> {
    let caches = ctx.caches.clone();
    move |changed, enqueue| {
        let zone = |node: Option<&Arc<Node>>| node.map(|node| node.label(ZONE).map(str::to_owned));
        let ready = |node: Option<&Arc<Node>>| node.is_some_and(|node| node::is_ready(node));
        let zone_changed = zone(changed.before) != zone(changed.after);
        if zone_changed {
            let pods = caches.pods().indexed("node", changed.latest().name());
            for pod in pods {
                for service in caches.services().in_namespace(pod.namespace()) {
                    if backends::matches_selector(&service, |name| pod.label(name)) {
                        enqueue(service.key());
                    }
                }
            }
        }
        if zone_changed || ready(changed.before) != ready(changed.after) {
            let services = caches.services().all().into_iter();
            let shared = services
                .filter(|service| TrafficDistribution::of(service) == TrafficDistribution::Proportional);
            shared.for_each(|service| enqueue(service.key()));
        }
    }
}

struct SliceReconciler {
    ctx: Ctx,
    triggers: TriggerTimeTracker,
    /// Services whose endpoints have topology hints.
    services_with_hints: Mutex<HashSet<Key>>,
}

impl SliceReconciler {
    async fn reconcile(&self, key: &Key) -> Result<ReconcileAction, Error> {
        let caches = &self.ctx.caches;
        let Some(service) = caches.services().get(key) else {
            self.triggers.forget(key);
            self.services_with_hints.lock().remove(key);
            return Ok(ReconcileAction::AwaitChange);
        };
        let Some(spec) = backends::spec_with_selector(&service) else {
            return Ok(ReconcileAction::AwaitChange);
        };
        let pods = caches.pods().list_by_labels(service.namespace(), |labels| {
            backends::matches_selector(&service, |name| labels.get(name))
        });
        let mut slices = caches.endpoint_slices().indexed("service", &key.to_string());
        slices.retain(|slice| slice.label(MANAGED_BY) == Some(MANAGER) && !slice.is_deleting());
        let trigger = self.triggers.trigger_time(&service, &pods);
        let shares = match TrafficDistribution::of(&service) {
            TrafficDistribution::Proportional => {
                hints::cpu_share_by_zone(caches.nodes().all().iter().map(Arc::as_ref))
            }
            _ => None,
        };
        let node = |name: &str| caches.nodes().get(&Key::new("", name));
        let had_hints = self.services_with_hints.lock().contains(key);
        let observed = ServiceSnapshot {
            service: &service,
            spec,
            pods: &pods,
            slices: &slices,
            node: &node,
            shares: shares.as_ref(),
            had_hints,
        };
        let plan = plan(&observed);
        let result = self.apply(plan.changes, trigger).await;
        match plan.has_hints {
            true => self.services_with_hints.lock().insert(key.clone()),
            false => self.services_with_hints.lock().remove(key),
        };
        for event in plan.events {
            match plan.has_hints {
                true => self.ctx.events.normal(&*service, "TopologyAwareHintsEnabled", event),
                false => self.ctx.events.warning(&*service, "TopologyAwareHintsDisabled", event),
            }
        }
        match result {
            Err(error) if error.is_namespace_terminating() => Ok(ReconcileAction::AwaitChange),
            Err(error) if error.is_conflict() => Err(error),
            Err(error) => {
                let message = format!("Error updating Endpoint Slices for Service {key}: {error}");
                self.ctx.events.warning(&*service, "FailedToUpdateEndpointSlices", message);
                Err(error)
            }
            Ok(()) => Ok(ReconcileAction::AwaitChange),
        }
    }

    async fn apply(&self, changes: SliceChanges, trigger: Option<jiff::Timestamp>) -> Result<(), Error> {
        for mut slice in changes.create {
            backends::set_trigger_annotation(&mut slice.metadata.annotations, trigger);
            self.ctx.create(&slice).await?;
        }
        for mut slice in changes.update {
            backends::set_trigger_annotation(&mut slice.metadata.annotations, trigger);
            self.ctx.replace(&slice).await?;
        }
        for slice in changes.delete {
            self.ctx.delete(&*slice).await?;
        }
        Ok(())
    }
}
