use k8s_openapi::api::apps::v1::Deployment;

use super::*;
use crate::test_cluster::{TestCluster, wait_for};

#[tokio::test]
async fn budget_status_follows_pods_on_api_server() {
    let test_cluster =
        TestCluster::start(&["deployment-controller", "replicaset-controller", "disruption-controller"])
            .await;
    let deployment: Deployment = serde_json::from_value(json!({
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {"replicas": 3, "selector": {"matchLabels": {"app": "web"}},
            "template": {"metadata": {"labels": {"app": "web"}},
                "spec": {"containers": [{"name": "c", "image": "i"}], "automountServiceAccountToken": false}}},
    }))
    .expect("a deployment");
    test_cluster.client.create(&deployment).await.expect("created");
    let budget: PodDisruptionBudget = serde_json::from_value(json!({
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "web"}}},
    }))
    .expect("a budget");
    test_cluster.client.create(&budget).await.expect("created");
    let numbers = async |expected: [i32; 4]| {
        wait_for("the budget status", async || {
            let budget: PodDisruptionBudget = test_cluster.client.get(&budget.key()).await.expect("a budget");
            let status = budget.status.unwrap_or_default();
            let numbers = [
                status.expected_pods,
                status.desired_healthy,
                status.current_healthy,
                status.disruptions_allowed,
            ];
            (numbers == expected.map(Some)).then_some(())
        })
        .await
    };
    numbers([3, 2, 0, 0]).await;
    // The expected count follows the scale, before all pods exist.
    let pods = wait_for("three pods", async || {
        test_cluster.client.list::<Pod>("default").await.ok().filter(|pods| pods.len() == 3)
    })
    .await;
    let ready = json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
    for pod in &pods {
        test_cluster
            .client
            .patch_status::<Pod>(&pod.key(), &Patch::Strategic(ready.clone()))
            .await
            .expect("status updated");
    }
    numbers([3, 2, 3, 1]).await;

    // An eviction uses up the allowed disruption, and the next one is rejected.
    let eviction =
        |pod: &Pod| json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod.name()}});
    test_cluster
        .client
        .create_at::<Pod>(&pods[0].key(), "eviction", &eviction(&pods[0]))
        .await
        .expect("evicted");
    let rejected =
        test_cluster.client.create_at::<Pod>(&pods[1].key(), "eviction", &eviction(&pods[1])).await;
    assert_eq!(rejected.expect_err("no eviction").code(), 429);
}
