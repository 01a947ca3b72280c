use k8s_openapi::api::core::v1::{ReplicationController, ResourceQuota};
use reconcile::Patch;
use serde_json::{Value, json};

use super::*;
use crate::test_cluster::{TestCluster, wait_for};

fn set_json(replicas: i32, selector: Value) -> Value {
    json!({
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {"replicas": replicas, "selector": selector,
            "template": {"metadata": {"labels": {"app": "web"}},
                "spec": {"containers": [{"name": "c", "image": "i"}], "automountServiceAccountToken": false}}},
    })
}

/// The active pods in the namespace, as soon as there are `count`.
async fn active(test_cluster: &TestCluster, count: usize) -> Vec<Pod> {
    wait_for(&format!("{count} active pods"), async || {
        let mut pods = test_cluster.client.list::<Pod>("default").await.expect("pods");
        pods.retain(crate::pod::is_active);
        (pods.len() == count).then_some(pods)
    })
    .await
}

async fn status<T: ReplicaOwner>(
    test_cluster: &TestCluster,
    matches: impl Fn(&ReplicaSetStatus) -> bool,
) -> ReplicaSetStatus {
    wait_for("the status", async || {
        let set: T = test_cluster.client.get(&Key::new("default", "web")).await.expect("a set");
        set.as_set().status.clone().filter(&matches)
    })
    .await
}

async fn check_replica_controller<T: ReplicaOwner>(test_cluster: &TestCluster, set: T) {
    let key = set.key();
    test_cluster.client.create(&set).await.expect("created");
    let pods = active(test_cluster, 3).await;
    assert!(pods.iter().all(|pod| pod.name().starts_with("web-") && pod.controller().is_some()));
    let ready = json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
    for pod in &pods[1..] {
        test_cluster
            .client
            .patch_status::<Pod>(&pod.key(), &Patch::Strategic(ready.clone()))
            .await
            .expect("status updated");
    }
    status::<T>(test_cluster, |status| status.replicas == 3 && status.ready_replicas == Some(2)).await;

    // The pod that is not ready is deleted first.
    let one = Patch::Merge(json!({"spec": {"replicas": 2}}));
    test_cluster.client.patch::<T>(&key, &one).await.expect("scaled");
    let left = active(test_cluster, 2).await;
    assert!(left.iter().all(crate::pod::is_ready));

    // A pod whose label changes is released and replaced.
    let released_key = left[0].key();
    let label_patch = Patch::Merge(json!({"metadata": {"labels": {"app": "stray"}}}));
    test_cluster.client.patch::<Pod>(&released_key, &label_patch).await.expect("relabelled");
    active(test_cluster, 3).await;
    let released: Pod = test_cluster.client.get(&released_key).await.expect("a pod");
    assert_eq!(released.controller(), None);

    // With its label restored it is adopted again, and one pod is too many.
    let label_patch = Patch::Merge(json!({"metadata": {"labels": {"app": "web"}}}));
    test_cluster.client.patch::<Pod>(&released_key, &label_patch).await.expect("relabelled");
    active(test_cluster, 2).await;
    let stable = |status: &ReplicaSetStatus| {
        let terminating = status.terminating_replicas.unwrap_or(0);
        (status.replicas, status.ready_replicas, terminating) == (2, Some(2), 0)
    };
    let stable = status::<T>(test_cluster, stable).await;

    // The set is up to date, so another sync writes nothing.
    let annotation_patch = Patch::Merge(json!({"metadata": {"annotations": {"a": "b"}}}));
    let patched: T = test_cluster.client.patch(&key, &annotation_patch).await.expect("touched");
    let pod = active(test_cluster, 2).await.remove(0);
    let pod: Pod = test_cluster.client.patch(&pod.key(), &annotation_patch).await.expect("touched");
    test_cluster.ctx.caches.pods().wait_until_revision(pod.revision()).await.expect("seen");
    T::all(&test_cluster.ctx).wait_until_revision(patched.revision()).await.expect("seen");
    wait_for("the controller to be idle", async || test_cluster.ctx.metrics.all_idle().then_some(())).await;
    let after: T = test_cluster.client.get(&key).await.expect("a set");
    assert_eq!(after.revision(), patched.revision());
    assert_eq!(after.as_set().status.as_ref(), Some(&stable));
}

#[tokio::test]
async fn replica_set_keeps_desired_pods() {
    let test_cluster = TestCluster::start(&["replicaset-controller"]).await;
    let set: ReplicaSet =
        serde_json::from_value(set_json(3, json!({"matchLabels": {"app": "web"}}))).expect("a set");
    check_replica_controller(&test_cluster, set).await;
}

#[tokio::test]
async fn replication_controller_keeps_desired_pods() {
    let test_cluster = TestCluster::start(&["replicationcontroller-controller"]).await;
    let set: ReplicationController = serde_json::from_value(set_json(3, json!({"app": "web"}))).expect("one");
    check_replica_controller(&test_cluster, set).await;
}

#[tokio::test]
async fn quota_error_sets_failure_condition() {
    let test_cluster = TestCluster::start(&["resourcequota-controller", "replicaset-controller"]).await;
    let quota = json!({"metadata": {"name": "q", "namespace": "default"}, "spec": {"hard": {"pods": "0"}}});
    let quota: ResourceQuota = serde_json::from_value(quota).expect("a quota");
    test_cluster.client.create(&quota).await.expect("created");
    let counted = async || {
        let quota: ResourceQuota = test_cluster.client.get(&quota.key()).await.expect("a quota");
        quota.status.is_some_and(|status| status.hard.is_some()).then_some(())
    };
    wait_for("the quota to be counted", counted).await;
    let set: ReplicaSet =
        serde_json::from_value(set_json(3, json!({"matchLabels": {"app": "web"}}))).expect("a set");
    test_cluster.client.create(&set).await.expect("created");
    let failed_status = status::<ReplicaSet>(&test_cluster, |status| status.conditions.is_some()).await;
    let condition = failed_status.conditions.iter().flatten().next().expect("a condition");
    assert_eq!(
        (condition.type_.as_str(), condition.reason.as_deref()),
        ("ReplicaFailure", Some("FailedCreate"))
    );
    let message = condition.message.as_deref().unwrap_or_default();
    assert!(
        message.contains("exceeded quota: q, requested: pods=1, used: pods=0, limited: pods=0"),
        "{message}"
    );
    test_cluster
        .client
        .delete::<ResourceQuota>(&quota.key(), &reconcile::DeleteOptions::default())
        .await
        .expect("deleted");
    active(&test_cluster, 3).await;
    status::<ReplicaSet>(&test_cluster, |status| status.conditions.is_none() && status.replicas == 3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn creates_no_pods_for_deleted_set() {
    let test_cluster = TestCluster::start(&[]).await;
    let set = set_json(1, json!({"matchLabels": {"app": "web"}}));
    let set: ReplicaSet = serde_json::from_value(set).expect("a set");
    let start_caches = |caches: &reconcile::Caches| _ = (caches.replica_sets(), caches.pods());
    let ctx = test_cluster.with_deleted_owner("replicaset-controller", &set, "replicas", start_caches).await;
    let done = super::reconcile::<ReplicaSet>(&ctx, &set.key()).await;
    assert_eq!(done.expect("nothing to do"), ReconcileAction::AwaitChange);
    test_cluster.assert_no_pods().await;
}
