use k8s_openapi::api::apps::v1::Deployment;
use serde_json::json;

use super::*;
use crate::test_cluster::{TestCluster, wait_for};

#[tokio::test]
async fn scale_to_min_replicas_and_report_missing_metrics() {
    let test_cluster = TestCluster::start(&["horizontal-pod-autoscaler-controller"]).await;
    let deployment: Deployment = serde_json::from_value(json!({
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {"replicas": 1, "selector": {"matchLabels": {"app": "web"}},
            "template": {"metadata": {"labels": {"app": "web"}},
                "spec": {"containers": [{"name": "c", "image": "i"}]}}},
    }))
    .expect("a deployment");
    test_cluster.client.create(&deployment).await.expect("created");
    let hpa: HorizontalPodAutoscaler = serde_json::from_value(json!({
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {"minReplicas": 2, "maxReplicas": 5,
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web"},
            "metrics": [{"type": "Resource", "resource": {"name": "cpu",
                "target": {"type": "Utilization", "averageUtilization": 50}}}]},
    }))
    .expect("an autoscaler");
    test_cluster.client.create(&hpa).await.expect("created");
    wait_for("the Deployment to be scaled up", async || {
        let deployment: Deployment = test_cluster.client.get(&deployment.key()).await.expect("a deployment");
        (deployment.spec?.replicas == Some(2)).then_some(())
    })
    .await;
    // A spec change is synced at once. There is no metrics API in this cluster.
    let patch = reconcile::Patch::Merge(json!({"spec": {"maxReplicas": 6}}));
    test_cluster.client.patch::<HorizontalPodAutoscaler>(&hpa.key(), &patch).await.expect("changed");
    let message = wait_for("the condition", async || {
        let hpa: HorizontalPodAutoscaler = test_cluster.client.get(&hpa.key()).await.expect("an autoscaler");
        let conditions = hpa.status?.conditions?;
        let failed = conditions
            .iter()
            .find(|condition| condition.reason.as_deref() == Some("FailedGetResourceMetric"));
        failed?.message.clone()
    })
    .await;
    assert_eq!(
        message,
        "the HPA was unable to compute the replica count: failed to get cpu utilization: unable to get metrics for \
         resource cpu: unable to fetch metrics from resource metrics API: the server could not find the requested \
         resource (get pods.metrics.k8s.io)"
    );
}
