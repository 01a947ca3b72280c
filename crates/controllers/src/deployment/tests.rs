use reconcile::Patch;
use serde_json::json;

use super::*;
use crate::rig::{Rig, until};

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

/// Plays the kubelet until `done` holds for the deployment: every pod becomes ready.
async fn play(rig: &Rig, done: impl Fn(&Deployment) -> bool) -> Deployment {
    until("the rollout", async || {
        for pod in rig.client.list::<Pod>("default").await.expect("pods") {
            if !pod::is_ready(&pod) {
                let ready = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]});
                let patch = Patch::Strategic(json!({"status": ready}));
                let _ = rig.client.patch_status::<Pod>(&pod.key(), &patch).await;
            }
        }
        let deployment: Deployment = rig.client.get(&Key::new("default", "web")).await.expect("a deployment");
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
async fn a_deployment_rolls_out_and_back() {
    let rig = Rig::start(CONTROLLERS).await;
    rig.client.create(&deployment(3, "a")).await.expect("created");
    let first = play(&rig, is_done).await;
    assert_eq!(first.annotation("deployment.kubernetes.io/revision"), Some("1"));

    let key = first.key();
    let image = |image: &str| {
        let containers = json!([{"name": "c", "image": image}]);
        Patch::Strategic(json!({"spec": {"template": {"spec": {"containers": containers}}}}))
    };
    for (name, revision) in [("b", "2"), ("a", "3")] {
        rig.client.patch::<Deployment>(&key, &image(name)).await.expect("changed");
        let done = play(&rig, is_done).await;
        assert_eq!(done.annotation("deployment.kubernetes.io/revision"), Some(revision));
    }
    let sets = rig.client.list::<ReplicaSet>("default").await.expect("sets");
    assert_eq!(sets.len(), 2);
    let done = play(&rig, |deployment| {
        let mut conditions = deployment.status.iter().flat_map(|status| status.conditions.iter().flatten());
        conditions.any(|condition| condition.reason.as_deref() == Some("NewReplicaSetAvailable"))
    })
    .await;

    // Nothing more is to be done, so being asked to look again writes nothing.
    until("the loops are idle", async || rig.ctx.metrics.all_idle().then_some(())).await;
    let patch = Patch::Merge(json!({"metadata": {"labels": {"a": "b"}}}));
    let touched: Deployment = rig.client.patch(&done.key(), &patch).await.expect("touched");
    rig.ctx.caches.deployments().seen(touched.revision()).await.expect("seen");
    until("the loops are idle", async || rig.ctx.metrics.all_idle().then_some(())).await;
    let after: Deployment = rig.client.get(&key).await.expect("a deployment");
    assert_eq!(after.revision(), touched.revision());
}

#[tokio::test]
async fn a_name_that_is_taken_is_avoided() {
    let rig = Rig::start(&["replicaset-controller"]).await;
    let made = rig.client.create(&deployment(1, "a")).await.expect("created");
    let actions = plan::plan(&made, &[], |_| false, rig.ctx.clock.now());
    let Some(Action::CreateSet(set)) = actions.into_iter().next() else { panic!("no set") };
    // Somebody else has a set of that name.
    let mut other = *set;
    other.metadata.owner_references = None;
    other.metadata.labels = Some([("app".to_owned(), "other".to_owned())].into());
    rig.client.create(&other).await.expect("created");
    rig.add("deployment-controller");
    let done = play(&rig, is_done).await;
    assert_eq!(done.status.and_then(|status| status.collision_count), Some(1));
}
