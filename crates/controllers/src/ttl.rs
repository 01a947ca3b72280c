//! TTL controller: annotates nodes with the time for which the kubelet may cache Secrets and ConfigMaps. It
//! grows with the number of nodes.
//!
//! Upstream: `pkg/controller/ttl`.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use k8s_openapi::api::core::v1::Node;
use reconcile::{Controller, Ctx, Error, Key, Object, ObjectUpdate, Patch, ReconcileAction};
use serde_json::json;

const TTL_ANNOTATION: &str = "node.alpha.kubernetes.io/ttl";
const WORKERS: usize = 5;
/// Minimum and maximum number of nodes, and the TTL in seconds. The ranges overlap (hysteresis), so that
/// adding and removing a node does not change all nodes back and forth.
const TTL_BOUNDARIES: &[(usize, usize, u32)] =
    &[(0, 100, 0), (90, 500, 15), (450, 1000, 30), (900, 2000, 60), (1800, usize::MAX, 300)];

pub async fn run(ctx: Ctx) {
    let controller = Controller::new("ttlcontroller", &ctx);
    let boundary = Arc::new(AtomicUsize::new(0));
    let (nodes, known) = (ctx.caches.nodes().clone(), boundary.clone());
    controller.on(ctx.caches.nodes(), move |changed: &ObjectUpdate<'_, Node>, enqueue| {
        let before = known.load(Relaxed);
        let after = next_boundary(before, nodes.len());
        known.store(after, Relaxed);
        if before != after {
            nodes.all().iter().for_each(|node| enqueue(node.key()));
        }
        if changed.after.is_some() {
            enqueue(changed.latest().key());
        }
    });
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let (ctx, boundary) = (work.clone(), boundary.clone());
        async move { reconcile(&ctx, TTL_BOUNDARIES[boundary.load(Relaxed)].2, &key).await }
    };
    controller.run(&ctx, WORKERS, reconcile).await
}

/// The boundary for a number of nodes, starting from the current one.
fn next_boundary(mut boundary: usize, nodes: usize) -> usize {
    while nodes > TTL_BOUNDARIES[boundary].1 {
        boundary += 1;
    }
    while nodes < TTL_BOUNDARIES[boundary].0 {
        boundary -= 1;
    }
    boundary
}

async fn reconcile(ctx: &Ctx, seconds: u32, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(node) = ctx.caches.nodes().get(key) else { return Ok(ReconcileAction::Forget) };
    if node.annotation(TTL_ANNOTATION).and_then(|text| text.parse().ok()) == Some(seconds) {
        return Ok(ReconcileAction::AwaitChange);
    }
    let patch = json!({"metadata": {"annotations": {TTL_ANNOTATION: seconds.to_string()}}});
    match ctx.patch::<Node>(key, &Patch::Strategic(patch)).await {
        Err(error) if !error.is_not_found() => Err(error),
        _ => Ok(ReconcileAction::AwaitChange),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boundaries_overlap() {
        let walk = [1, 100, 101, 95, 89, 1000, 1001, 900, 899, 5000, 0];
        let mut boundary = 0;
        let seconds: Vec<u32> = walk
            .iter()
            .map(|nodes| {
                boundary = next_boundary(boundary, *nodes);
                TTL_BOUNDARIES[boundary].2
            })
            .collect();
        assert_eq!(seconds, [0, 0, 15, 15, 0, 30, 60, 60, 30, 300, 0]);
    }
}
