//! Pods on simulated nodes: their status follows their simulated lifecycle, and they are removed
//! when they are deleted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use k8s_openapi::api::core::v1::{Node, Pod, PodStatus};
use reconcile::{Controller, Ctx, DeleteOptions, Error, Key, Object as _, ReconcileAction};

use crate::MISSING_IMAGES_ANNOTATION;
use crate::nodes::is_alive;
use crate::pod_lifecycle::{self, PodEnvironment};

/// Concurrent syncs; most of the time is spent waiting for the server.
const WORKERS: usize = 64;

pub async fn run(ctx: Ctx, events: bool) {
    let controller = Controller::new("simulated-pods", &ctx);
    controller.on(ctx.caches.pods(), |changed, enqueue| {
        if changed.after.is_some_and(|pod| node_of(pod).is_some()) {
            enqueue(changed.latest().key());
        }
    });
    // The pods of a node that comes back are synced again.
    let pods = ctx.caches.pods().clone();
    controller.on(ctx.caches.nodes(), move |changed, enqueue| {
        let was_alive = changed.before.is_some_and(|node| is_alive(node));
        if !was_alive && changed.after.is_some_and(|node| is_alive(node)) {
            pods.indexed("node", changed.latest().name()).iter().for_each(|pod| enqueue(pod.key()));
        }
    });
    let addresses = Arc::new(AtomicU32::new(0));
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let (ctx, addresses) = (work.clone(), addresses.clone());
        async move { reconcile(&ctx, &key, &addresses, events).await }
    };
    controller.run(&ctx, WORKERS, reconcile).await;
}

fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

async fn reconcile(
    ctx: &Ctx,
    key: &Key,
    addresses: &AtomicU32,
    events: bool,
) -> Result<ReconcileAction, Error> {
    let Some(pod) = ctx.caches.pods().get(key) else { return Ok(ReconcileAction::Forget) };
    let node = node_of(&pod).and_then(|name| ctx.caches.nodes().get(&Key::new("", name)));
    let Some(node) = node.filter(|node| is_alive(node)) else { return Ok(ReconcileAction::AwaitChange) };
    if pod.is_deleting() {
        return finalize(ctx, &pod).await;
    }
    let status = pod.status.clone().unwrap_or_default();
    if matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) {
        return Ok(ReconcileAction::AwaitChange);
    }
    let pod_ip = status.pod_ip.clone().unwrap_or_else(|| next_address(addresses));
    let missing = node.annotation(MISSING_IMAGES_ANNOTATION).unwrap_or_default();
    let environment = PodEnvironment { node_ip: address_of(&node), pod_ip: &pod_ip, missing };
    let snapshot = pod_lifecycle::snapshot_at(&pod, &environment, ctx.clock.now());
    if snapshot.status != status {
        if events {
            record_events(ctx, &pod, &status, &snapshot.status);
        }
        let updated = Pod { status: Some(snapshot.status), ..Pod::clone(&pod) };
        ignore_not_found(ctx.replace_status(&updated).await.map(drop))?;
    }
    Ok(snapshot.next_change.map_or(ReconcileAction::AwaitChange, ReconcileAction::RequeueAt))
}

/// Stops the pod's containers and removes the pod.
async fn finalize(ctx: &Ctx, pod: &Pod) -> Result<ReconcileAction, Error> {
    let status = pod_lifecycle::terminated_status(pod, ctx.clock.now());
    if pod.status.as_ref() != Some(&status) {
        let updated = Pod { status: Some(status), ..pod.clone() };
        ignore_not_found(ctx.replace_status(&updated).await.map(drop))?;
    }
    if pod.metadata.deletion_grace_period_seconds != Some(0) {
        let options = DeleteOptions { grace_seconds: Some(0), ..DeleteOptions::uid(pod.uid()) };
        ignore_not_found(ctx.client.delete::<Pod>(&pod.key(), &options).await)?;
    }
    Ok(ReconcileAction::AwaitChange)
}

fn ignore_not_found(result: Result<(), Error>) -> Result<(), Error> {
    match result {
        Err(error) if error.is_not_found() => Ok(()),
        other => other,
    }
}

/// Pod addresses are made up. None of them is reachable.
fn next_address(addresses: &AtomicU32) -> String {
    let number = addresses.fetch_add(1, Ordering::Relaxed);
    format!("10.{}.{}.{}", 128 + ((number / 64_516) & 63), number / 254 % 254 + 1, number % 254 + 1)
}

fn address_of(node: &Node) -> &str {
    let addresses = node.status.as_ref().and_then(|status| status.addresses.as_ref());
    let mut internal = addresses.into_iter().flatten().filter(|address| address.type_ == "InternalIP");
    internal.next().map_or("", |address| &address.address)
}

/// Records the events of a kubelet when containers start.
fn record_events(ctx: &Ctx, pod: &Pod, before: &PodStatus, after: &PodStatus) {
    let lists = [
        ("initContainers", &before.init_container_statuses, &after.init_container_statuses),
        ("containers", &before.container_statuses, &after.container_statuses),
    ];
    for (field, before, after) in lists {
        for container in after.iter().flatten().filter(|container| container.container_id.is_some()) {
            let known = before.iter().flatten().find(|known| known.name == container.name);
            if known.is_some_and(|known| known.container_id == container.container_id) {
                continue;
            }
            let mut about = reconcile::reference(pod);
            about.field_path = Some(format!("spec.{field}{{{}}}", container.name));
            let image = &container.image;
            for (reason, message) in [
                (
                    "Pulled",
                    format!(
                        "Container image {image:?} already present on machine and can be accessed by the pod"
                    ),
                ),
                ("Created", "Container created".to_owned()),
                ("Started", "Container started".to_owned()),
            ] {
                ctx.events.record(about.clone(), reconcile::EventType::Normal, reason, message);
            }
        }
    }
}
