//! Endpoints controller: maintains the Endpoints of Services with selectors, and deletes those of deleted
//! Services.
//!
//! Upstream: `pkg/controller/endpoint`.

mod plan;
pub mod subsets;

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Endpoints, Service};
use reconcile::{Controller, Ctx, DeleteOptions, Error, Key, Object, ReconcileAction, keys};

use crate::backends::{self, TriggerTimeTracker};
use plan::plan;

const WORKERS: usize = 5;
const LEADER: &str = "control-plane.alpha.kubernetes.io/leader";

pub async fn run(ctx: Ctx) {
    let ctx = Ctx {
        client: ctx.client.impersonate("endpoint-controller"),
        events: ctx.events.from("endpoint-controller"),
        ..ctx
    };
    let controller = Controller::new("endpoint", &ctx);
    controller.on(ctx.caches.services(), keys::own::<Service>);
    controller.on(ctx.caches.pods(), backends::services_of(ctx.caches.services()));
    // Endpoints without a Service belong to their creator. Only deletions are relevant.
    controller.on(ctx.caches.endpoints(), |changed, enqueue| {
        if changed.after.is_none() {
            enqueue(changed.latest().key());
        }
    });
    let enqueue = controller.enqueue();
    let endpoints = ctx.caches.endpoints().clone();
    // Services may have been deleted while the controller was not running.
    let initial_cleanup = async {
        endpoints.wait_for_sync().await;
        endpoints.all().iter().for_each(|endpoints_object| enqueue.now(endpoints_object.key()));
        std::future::pending::<()>().await
    };
    let state = Arc::new((ctx.clone(), TriggerTimeTracker::default()));
    let reconcile = move |key: Key| {
        let state = state.clone();
        async move { reconcile(&state.0, &state.1, &key).await }
    };
    tokio::select! {
        () = controller.run(&ctx, WORKERS, reconcile) => {}
        () = initial_cleanup => {}
    }
}

async fn reconcile(ctx: &Ctx, triggers: &TriggerTimeTracker, key: &Key) -> Result<ReconcileAction, Error> {
    let current = ctx.caches.endpoints().get(key);
    let Some(service) = ctx.caches.services().get(key) else {
        triggers.forget(key);
        // Endpoints without a Service may be used for leader election.
        if let Some(endpoints_object) =
            current.filter(|endpoints_object| endpoints_object.annotation(LEADER).is_none())
        {
            ctx.delete_with::<Endpoints>(key, &DeleteOptions::uid(endpoints_object.uid())).await?;
        }
        return Ok(ReconcileAction::AwaitChange);
    };
    let Some(spec) = backends::spec_with_selector(&service) else { return Ok(ReconcileAction::AwaitChange) };
    let pods = ctx.caches.pods().list_by_labels(service.namespace(), |labels| {
        backends::matches_selector(&service, |name| labels.get(name))
    });
    let trigger = triggers.trigger_time(&service, &pods);
    let Some(desired) = plan(&service, spec, &pods, current.as_deref(), trigger) else {
        return Ok(ReconcileAction::AwaitChange);
    };
    let (written, reason, what) = match current {
        Some(_) => (ctx.replace(&desired).await, "FailedToUpdateEndpoint", "update endpoint"),
        None => (ctx.create(&desired).await, "FailedToCreateEndpoint", "create endpoint for service"),
    };
    match written {
        Ok(_) => Ok(ReconcileAction::AwaitChange),
        Err(error) if error.is_namespace_terminating() => Ok(ReconcileAction::AwaitChange),
        Err(error) if error.is_conflict() => Err(error),
        Err(error) => {
            ctx.events.warning(&desired, reason, format!("Failed to {what} {key}: {error}"));
            Err(error)
        }
    }
}
