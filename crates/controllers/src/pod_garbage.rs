//! Takes away pods that nobody will ever finish, and old ones that are over when there are too many.

mod plan;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod, PodCondition};
use parking_lot::Mutex;
use reconcile::{Changed, Controller, Ctx, Delete, Error, Key, Next, Object};

use crate::disruption_condition::{disruption_target, patch_pod_status};
use crate::pod;
use plan::{Action, plan, surplus};

/// How many pods that are over are kept.
const MOST: usize = 12_500;
/// How long to wait before counting, since pods often end together.
const COUNTING_PAUSE: Duration = Duration::from_secs(20);
const WORKERS: usize = 4;

pub async fn run(ctx: Ctx) {
    let ctx = Ctx { client: ctx.client.acting_as("pod-garbage-collector"), ..ctx };
    let controller = Controller::new("orphaned_pods_nodes", &ctx);
    let count = controller.enqueue();
    controller.on(ctx.caches.pods(), move |changed: &Changed<'_, Pod>, enqueue| {
        let over = |pod: Option<&Arc<Pod>>| pod.is_some_and(|pod| pod::is_terminal(pod));
        if over(changed.after) && !over(changed.before) {
            count.after(everything(), COUNTING_PAUSE);
        }
        if changed.after.is_some() {
            enqueue(changed.newest().key());
        }
    });
    let pods = ctx.caches.pods().clone();
    controller.on(ctx.caches.nodes(), move |changed: &Changed<'_, Node>, enqueue| {
        let taints = |node: &Arc<Node>| node.spec.as_ref().and_then(|spec| spec.taints.clone());
        if changed.before.map(taints) != changed.after.map(taints) {
            let there = pods.indexed("node", changed.newest().name());
            there.iter().for_each(|pod| enqueue(pod.key()));
        }
    });
    let missed = Arc::new(Mutex::new(HashMap::new()));
    let work = ctx.clone();
    let reconcile = move |key: Key| {
        let (ctx, missed) = (work.clone(), missed.clone());
        async move {
            match key == everything() {
                true => count_all(&ctx).await,
                false => reconcile(&ctx, &missed, &key).await,
            }
        }
    };
    controller.run(&ctx, WORKERS, reconcile).await
}

/// Stands for all pods together.
fn everything() -> Key {
    Key::new("", "")
}

async fn reconcile(ctx: &Ctx, missed: &Mutex<HashMap<String, Timestamp>>, key: &Key) -> Result<Next, Error> {
    let Some(pod) = ctx.caches.pods().get(key) else { return Ok(Next::Forget) };
    let name = pod::node(&pod);
    let node = ctx.caches.nodes().get(&Key::new("", name));
    let now = ctx.clock.now();
    let since = match &node {
        Some(_) => {
            missed.lock().remove(name);
            now
        }
        None => *missed.lock().entry(name.to_owned()).or_insert(now),
    };
    match plan(&pod, node.as_deref(), since, now) {
        Action::Nothing => {}
        Action::Delete => give_up(ctx, &pod, None).await?,
        Action::DeleteWithNode => match ctx.client.get::<Node>(&Key::new("", name)).await {
            Err(error) if error.is_not_found() => {
                let condition =
                    disruption_target(&pod, "DeletionByPodGC", "PodGC: node no longer exists", now);
                give_up(ctx, &pod, condition).await?;
            }
            Err(error) => return Err(error),
            Ok(_) => {}
        },
        Action::RecheckAt(at) => return Ok(Next::At(at)),
    }
    Ok(Next::Change)
}

async fn count_all(ctx: &Ctx) -> Result<Next, Error> {
    // Most of the time there are fewer pods than may be over, and none needs to be looked at.
    if ctx.caches.pods().len() <= MOST {
        return Ok(Next::Change);
    }
    for pod in surplus(&ctx.caches.pods().all(), MOST) {
        give_up(ctx, &pod, None).await?;
    }
    Ok(Next::Change)
}

/// The pod has failed, and goes without anybody ending it.
async fn give_up(ctx: &Ctx, pod: &Pod, condition: Option<PodCondition>) -> Result<(), Error> {
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
    let now = Delete { grace_seconds: Some(0), ..Delete::uid(pod.uid()) };
    ctx.delete_with::<Pod>(&pod.key(), &now).await
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::rig::{Rig, until};

    #[tokio::test]
    async fn pods_that_wait_for_nobody_go() {
        let rig = Rig::start(&["pod-garbage-collector-controller"]).await;
        let spec = json!({"schedulingGates": [{"name": "x/y"}], "containers": [{"name": "c", "image": "i"}]});
        let value = json!({"metadata": {"name": "p", "finalizers": ["x/hold"]}, "spec": spec});
        rig.client
            .request(http::Method::POST, "/api/v1/namespaces/default/pods", Some(&value))
            .await
            .expect("a pod");
        let key = Key::new("default", "p");
        rig.client.delete::<Pod>(&key, &Delete::default()).await.expect("a deletion");
        let failed = || async {
            let pod: Pod = rig.client.get(&key).await.ok()?;
            (pod::phase(&pod) == "Failed").then_some(())
        };
        until("the pod being given up", failed).await;
    }
}
