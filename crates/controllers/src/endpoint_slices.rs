//! Keeps the EndpointSlices of every Service that finds its pods by labels.
//!
//! What the slices should hold is [`plan`], how it is fitted into them [`pack`], for whom it is meant [`hints`].

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
use reconcile::{Changed, Controller, Ctx, Error, Key, Next, Object, keys};

use crate::backends::{self, Triggers};
use crate::node;
use hints::Wish;
use pack::{Changes, MANAGED_BY, SERVICE_NAME};
use plan::{MANAGER, Observed, plan};

const WORKERS: usize = 5;
const ZONE: &str = "topology.kubernetes.io/zone";

pub async fn run(ctx: Ctx) {
    let ctx = Ctx { events: ctx.events.from("endpoint-slice-controller"), ..ctx };
    let controller = Controller::new("endpoint_slice", &ctx);
    controller.on(ctx.caches.services(), keys::own::<Service>);
    controller.on(ctx.caches.pods(), backends::services_of(ctx.caches.services()));
    controller.on(ctx.caches.endpoint_slices(), service_of);
    controller.on(ctx.caches.nodes(), services_near(&ctx));
    let slices =
        Arc::new(Slices { ctx: ctx.clone(), triggers: Triggers::default(), hinted: Mutex::default() });
    let reconcile = move |key: Key| {
        let slices = slices.clone();
        async move { slices.reconcile(&key).await }
    };
    controller.run(&ctx, WORKERS, reconcile).await
}

/// The Services of a slice of ours, before and after.
fn service_of(changed: &Changed<'_, EndpointSlice>, enqueue: &mut dyn FnMut(Key)) {
    for slice in [changed.before, changed.after].into_iter().flatten() {
        if slice.label(MANAGED_BY) == Some(MANAGER)
            && let Some(service) = slice.label(SERVICE_NAME)
        {
            enqueue(Key::new(slice.namespace(), service));
        }
    }
}

/// A node that comes or goes, or changes its zone, concerns the Services of its pods; one that becomes ready, also
/// those whose endpoints are shared out among zones.
fn services_near(ctx: &Ctx) -> impl Fn(&Changed<'_, Node>, &mut dyn FnMut(Key)) + Send + Sync + use<> {
    let caches = ctx.caches.clone();
    move |changed, enqueue| {
        let zone = |node: Option<&Arc<Node>>| node.map(|node| node.label(ZONE).map(str::to_owned));
        let ready = |node: Option<&Arc<Node>>| node.is_some_and(|node| node::is_ready(node));
        let moved = zone(changed.before) != zone(changed.after);
        if moved {
            let pods = caches.pods().indexed("node", changed.newest().name());
            for pod in pods {
                for service in caches.services().in_namespace(pod.namespace()) {
                    if backends::selects(&service, |name| pod.label(name)) {
                        enqueue(service.key());
                    }
                }
            }
        }
        if moved || ready(changed.before) != ready(changed.after) {
            let services = caches.services().all().into_iter();
            let shared = services.filter(|service| Wish::of(service) == Wish::Proportional);
            shared.for_each(|service| enqueue(service.key()));
        }
    }
}

struct Slices {
    ctx: Ctx,
    triggers: Triggers,
    /// The Services whose endpoints are meant for zones.
    hinted: Mutex<HashSet<Key>>,
}

impl Slices {
    async fn reconcile(&self, key: &Key) -> Result<Next, Error> {
        let caches = &self.ctx.caches;
        let Some(service) = caches.services().get(key) else {
            self.triggers.forget(key);
            self.hinted.lock().remove(key);
            return Ok(Next::Change);
        };
        let Some(spec) = backends::selecting(&service) else { return Ok(Next::Change) };
        let pods = caches
            .pods()
            .labelled(service.namespace(), |labels| backends::selects(&service, |name| labels.get(name)));
        let mut slices = caches.endpoint_slices().indexed("service", &key.to_string());
        slices.retain(|slice| slice.label(MANAGED_BY) == Some(MANAGER) && !slice.is_deleting());
        let trigger = self.triggers.learn(&service, &pods);
        let shares = match Wish::of(&service) {
            Wish::Proportional => hints::shares(caches.nodes().all().iter().map(Arc::as_ref)),
            _ => None,
        };
        let node = |name: &str| caches.nodes().get(&Key::new("", name));
        let hinted = self.hinted.lock().contains(key);
        let observed = Observed {
            service: &service,
            spec,
            pods: &pods,
            slices: &slices,
            node: &node,
            shares: shares.as_ref(),
            hinted,
        };
        let plan = plan(&observed);
        let result = self.apply(plan.changes, trigger).await;
        match plan.hinted {
            true => self.hinted.lock().insert(key.clone()),
            false => self.hinted.lock().remove(key),
        };
        for told in plan.told {
            match plan.hinted {
                true => self.ctx.events.normal(&*service, "TopologyAwareHintsEnabled", told),
                false => self.ctx.events.warning(&*service, "TopologyAwareHintsDisabled", told),
            }
        }
        match result {
            Err(error) if error.is_namespace_terminating() => Ok(Next::Change),
            Err(error) if error.is_conflict() => Err(error),
            Err(error) => {
                let message = format!("Error updating Endpoint Slices for Service {key}: {error}");
                self.ctx.events.warning(&*service, "FailedToUpdateEndpointSlices", message);
                Err(error)
            }
            Ok(()) => Ok(Next::Change),
        }
    }

    async fn apply(&self, changes: Changes, trigger: Option<jiff::Timestamp>) -> Result<(), Error> {
        for mut slice in changes.create {
            backends::set_trigger(&mut slice.metadata.annotations, trigger);
            self.ctx.create(&slice).await?;
        }
        for mut slice in changes.update {
            backends::set_trigger(&mut slice.metadata.annotations, trigger);
            self.ctx.replace(&slice).await?;
        }
        for slice in changes.delete {
            self.ctx.delete(&*slice).await?;
        }
        Ok(())
    }
}
