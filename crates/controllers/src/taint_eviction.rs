//! Ends pods on nodes with taints they do not tolerate, or tolerate only for a while.

mod plan;

use std::collections::HashMap;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, ObjectReference, Pod, Taint};
use parking_lot::Mutex;
use reconcile::{Changed, Controller, Ctx, Error, Key, Next, Object, Severity};

use crate::disruption_condition::{disruption_target, patch_pod_status};
use crate::pod;
use plan::{Stay, evicting, stay};

const WORKERS: usize = 8;

pub async fn run(ctx: Ctx) {
    let ctx = Ctx { client: ctx.client.acting_as("node-controller"), ..ctx };
    let controller = Controller::new("noexec_taint_pod", &ctx);
    controller.on(ctx.caches.pods(), |changed: &Changed<'_, Pod>, enqueue| {
        let judged = |pod: &Arc<Pod>| {
            let tolerations = pod.spec.as_ref().and_then(|spec| spec.tolerations.clone());
            (pod::node(pod).to_owned(), tolerations)
        };
        if changed.before.map(judged) != changed.after.map(judged) {
            enqueue(changed.newest().key());
        }
    });
    let pods = ctx.caches.pods().clone();
    controller.on(ctx.caches.nodes(), move |changed: &Changed<'_, Node>, enqueue| {
        if changed.before.map(|node| taints(node)) != changed.after.map(|node| taints(node)) {
            let there = pods.indexed("node", changed.newest().name());
            there.iter().for_each(|pod| enqueue(pod.key()));
        }
    });
    let evictions = Arc::new(Evictions { ctx: ctx.clone(), due: Mutex::default() });
    let reconcile = move |key: Key| {
        let evictions = evictions.clone();
        async move { evictions.reconcile(&key).await }
    };
    controller.run(&ctx, WORKERS, reconcile).await
}

fn taints(node: &Node) -> Vec<Taint> {
    evicting(node.spec.as_ref().and_then(|spec| spec.taints.as_deref()).unwrap_or_default())
}

struct Evictions {
    ctx: Ctx,
    /// When pods have to go that may stay for a while.
    due: Mutex<HashMap<Key, Timestamp>>,
}

impl Evictions {
    async fn reconcile(&self, key: &Key) -> Result<Next, Error> {
        let Some(pod) = self.ctx.caches.pods().get(key) else {
            self.cancel(key);
            return Ok(Next::Change);
        };
        let node = self.ctx.caches.nodes().get(&Key::new("", pod::node(&pod)));
        let taints = node.map(|node| taints(&node)).unwrap_or_default();
        let tolerations = pod.spec.as_ref().and_then(|spec| spec.tolerations.as_deref()).unwrap_or_default();
        let now = self.ctx.clock.now();
        match stay(tolerations, &taints) {
            Stay::Forever => self.cancel(key),
            Stay::Not => {
                self.cancel(key);
                self.evict(&pod, now).await?;
            }
            Stay::For(time) => {
                let at = now.checked_add(time).unwrap_or(Timestamp::MAX);
                // Whatever was decided first stays.
                let due = *self.due.lock().entry(key.clone()).or_insert(at);
                if due > now {
                    return Ok(Next::At(due));
                }
                self.evict(&pod, now).await?;
                self.due.lock().remove(key);
            }
        }
        Ok(Next::Change)
    }

    fn cancel(&self, key: &Key) {
        if self.due.lock().remove(key).is_some() {
            self.tell(key, format!("Cancelling deletion of Pod {key}"));
        }
    }

    async fn evict(&self, pod: &Pod, now: Timestamp) -> Result<(), Error> {
        if pod.is_deleting() {
            return Ok(());
        }
        let key = pod.key();
        self.tell(&key, format!("Marking for deletion Pod {key}"));
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

    fn tell(&self, key: &Key, message: String) {
        let about = ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Pod".into()),
            name: Some(key.name.to_string()),
            namespace: Some(key.namespace.to_string()),
            ..ObjectReference::default()
        };
        self.ctx.events.record(about, Severity::Normal, "TaintManagerEviction", message);
    }
}

#[cfg(test)]
mod tests {
    use reconcile::Patch;
    use serde_json::{Value, json};

    use super::*;
    use crate::rig::{Rig, until};

    async fn make(rig: &Rig, path: &str, value: Value) {
        rig.client.request(http::Method::POST, path, Some(&value)).await.expect("an object");
    }

    #[tokio::test]
    async fn pods_leave_tainted_nodes_unless_they_tolerate_it() {
        let rig = Rig::start(&["taint-eviction-controller"]).await;
        make(&rig, "/api/v1/nodes", json!({"metadata": {"name": "n"}})).await;
        for (name, tolerations) in [
            ("leaves", json!([])),
            ("stays", json!([{"operator": "Exists"}])),
            (
                "waits",
                json!([{"key": "k", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 3000}]),
            ),
        ] {
            let spec = json!({"nodeName": "n", "tolerations": tolerations, "containers": [{"name": "c", "image": "i"}]});
            make(&rig, "/api/v1/namespaces/default/pods", json!({"metadata": {"name": name}, "spec": spec}))
                .await;
        }
        let taint = json!({"spec": {"taints": [{"key": "k", "effect": "NoExecute"}]}});
        let _: Node = rig.client.patch(&Key::new("", "n"), &Patch::Merge(taint)).await.expect("a taint");
        let leaving = || async {
            let pod: Pod = rig.client.get(&Key::new("default", "leaves")).await.ok()?;
            pod.is_deleting().then_some(pod)
        };
        let pod = until("a pod leaving", leaving).await;
        let reason = pod::condition(&pod, "DisruptionTarget").and_then(|condition| condition.reason.clone());
        assert_eq!(reason.as_deref(), Some("DeletionByTaintManager"));
        for name in ["stays", "waits"] {
            let pod: Pod = rig.client.get(&Key::new("default", name)).await.expect("a pod");
            assert!(!pod.is_deleting(), "{name}");
        }
    }
}
