//! Pod garbage collector: deletes orphaned pods, and the oldest terminated pods above a threshold.
//!
//! Upstream: `pkg/controller/podgc`.

mod plan;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod, PodCondition};
use parking_lot::Mutex;
use reconcile::{Controller, Ctx, DeleteOptions, Error, Key, Object, ObjectUpdate, ReconcileAction};

use crate::disruption_condition::{disruption_target, patch_pod_status};
use crate::pod;
use plan::{Action, plan, terminated_over_threshold};

/// The number of terminated pods that are kept (upstream's default of `--terminated-pod-gc-threshold`).
const TERMINATED_POD_THRESHOLD: usize = 12_500;
/// The delay before terminated pods are counted, because pods often terminate in groups.
const COUNT_DELAY: Duration = Duration::from_secs(20);
const WORKERS: usize = 4;

pub async fn run(ctx: Ctx) {
    let ctx = Ctx { client: ctx.client.impersonate("pod-garbage-collector"), ..ctx };
    let controller = Controller::new("orphaned_pods_nodes", &ctx);
    let count = controller.enqueue();
    controller.on(ctx.caches.pods(), move |changed: &ObjectUpdate<'_, Pod>, enqueue| {
        let is_terminal = |pod: Option<&Arc<Pod>>| pod.is_some_and(|pod| pod::is_terminal(pod));
        if is_terminal(changed.after) && !is_terminal(changed.before) {
            count.after(all_pods_key(), COUNT_DELAY);
        }
        if changed.after.is_some() {
            enqueue(changed.latest().key());
        }
    });
    let pods = ctx.caches.pods().clone();
    controller.on(ctx.caches.nodes(), move |changed: &ObjectUpdate<'_, Node>, enqueue| {
        let taints = |node: &Arc<Node>| node.spec.as_ref().and_then(|spec| spec.taints.clone());
        if changed.before.map(taints) != changed.after.map(taints) {
            let there = pods.indexed("node", changed.latest().name());
            there.iter().for_each(|pod| enqueue(pod.key()));
        }
    });
    let missing_nodes = Arc::new(Mutex::new(HashMap::new()));
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let (ctx, missing_nodes) = (work.clone(), missing_nodes.clone());
        async move {
            match key == all_pods_key() {
                true => delete_surplus_pods(&ctx).await,
                false => reconcile(&ctx, &missing_nodes, &key).await,
            }
        }
    };
    controller.run(&ctx, WORKERS, reconcile).await
}

/// The key that stands for counting all pods.
fn all_pods_key() -> Key {
    Key::new("", "")
}

async fn reconcile(
    ctx: &Ctx,
    missing_nodes: &Mutex<HashMap<String, Timestamp>>,
    key: &Key,
) -> Result<ReconcileAction, Error> {
    let Some(pod) = ctx.caches.pods().get(key) else { return Ok(ReconcileAction::Forget) };
    let name = pod::node(&pod);
    let node = ctx.caches.nodes().get(&Key::new("", name));
    let now = ctx.clock.now();
    let since = match &node {
        Some(_) => {
            missing_nodes.lock().remove(name);
            now
        }
        None => *missing_nodes.lock().entry(name.to_owned()).or_insert(now),
    };
    match plan(&pod, node.as_deref(), since, now) {
        Action::Nothing => {}
        Action::Delete => mark_failed_and_delete_pod(ctx, &pod, None).await?,
        Action::DeleteWithNode => match ctx.client.get::<Node>(&Key::new("", name)).await {
            Err(error) if error.is_not_found() => {
                let condition =
                    disruption_target(&pod, "DeletionByPodGC", "PodGC: node no longer exists", now);
                mark_failed_and_delete_pod(ctx, &pod, condition).await?;
            }
            Err(error) => return Err(error),
            Ok(_) => {}
        },
        Action::RecheckAt(at) => return Ok(ReconcileAction::RequeueAt(at)),
    }
    Ok(ReconcileAction::AwaitChange)
}

async fn delete_surplus_pods(ctx: &Ctx) -> Result<ReconcileAction, Error> {
    // The cheap check comes first: usually there are fewer pods than the threshold.
    if ctx.caches.pods().len() <= TERMINATED_POD_THRESHOLD {
        return Ok(ReconcileAction::AwaitChange);
    }
    for pod in terminated_over_threshold(&ctx.caches.pods().all(), TERMINATED_POD_THRESHOLD) {
        mark_failed_and_delete_pod(ctx, &pod, None).await?;
    }
    Ok(ReconcileAction::AwaitChange)
}

/// Sets the phase to `Failed` and deletes the pod without grace period.
async fn mark_failed_and_delete_pod(
    ctx: &Ctx,
    pod: &Pod,
    condition: Option<PodCondition>,
) -> Result<(), Error> {
    if !pod::is_terminal(pod) {
        let conditions: Vec<PodCondition> = condition.into_iter().collect();
        let status = serde_json::json!({
            "phase": "Failed", "conditions": conditions, "observedGeneration": pod.metadata.generation,
        });
        match patch_pod_status(ctx, pod, status).await {
            Err(error) if error.is_not_found() => return Ok(()),
            other => other?,
        }
    }
    let now = DeleteOptions { grace_seconds: Some(0), ..DeleteOptions::uid(pod.uid()) };
    ctx.delete_with::<Pod>(&pod.key(), &now).await
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::test_cluster::{TestCluster, wait_for};

    #[tokio::test]
    async fn deletes_terminating_unscheduled_pods() {
        let test_cluster = TestCluster::start(&["pod-garbage-collector-controller"]).await;
        let spec = json!({"schedulingGates": [{"name": "x/y"}], "containers": [{"name": "c", "image": "i"}]});
        let value = json!({"metadata": {"name": "p", "finalizers": ["x/hold"]}, "spec": spec});
        test_cluster
            .client
            .request(http::Method::POST, "/api/v1/namespaces/default/pods", Some(&value))
            .await
            .expect("a pod");
        let key = Key::new("default", "p");
        test_cluster.client.delete::<Pod>(&key, &DeleteOptions::default()).await.expect("a deletion");
        let failed = || async {
            let pod: Pod = test_cluster.client.get(&key).await.ok()?;
            (pod::phase(&pod) == "Failed").then_some(())
        };
        wait_for("the pod to be marked as failed", failed).await;
    }
}
