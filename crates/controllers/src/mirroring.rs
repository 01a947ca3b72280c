//! EndpointSlice mirroring controller: mirrors user-managed Endpoints to EndpointSlices.
//!
//! Upstream: `pkg/controller/endpointslicemirroring`.

mod plan;

use k8s_openapi::api::core::v1::{Endpoints, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use reconcile::{Controller, Ctx, Error, Key, Object, ObjectUpdate, ReconcileAction, keys};

use crate::endpoint_slices::pack::{MANAGED_BY, SERVICE_NAME};
use plan::{MANAGER, plan};

const WORKERS: usize = 5;

pub async fn run(ctx: Ctx) {
    let ctx = Ctx {
        client: ctx.client.impersonate("endpointslicemirroring-controller"),
        events: ctx.events.from("endpoint-slice-mirroring-controller"),
        ..ctx
    };
    let controller = Controller::new("endpoint_slice_mirroring", &ctx);
    controller.on(ctx.caches.endpoints(), keys::own::<Endpoints>);
    controller.on(ctx.caches.services(), keys::own::<Service>);
    controller.on(ctx.caches.endpoint_slices(), |changed: &ObjectUpdate<'_, EndpointSlice>, enqueue| {
        let slice = changed.latest();
        if slice.label(MANAGED_BY) == Some(MANAGER)
            && let Some(name) = slice.label(SERVICE_NAME)
        {
            enqueue(Key::new(slice.namespace(), name));
        }
    });
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let ctx = work.clone();
        async move { reconcile(&ctx, &key).await }
    };
    controller.run(&ctx, WORKERS, reconcile).await
}

async fn reconcile(ctx: &Ctx, key: &Key) -> Result<ReconcileAction, Error> {
    let mut slices = ctx.caches.endpoint_slices().indexed("service", &key.to_string());
    slices.retain(|slice| slice.label(MANAGED_BY) == Some(MANAGER) && !slice.is_deleting());
    let endpoints = ctx.caches.endpoints().get(key);
    let service = ctx.caches.services().get(key);
    let plan = plan(endpoints.as_deref(), service.as_deref(), &slices);
    if let Some(endpoints) = &endpoints {
        for (reason, message) in plan.events {
            ctx.events.warning(&**endpoints, reason, message);
        }
    }
    for slice in &plan.changes.create {
        match ctx.create(slice).await {
            Err(error) if error.is_namespace_terminating() => return Ok(ReconcileAction::AwaitChange),
            other => drop(other?),
        }
    }
    for slice in &plan.changes.update {
        ctx.replace(slice).await?;
    }
    for slice in &plan.changes.delete {
        ctx.delete(&**slice).await?;
    }
    Ok(ReconcileAction::AwaitChange)
}
