//! Keeps the Endpoints of every Service that finds its pods by labels, and takes away those of Services that are
//! gone.

mod plan;
pub mod subsets;

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Endpoints, Service};
use reconcile::{Controller, Ctx, Delete, Error, Key, Next, Object, keys};

use crate::backends::{self, Triggers};
use plan::plan;

const WORKERS: usize = 5;
const LEADER: &str = "control-plane.alpha.kubernetes.io/leader";

pub async fn run(ctx: Ctx) {
    let ctx = Ctx {
        client: ctx.client.acting_as("endpoint-controller"),
        events: ctx.events.from("endpoint-controller"),
        ..ctx
    };
    let controller = Controller::new("endpoint", &ctx);
    controller.on(ctx.caches.services(), keys::own::<Service>);
    controller.on(ctx.caches.pods(), backends::services_of(ctx.caches.services()));
    // Those that somebody makes without a Service are theirs.
    controller.on(ctx.caches.endpoints(), |changed, enqueue| {
        if changed.after.is_none() {
            enqueue(changed.newest().key());
        }
    });
    let enqueue = controller.enqueue();
    let endpoints = ctx.caches.endpoints().clone();
    // Services may have gone while nobody was looking.
    let leftovers = async {
        endpoints.filled().await;
        endpoints.all().iter().for_each(|left| enqueue.now(left.key()));
        std::future::pending::<()>().await
    };
    let state = Arc::new((ctx.clone(), Triggers::default()));
    let reconcile = move |key: Key| {
        let state = state.clone();
        async move { reconcile(&state.0, &state.1, &key).await }
    };
    tokio::select! {
        () = controller.run(&ctx, WORKERS, reconcile) => {}
        () = leftovers => {}
    }
}

async fn reconcile(ctx: &Ctx, triggers: &Triggers, key: &Key) -> Result<Next, Error> {
    let current = ctx.caches.endpoints().get(key);
    let Some(service) = ctx.caches.services().get(key) else {
        triggers.forget(key);
        // Some hold elections on Endpoints that no Service has.
        if let Some(left) = current.filter(|left| left.annotation(LEADER).is_none()) {
            ctx.delete_with::<Endpoints>(key, &Delete::uid(left.uid())).await?;
        }
        return Ok(Next::Change);
    };
    let Some(spec) = backends::selecting(&service) else { return Ok(Next::Change) };
    let pods = ctx
        .caches
        .pods()
        .labelled(service.namespace(), |labels| backends::selects(&service, |name| labels.get(name)));
    let trigger = triggers.learn(&service, &pods);
    let Some(wanted) = plan(&service, spec, &pods, current.as_deref(), trigger) else {
        return Ok(Next::Change);
    };
    let (written, reason, what) = match current {
        Some(_) => (ctx.replace(&wanted).await, "FailedToUpdateEndpoint", "update endpoint"),
        None => (ctx.create(&wanted).await, "FailedToCreateEndpoint", "create endpoint for service"),
    };
    match written {
        Ok(_) => Ok(Next::Change),
        Err(error) if error.is_namespace_terminating() => Ok(Next::Change),
        Err(error) if error.is_conflict() => Err(error),
        Err(error) => {
            ctx.events.warning(&wanted, reason, format!("Failed to {what} {key}: {error}"));
            Err(error)
        }
    }
}
