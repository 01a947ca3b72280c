//! Taint eviction controller: deletes pods on nodes with `NoExecute` taints that they do not tolerate, or
//! no longer tolerate.
//!
//! Upstream: `pkg/controller/tainteviction`.

mod plan;

use std::collections::HashMap;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, ObjectReference, Pod, Taint};
use parking_lot::Mutex;
use reconcile::{Controller, Ctx, Error, EventType, Key, Object, ObjectUpdate, ReconcileAction};

use crate::disruption_condition::{disruption_target, patch_pod_status};
use crate::pod;
use plan::{TolerationTime, min_toleration_time, no_execute_taints};

const WORKERS: usize = 8;

pub async fn run(ctx: Ctx) {
    let ctx = Ctx { client: ctx.client.impersonate("node-controller"), ..ctx };
    let controller = Controller::new("noexec_taint_pod", &ctx);
    controller.on(ctx.caches.pods(), |changed: &ObjectUpdate<'_, Pod>, enqueue| {
        let eviction_inputs = |pod: &Arc<Pod>| {
            let tolerations = pod.spec.as_ref().and_then(|spec| spec.tolerations.clone());
            (pod::node(pod).to_owned(), tolerations)
        };
        if changed.before.map(eviction_inputs) != changed.after.map(eviction_inputs) {
            enqueue(changed.latest().key());
        }
    });
    let pods = ctx.caches.pods().clone();
    controller.on(ctx.caches.nodes(), move |changed: &ObjectUpdate<'_, Node>, enqueue| {
        if changed.before.map(|node| no_execute_taints_of(node))
            != changed.after.map(|node| no_execute_taints_of(node))
        {
            let there = pods.indexed("node", changed.latest().name());
            there.iter().for_each(|pod| enqueue(pod.key()));
        }
    });
    let evictions = Arc::new(Evictions { ctx: ctx.clone(), scheduled_evictions: Mutex::default() });
    let reconcile = move |key: Key| {
        let evictions = evictions.clone();
        async move { evictions.reconcile(&key).await }
    };
    controller.run(&ctx, WORKERS, reconcile).await
}

fn no_execute_taints_of(node: &Node) -> Vec<Taint> {
    no_execute_taints(node.spec.as_ref().and_then(|spec| spec.taints.as_deref()).unwrap_or_default())
}

struct Evictions {
    ctx: Ctx,
    /// When pods with a limited toleration are evicted.
    scheduled_evictions: Mutex<HashMap<Key, Timestamp>>,
}

impl Evictions {
    async fn reconcile(&self, key: &Key) -> Result<ReconcileAction, Error> {
        let Some(pod) = self.ctx.caches.pods().get(key) else {
            self.cancel(key);
            return Ok(ReconcileAction::AwaitChange);
        };
        let node = self.ctx.caches.nodes().get(&Key::new("", pod::node(&pod)));
        let taints = node.map(|node| no_execute_taints_of(&node)).unwrap_or_default();
        let tolerations = pod.spec.as_ref().and_then(|spec| spec.tolerations.as_deref()).unwrap_or_default();
        let now = self.ctx.clock.now();
        match min_toleration_time(tolerations, &taints) {
            TolerationTime::Forever => self.cancel(key),
            TolerationTime::Not => {
                self.cancel(key);
                self.evict(&pod, now).await?;
            }
            TolerationTime::For(time) => {
                let at = now.checked_add(time).unwrap_or(Timestamp::MAX);
                // As upstream: the first decision stands, even if the toleration time changes.
                let deadline = *self.scheduled_evictions.lock().entry(key.clone()).or_insert(at);
                if deadline > now {
                    return Ok(ReconcileAction::RequeueAt(deadline));
                }
                self.evict(&pod, now).await?;
                self.scheduled_evictions.lock().remove(key);
            }
        }
        Ok(ReconcileAction::AwaitChange)
    }

    fn cancel(&self, key: &Key) {
        if self.scheduled_evictions.lock().remove(key).is_some() {
            self.record_event(key, format!("Cancelling deletion of Pod {key}"));
        }
    }

    async fn evict(&self, pod: &Pod, now: Timestamp) -> Result<(), Error> {
        if pod.is_deleting() {
            return Ok(());
        }
        let key = pod.key();
        self.record_event(&key, format!("Marking for deletion Pod {key}"));
        let message = "Taint manager: deleting due to NoExecute taint";
        if let Some(condition) = disruption_target(pod, "DeletionByTaintManager", message, now) {
            let status = serde_json::json!({"conditions": [condition]});
            match patch_pod_status(&self.ctx, pod, status).await {
                Err(error) if error.is_not_found() => return Ok(()),
                other => other?,
            }
        }
        self.ctx.delete(pod).await
    }

    fn record_event(&self, key: &Key, message: String) {
        let about = ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Pod".into()),
            name: Some(key.name.to_string()),
            namespace: Some(key.namespace.to_string()),
            ..ObjectReference::default()
        };
        self.ctx.events.record(about, EventType::Normal, "TaintManagerEviction", message);
    }
}

#[cfg(test)]
mod tests {
    use reconcile::Patch;
    use serde_json::{Value, json};

    use super::*;
    use crate::test_cluster::{TestCluster, wait_for};

    async fn create(test_cluster: &TestCluster, path: &str, value: Value) {
        test_cluster.client.request(http::Method::POST, path, Some(&value)).await.expect("an object");
    }

    #[tokio::test]
    async fn pods_without_toleration_are_deleted_from_tainted_node() {
        let test_cluster = TestCluster::start(&["taint-eviction-controller"]).await;
        create(&test_cluster, "/api/v1/nodes", json!({"metadata": {"name": "n"}})).await;
        for (name, tolerations) in [
            ("leaves", json!([])),
            ("stays", json!([{"operator": "Exists"}])),
            (
                "waits",
                json!([{"key": "k", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 3000}]),
            ),
        ] {
            let spec = json!({"nodeName": "n", "tolerations": tolerations, "containers": [{"name": "c", "image": "i"}]});
            create(
                &test_cluster,
                "/api/v1/namespaces/default/pods",
                json!({"metadata": {"name": name}, "spec": spec}),
            )
            .await;
        }
        let taint = json!({"spec": {"taints": [{"key": "k", "effect": "NoExecute"}]}});
        let _: Node =
            test_cluster.client.patch(&Key::new("", "n"), &Patch::Merge(taint)).await.expect("a taint");
        let deleting = || async {
            let pod: Pod = test_cluster.client.get(&Key::new("default", "leaves")).await.ok()?;
            pod.is_deleting().then_some(pod)
        };
        let pod = wait_for("deletion of the pod", deleting).await;
        let reason = pod::condition(&pod, "DisruptionTarget").and_then(|condition| condition.reason.clone());
        assert_eq!(reason.as_deref(), Some("DeletionByTaintManager"));
        for name in ["stays", "waits"] {
            let pod: Pod = test_cluster.client.get(&Key::new("default", name)).await.expect("a pod");
            assert!(!pod.is_deleting(), "{name}");
        }
    }
}
