//! Node IPAM controller: allocates pod CIDRs to nodes from the cluster CIDRs.
//!
//! Upstream: `pkg/controller/nodeipam`.

mod cidr_set;

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use parking_lot::Mutex;
use reconcile::{Controller, Ctx, Error, EventType, Key, Object, ObjectUpdate, Patch, ReconcileAction};
use serde_json::json;

use cidr_set::CidrSet;

const WORKERS: usize = 8;

pub async fn run(ctx: Ctx) {
    let cidr_sets: Result<Vec<CidrSet>, _> =
        ctx.settings.cluster_cidrs.iter().map(|text| CidrSet::parse(text)).collect();
    let mut cidr_sets = match cidr_sets {
        Ok(cidr_sets) if cidr_sets.is_empty() => return,
        Ok(cidr_sets) => cidr_sets,
        Err(error) => {
            tracing::error!(%error, "invalid cluster CIDR, nodes get no pod CIDRs");
            return;
        }
    };
    for cidr_set in &mut cidr_sets {
        // Pod CIDRs must not overlap with the Service CIDRs.
        ctx.settings.service_cidrs.iter().for_each(|service| cidr_set.mark_used(service));
    }
    let ctx = Ctx {
        client: ctx.client.impersonate("node-controller"),
        events: ctx.events.from("cidrAllocator"),
        ..ctx
    };
    let cidr_sets = Arc::new(Mutex::new(cidr_sets));
    let controller = Controller::new("cidrallocator_node", &ctx);
    let known = cidr_sets.clone();
    // CIDRs of existing nodes are marked as used in the event handler. The workers start after the initial
    // sync, so all existing CIDRs are known before the first allocation.
    controller.on(ctx.caches.nodes(), move |changed: &ObjectUpdate<'_, Node>, enqueue| {
        let node = changed.latest();
        for (cidr_set, cidr) in known.lock().iter_mut().zip(pod_cidrs(node)) {
            match changed.after {
                Some(_) => cidr_set.mark_used(cidr),
                None => cidr_set.release(cidr),
            }
        }
        if changed.after.is_some() {
            enqueue(node.key());
        }
    });
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let (ctx, cidr_sets) = (work.clone(), cidr_sets.clone());
        async move { reconcile(&ctx, &cidr_sets, &key).await }
    };
    controller.run(&ctx, WORKERS, reconcile).await
}

fn pod_cidrs(node: &Node) -> &[String] {
    node.spec.as_ref().and_then(|spec| spec.pod_cidrs.as_deref()).unwrap_or_default()
}

async fn reconcile(ctx: &Ctx, cidr_sets: &Mutex<Vec<CidrSet>>, key: &Key) -> Result<ReconcileAction, Error> {
    let Some(node) = ctx.caches.nodes().get(key) else { return Ok(ReconcileAction::Forget) };
    if node.is_deleting() || !pod_cidrs(&node).is_empty() {
        return Ok(ReconcileAction::AwaitChange);
    }
    let allocated: Vec<Option<String>> = cidr_sets.lock().iter_mut().map(CidrSet::allocate_next).collect();
    let release_all = || {
        let mut cidr_sets = cidr_sets.lock();
        let allocated = cidr_sets.iter_mut().zip(&allocated);
        allocated.for_each(|(cidr_set, cidr)| cidr.iter().for_each(|cidr| cidr_set.release(cidr)));
    };
    let Some(cidrs) = allocated.iter().cloned().collect::<Option<Vec<String>>>() else {
        release_all();
        record_node_status_change(ctx, &node, "CIDRNotAvailable");
        // CIDRs may be released when other nodes are deleted.
        return Ok(ReconcileAction::RequeueAfter(std::time::Duration::from_secs(30)));
    };
    let patch = json!({"metadata": {"uid": node.uid()}, "spec": {"podCIDR": cidrs[0], "podCIDRs": cidrs}});
    match ctx.patch::<Node>(key, &Patch::Strategic(patch)).await {
        Ok(_) => Ok(ReconcileAction::AwaitChange),
        Err(error) => {
            release_all();
            if error.is_not_found() {
                return Ok(ReconcileAction::AwaitChange);
            }
            record_node_status_change(ctx, &node, "CIDRAssignmentFailed");
            Err(error)
        }
    }
}

fn record_node_status_change(ctx: &Ctx, node: &Node, what: &str) {
    let mut about = reconcile::reference(node);
    about.resource_version = None;
    ctx.events.record(about, EventType::Normal, what, format!("Node {} status is now: {what}", node.name()));
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::test_cluster::{TestCluster, wait_for};

    #[tokio::test]
    async fn each_node_has_unique_cidr() {
        let test_cluster = TestCluster::start(&["node-ipam-controller"]).await;
        for name in ["b", "a", "c"] {
            let cidrs = if name == "b" {
                json!({"podCIDR": "10.42.0.0/24", "podCIDRs": ["10.42.0.0/24", "2001:db8:42::/64"]})
            } else {
                json!({})
            };
            let value = json!({"metadata": {"name": name}, "spec": cidrs});
            test_cluster
                .client
                .request(http::Method::POST, "/api/v1/nodes", Some(&value))
                .await
                .expect("a node");
        }
        let all = || async {
            let nodes: Vec<Node> = test_cluster.client.list("").await.ok()?;
            let cidrs: BTreeSet<String> = nodes.iter().flat_map(pod_cidrs).cloned().collect();
            (cidrs.len() == 6).then_some(cidrs)
        };
        let cidrs = wait_for("three networks of each kind", all).await;
        assert!(cidrs.contains("10.42.1.0/24") || cidrs.contains("10.42.2.0/24"), "{cidrs:?}");
    }
}
