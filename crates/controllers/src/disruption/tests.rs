use k8s_openapi::api::apps::v1::Deployment;

use super::*;
use crate::rig::{Rig, until};

#[tokio::test]
async fn a_budget_follows_its_pods() {
    let rig = Rig::start(&["deployment-controller", "replicaset-controller", "disruption-controller"]).await;
    let deployment: Deployment = serde_json::from_value(json!({
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {"replicas": 3, "selector": {"matchLabels": {"app": "web"}},
            "template": {"metadata": {"labels": {"app": "web"}},
                "spec": {"containers": [{"name": "c", "image": "i"}], "automountServiceAccountToken": false}}},
    }))
    .expect("a deployment");
    rig.client.create(&deployment).await.expect("created");
    let budget: PodDisruptionBudget = serde_json::from_value(json!({
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "web"}}},
    }))
    .expect("a budget");
    rig.client.create(&budget).await.expect("created");
    let numbers = async |expected: [i32; 4]| {
        until("the numbers", async || {
            let budget: PodDisruptionBudget = rig.client.get(&budget.key()).await.expect("a budget");
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
    // How many there should be is known before all of them are there.
    let pods = until("three pods", async || {
        rig.client.list::<Pod>("default").await.ok().filter(|pods| pods.len() == 3)
    })
    .await;
    let ready = json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
    for pod in &pods {
        rig.client.patch_status::<Pod>(&pod.key(), &Patch::Strategic(ready.clone())).await.expect("played");
    }
    numbers([3, 2, 3, 1]).await;

    // An eviction uses it up, and the next is refused.
    let eviction =
        |pod: &Pod| json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod.name()}});
    rig.client.create_at::<Pod>(&pods[0].key(), "eviction", &eviction(&pods[0])).await.expect("evicted");
    let refused = rig.client.create_at::<Pod>(&pods[1].key(), "eviction", &eviction(&pods[1])).await;
    assert_eq!(refused.expect_err("no eviction").code(), 429);
}
