//! Gives every node a part of each of the pods' networks.

mod ranges;

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use parking_lot::Mutex;
use reconcile::{Changed, Controller, Ctx, Error, Key, Next, Object, Patch, Severity};
use serde_json::json;

use ranges::Range;

const WORKERS: usize = 8;

pub async fn run(ctx: Ctx) {
    let ranges: Result<Vec<Range>, _> =
        ctx.settings.cluster_cidrs.iter().map(|text| Range::parse(text)).collect();
    let mut ranges = match ranges {
        Ok(ranges) if ranges.is_empty() => return,
        Ok(ranges) => ranges,
        Err(error) => {
            tracing::error!(%error, "nodes get no networks for their pods");
            return;
        }
    };
    for range in &mut ranges {
        // Pods may not have the addresses of Services.
        ctx.settings.service_cidrs.iter().for_each(|service| range.occupy(service));
    }
    let ctx = Ctx {
        client: ctx.client.acting_as("node-controller"),
        events: ctx.events.from("cidrAllocator"),
        ..ctx
    };
    let ranges = Arc::new(Mutex::new(ranges));
    let controller = Controller::new("cidrallocator_node", &ctx);
    let known = ranges.clone();
    // What nodes have is taken as it is seen, so that all of it is known before anything is handed out.
    controller.on(ctx.caches.nodes(), move |changed: &Changed<'_, Node>, enqueue| {
        let node = changed.newest();
        for (range, cidr) in known.lock().iter_mut().zip(pod_cidrs(node)) {
            match changed.after {
                Some(_) => range.occupy(cidr),
                None => range.release(cidr),
            }
        }
        if changed.after.is_some() {
            enqueue(node.key());
        }
    });
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let (ctx, ranges) = (work.clone(), ranges.clone());
        async move { reconcile(&ctx, &ranges, &key).await }
    };
    controller.run(&ctx, WORKERS, reconcile).await
}

fn pod_cidrs(node: &Node) -> &[String] {
    node.spec.as_ref().and_then(|spec| spec.pod_cidrs.as_deref()).unwrap_or_default()
}

async fn reconcile(ctx: &Ctx, ranges: &Mutex<Vec<Range>>, key: &Key) -> Result<Next, Error> {
    let Some(node) = ctx.caches.nodes().get(key) else { return Ok(Next::Forget) };
    if node.is_deleting() || !pod_cidrs(&node).is_empty() {
        return Ok(Next::Change);
    }
    let taken: Vec<Option<String>> = ranges.lock().iter_mut().map(Range::take).collect();
    let give_back = || {
        let mut ranges = ranges.lock();
        let taken = ranges.iter_mut().zip(&taken);
        taken.for_each(|(range, cidr)| cidr.iter().for_each(|cidr| range.release(cidr)));
    };
    let Some(cidrs) = taken.iter().cloned().collect::<Option<Vec<String>>>() else {
        give_back();
        tell(ctx, &node, "CIDRNotAvailable");
        // When a node goes, there may be room again.
        return Ok(Next::After(std::time::Duration::from_secs(30)));
    };
    let patch = json!({"metadata": {"uid": node.uid()}, "spec": {"podCIDR": cidrs[0], "podCIDRs": cidrs}});
    match ctx.patch::<Node>(key, &Patch::Strategic(patch)).await {
        Ok(_) => Ok(Next::Change),
        Err(error) => {
            give_back();
            if error.is_not_found() {
                return Ok(Next::Change);
            }
            tell(ctx, &node, "CIDRAssignmentFailed");
            Err(error)
        }
    }
}

fn tell(ctx: &Ctx, node: &Node, what: &str) {
    let mut about = reconcile::reference(node);
    about.resource_version = None;
    ctx.events.record(about, Severity::Normal, what, format!("Node {} status is now: {what}", node.name()));
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::rig::{Rig, until};

    #[tokio::test]
    async fn every_node_gets_its_own_network() {
        let rig = Rig::start(&["node-ipam-controller"]).await;
        for name in ["b", "a", "c"] {
            let cidrs = if name == "b" {
                json!({"podCIDR": "10.42.0.0/24", "podCIDRs": ["10.42.0.0/24", "2001:db8:42::/64"]})
            } else {
                json!({})
            };
            let value = json!({"metadata": {"name": name}, "spec": cidrs});
            rig.client.request(http::Method::POST, "/api/v1/nodes", Some(&value)).await.expect("a node");
        }
        let all = || async {
            let nodes: Vec<Node> = rig.client.list("").await.ok()?;
            let cidrs: BTreeSet<String> = nodes.iter().flat_map(pod_cidrs).cloned().collect();
            (cidrs.len() == 6).then_some(cidrs)
        };
        let cidrs = until("three networks of each kind", all).await;
        assert!(cidrs.contains("10.42.1.0/24") || cidrs.contains("10.42.2.0/24"), "{cidrs:?}");
    }
}
