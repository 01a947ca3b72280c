use k8s_openapi::api::apps::v1::Deployment;
use serde_json::json;

use super::*;
use crate::rig::{Rig, until};

#[tokio::test]
async fn an_autoscaler_keeps_its_limits_and_says_what_it_lacks() {
    let rig = Rig::start(&["horizontal-pod-autoscaler-controller"]).await;
    let deployment: Deployment = serde_json::from_value(json!({
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {"replicas": 1, "selector": {"matchLabels": {"app": "web"}},
            "template": {"metadata": {"labels": {"app": "web"}},
                "spec": {"containers": [{"name": "c", "image": "i"}]}}},
    }))
    .expect("a deployment");
    rig.client.create(&deployment).await.expect("created");
    let hpa: HorizontalPodAutoscaler = serde_json::from_value(json!({
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {"minReplicas": 2, "maxReplicas": 5,
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web"},
            "metrics": [{"type": "Resource", "resource": {"name": "cpu",
                "target": {"type": "Utilization", "averageUtilization": 50}}}]},
    }))
    .expect("an autoscaler");
    rig.client.create(&hpa).await.expect("created");
    until("the deployment grows", async || {
        let deployment: Deployment = rig.client.get(&deployment.key()).await.expect("a deployment");
        (deployment.spec?.replicas == Some(2)).then_some(())
    })
    .await;
    // Any change of the spec is looked at at once; there are no metrics here.
    let patch = reconcile::Patch::Merge(json!({"spec": {"maxReplicas": 6}}));
    rig.client.patch::<HorizontalPodAutoscaler>(&hpa.key(), &patch).await.expect("changed");
    let message = until("the condition", async || {
        let hpa: HorizontalPodAutoscaler = rig.client.get(&hpa.key()).await.expect("an autoscaler");
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
