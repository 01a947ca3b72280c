use k8s_openapi::api::core::v1::{ReplicationController, ResourceQuota};
use reconcile::Patch;
use serde_json::{Value, json};

use super::*;
use crate::rig::{Rig, until};

fn labelled(replicas: i32, selector: Value) -> Value {
    json!({
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {"replicas": replicas, "selector": selector,
            "template": {"metadata": {"labels": {"app": "web"}},
                "spec": {"containers": [{"name": "c", "image": "i"}], "automountServiceAccountToken": false}}},
    })
}

/// The active pods in the namespace, once there are as many as `count`.
async fn active(rig: &Rig, count: usize) -> Vec<Pod> {
    until(&format!("{count} active pods"), async || {
        let mut pods = rig.client.list::<Pod>("default").await.expect("pods");
        pods.retain(crate::pod::is_active);
        (pods.len() == count).then_some(pods)
    })
    .await
}

async fn status<T: Replicated>(rig: &Rig, holds: impl Fn(&ReplicaSetStatus) -> bool) -> ReplicaSetStatus {
    until("the status", async || {
        let set: T = rig.client.get(&Key::new("default", "web")).await.expect("a set");
        set.as_set().status.clone().filter(&holds)
    })
    .await
}

async fn play<T: Replicated>(rig: &Rig, set: T) {
    let key = set.key();
    rig.client.create(&set).await.expect("created");
    let pods = active(rig, 3).await;
    assert!(pods.iter().all(|pod| pod.name().starts_with("web-") && pod.controller().is_some()));
    let ready = json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
    for pod in &pods[1..] {
        rig.client.patch_status::<Pod>(&pod.key(), &Patch::Strategic(ready.clone())).await.expect("played");
    }
    status::<T>(rig, |status| status.replicas == 3 && status.ready_replicas == Some(2)).await;

    // The one that is not ready goes first.
    let one = Patch::Merge(json!({"spec": {"replicas": 2}}));
    rig.client.patch::<T>(&key, &one).await.expect("scaled");
    let left = active(rig, 2).await;
    assert!(left.iter().all(crate::pod::is_ready));

    // A pod that loses its label is let go and replaced.
    let stray = left[0].key();
    let relabel = Patch::Merge(json!({"metadata": {"labels": {"app": "stray"}}}));
    rig.client.patch::<Pod>(&stray, &relabel).await.expect("relabelled");
    active(rig, 3).await;
    let released: Pod = rig.client.get(&stray).await.expect("a pod");
    assert_eq!(released.controller(), None);

    // With its label back it is taken again, and one is too many.
    let relabel = Patch::Merge(json!({"metadata": {"labels": {"app": "web"}}}));
    rig.client.patch::<Pod>(&stray, &relabel).await.expect("relabelled");
    active(rig, 2).await;
    let settled = |status: &ReplicaSetStatus| {
        let terminating = status.terminating_replicas.unwrap_or(0);
        (status.replicas, status.ready_replicas, terminating) == (2, Some(2), 0)
    };
    let settled = status::<T>(rig, settled).await;

    // Nothing more is to be done, so being asked to look again writes nothing.
    let touch = Patch::Merge(json!({"metadata": {"annotations": {"a": "b"}}}));
    let touched: T = rig.client.patch(&key, &touch).await.expect("touched");
    let pod = active(rig, 2).await.remove(0);
    let pod: Pod = rig.client.patch(&pod.key(), &touch).await.expect("touched");
    rig.ctx.caches.pods().seen(pod.revision()).await.expect("seen");
    T::all(&rig.ctx).seen(touched.revision()).await.expect("seen");
    until("the loop is idle", async || rig.ctx.metrics.all_idle().then_some(())).await;
    let after: T = rig.client.get(&key).await.expect("a set");
    assert_eq!(after.revision(), touched.revision());
    assert_eq!(after.as_set().status.as_ref(), Some(&settled));
}

#[tokio::test]
async fn a_replica_set_keeps_its_pods() {
    let rig = Rig::start(&["replicaset-controller"]).await;
    let set: ReplicaSet =
        serde_json::from_value(labelled(3, json!({"matchLabels": {"app": "web"}}))).expect("a set");
    play(&rig, set).await;
}

#[tokio::test]
async fn a_replication_controller_keeps_its_pods() {
    let rig = Rig::start(&["replicationcontroller-controller"]).await;
    let set: ReplicationController = serde_json::from_value(labelled(3, json!({"app": "web"}))).expect("one");
    play(&rig, set).await;
}

#[tokio::test]
async fn what_the_server_refuses_is_told() {
    let rig = Rig::start(&["resourcequota-controller", "replicaset-controller"]).await;
    let quota = json!({"metadata": {"name": "q", "namespace": "default"}, "spec": {"hard": {"pods": "0"}}});
    let quota: ResourceQuota = serde_json::from_value(quota).expect("a quota");
    rig.client.create(&quota).await.expect("created");
    let counted = async || {
        let quota: ResourceQuota = rig.client.get(&quota.key()).await.expect("a quota");
        quota.status.is_some_and(|status| status.hard.is_some()).then_some(())
    };
    until("the quota counts", counted).await;
    let set: ReplicaSet =
        serde_json::from_value(labelled(3, json!({"matchLabels": {"app": "web"}}))).expect("a set");
    rig.client.create(&set).await.expect("created");
    let told = status::<ReplicaSet>(&rig, |status| status.conditions.is_some()).await;
    let condition = told.conditions.iter().flatten().next().expect("a condition");
    assert_eq!(
        (condition.type_.as_str(), condition.reason.as_deref()),
        ("ReplicaFailure", Some("FailedCreate"))
    );
    let message = condition.message.as_deref().unwrap_or_default();
    assert!(
        message.contains("exceeded quota: q, requested: pods=1, used: pods=0, limited: pods=0"),
        "{message}"
    );
    rig.client.delete::<ResourceQuota>(&quota.key(), &reconcile::Delete::default()).await.expect("deleted");
    active(&rig, 3).await;
    status::<ReplicaSet>(&rig, |status| status.conditions.is_none() && status.replicas == 3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_set_that_is_gone_has_no_more_pods() {
    let rig = Rig::start(&[]).await;
    let set = labelled(1, json!({"matchLabels": {"app": "web"}}));
    let set: ReplicaSet = serde_json::from_value(set).expect("a set");
    let begin = |caches: &reconcile::Caches| _ = (caches.replica_sets(), caches.pods());
    let ctx = rig.gone("replicaset-controller", &set, "replicas", begin).await;
    let done = super::reconcile::<ReplicaSet>(&ctx, &set.key()).await;
    assert_eq!(done.expect("nothing to do"), Next::Change);
    rig.has_no_pods().await;
}
