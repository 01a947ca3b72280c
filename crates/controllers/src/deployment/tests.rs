use reconcile::Patch;
use serde_json::json;

use super::*;
use crate::test_cluster::{TestCluster, wait_for};

const CONTROLLERS: &[&str] = &["deployment-controller", "replicaset-controller"];

fn deployment(replicas: i32, image: &str) -> Deployment {
    serde_json::from_value(json!({
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {"replicas": replicas, "selector": {"matchLabels": {"app": "web"}},
            "template": {"metadata": {"labels": {"app": "web"}},
                "spec": {"containers": [{"name": "c", "image": image}], "automountServiceAccountToken": false,
                    "terminationGracePeriodSeconds": 0}}},
    }))
    .expect("a deployment")
}

/// Simulates the kubelet until `done` returns true for the Deployment: every pod becomes ready.
async fn run_fake_kubelet(test_cluster: &TestCluster, done: impl Fn(&Deployment) -> bool) -> Deployment {
    wait_for("the rollout", async || {
        for pod in test_cluster.client.list::<Pod>("default").await.expect("pods") {
            if !pod::is_ready(&pod) {
                let ready = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]});
                let patch = Patch::Strategic(json!({"status": ready}));
                let _ = test_cluster.client.patch_status::<Pod>(&pod.key(), &patch).await;
            }
        }
        let deployment: Deployment =
            test_cluster.client.get(&Key::new("default", "web")).await.expect("a deployment");
        done(&deployment).then_some(deployment)
    })
    .await
}

fn is_done(deployment: &Deployment) -> bool {
    let spec = deployment.spec.as_ref().and_then(|spec| spec.replicas);
    deployment.status.as_ref().is_some_and(|status| {
        status.observed_generation == deployment.metadata.generation
            && [status.replicas, status.updated_replicas, status.available_replicas]
                .iter()
                .all(|n| *n == spec)
    })
}

#[tokio::test]
async fn rollout_and_rollback_on_api_server() {
    let test_cluster = TestCluster::start(CONTROLLERS).await;
    test_cluster.client.create(&deployment(3, "a")).await.expect("created");
    let first = run_fake_kubelet(&test_cluster, is_done).await;
    assert_eq!(first.annotation("deployment.kubernetes.io/revision"), Some("1"));

    let key = first.key();
    let image = |image: &str| {
        let containers = json!([{"name": "c", "image": image}]);
        Patch::Strategic(json!({"spec": {"template": {"spec": {"containers": containers}}}}))
    };
    for (name, revision) in [("b", "2"), ("a", "3")] {
        test_cluster.client.patch::<Deployment>(&key, &image(name)).await.expect("changed");
        let done = run_fake_kubelet(&test_cluster, is_done).await;
        assert_eq!(done.annotation("deployment.kubernetes.io/revision"), Some(revision));
    }
    let sets = test_cluster.client.list::<ReplicaSet>("default").await.expect("sets");
    assert_eq!(sets.len(), 2);
    let done = run_fake_kubelet(&test_cluster, |deployment| {
        let mut conditions = deployment.status.iter().flat_map(|status| status.conditions.iter().flatten());
        conditions.any(|condition| condition.reason.as_deref() == Some("NewReplicaSetAvailable"))
    })
    .await;

    // The Deployment is up to date, so another sync writes nothing.
    wait_for("the controllers to be idle", async || test_cluster.ctx.metrics.all_idle().then_some(())).await;
    let patch = Patch::Merge(json!({"metadata": {"labels": {"a": "b"}}}));
    let patched: Deployment = test_cluster.client.patch(&done.key(), &patch).await.expect("touched");
    test_cluster.ctx.caches.deployments().wait_until_revision(patched.revision()).await.expect("seen");
    wait_for("the controllers to be idle", async || test_cluster.ctx.metrics.all_idle().then_some(())).await;
    let after: Deployment = test_cluster.client.get(&key).await.expect("a deployment");
    assert_eq!(after.revision(), patched.revision());
}

#[tokio::test]
async fn existing_replica_set_name_is_not_used() {
    let test_cluster = TestCluster::start(&["replicaset-controller"]).await;
    let created = test_cluster.client.create(&deployment(1, "a")).await.expect("created");
    let actions = plan::plan(&created, &[], |_| false, test_cluster.ctx.clock.now());
    let Some(Action::CreateSet(set)) = actions.into_iter().next() else { panic!("no set") };
    // A ReplicaSet of that name exists and is not owned by the Deployment.
    let mut other = *set;
    other.metadata.owner_references = None;
    other.metadata.labels = Some([("app".to_owned(), "other".to_owned())].into());
    test_cluster.client.create(&other).await.expect("created");
    test_cluster.start_controller("deployment-controller");
    let done = run_fake_kubelet(&test_cluster, is_done).await;
    assert_eq!(done.status.and_then(|status| status.collision_count), Some(1));
}
