//! Plans for pods given as text, a model with a stop between any two actions, and tests against a real API
//! server.

mod model;

use std::sync::Arc;

use expect_test::{Expect, expect};
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::ControllerRevision;

use serde_json::{Value, json};

use super::*;
use crate::test_cluster::{TestCluster, wait_for};

const NOW: &str = "2026-01-01T12:00:00Z";

fn now() -> Timestamp {
    NOW.parse().expect("a time")
}

fn set(spec: Value, image: &str) -> StatefulSet {
    let mut spec = spec;
    spec["selector"] = json!({"matchLabels": {"app": "web"}});
    spec["serviceName"] = json!("nginx");
    spec["template"] = json!({"metadata": {"labels": {"app": "web"}},
        "spec": {"containers": [{"name": "c", "image": image}]}});
    if spec["updateStrategy"].is_null() {
        spec["updateStrategy"] = json!({"type": "RollingUpdate", "rollingUpdate": {"partition": 0}});
    }
    let metadata = json!({"name": "web", "namespace": "x", "uid": "set", "generation": 1});
    serde_json::from_value(json!({"metadata": metadata, "spec": spec})).expect("a set")
}

fn revision(set: &StatefulSet, number: i64) -> Arc<ControllerRevision> {
    let template = &set.spec.as_ref().expect("a spec").template;
    Arc::new(history::new_revision(set, template, HASH_LABEL, number, None))
}

/// `ordinal word...`, where a word is `old` or `older` (revision), `ready`, `lost` (was ready), `crashes`,
/// `going` (being deleted) or a phase.
fn pod(text: &str, set: &StatefulSet, revisions: &[Arc<ControllerRevision>]) -> Arc<Pod> {
    let mut words = text.split_whitespace();
    let ordinal: i32 = words.next().and_then(|word| word.parse().ok()).expect("an ordinal");
    let spec = set.spec.as_ref().expect("a spec");
    let (mut age, mut status) = (1, json!({"phase": "Running"}));
    let mut is_deleting = false;
    let container = |state: Value| json!([{"name": "c", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state}]);
    for word in words {
        match word {
            "old" => age = 2,
            "older" => age = 3,
            "going" => is_deleting = true,
            "ready" => {
                let since = "2026-01-01T00:00:00Z";
                status["conditions"] =
                    json!([{"type": "Ready", "status": "True", "lastTransitionTime": since}])
            }
            "lost" => {
                let since = "2026-01-01T11:00:00Z";
                status["conditions"] =
                    json!([{"type": "Ready", "status": "False", "lastTransitionTime": since}]);
                status["containerStatuses"] =
                    container(json!({"running": {"startedAt": "2026-01-01T10:00:00Z"}}));
            }
            "crashes" => {
                status["containerStatuses"] = container(json!({"waiting": {"reason": "CrashLoopBackOff"}}))
            }
            phase => status["phase"] = json!(phase),
        }
    }
    let revision = &revisions[revisions.len() - age];
    let template = history::template(revision).expect("a template");
    let mut pod = pods::pod(set, spec, &template, revision.name(), ordinal);
    pod.metadata.uid = Some(format!("uid-{ordinal}"));
    pod.status = serde_json::from_value(status).expect("a status");
    if is_deleting {
        pod.metadata.deletion_timestamp = serde_json::from_value(json!(NOW)).expect("a time");
    }
    Arc::new(pod)
}

fn render(plan: &Plan) -> String {
    let mut text = match &plan.step {
        Step::Done => "rest\n".to_owned(),
        Step::Revise(MissingRevision::Create { number }) => format!("remember as {number}\n"),
        Step::Revise(MissingRevision::SetNumber { number, .. }) => format!("renumber to {number}\n"),
        Step::TruncateHistory(old) => format!("trim {}\n", old.len()),
        Step::Status(status) => format!(
            "status {} of them {} ready {} available {} current {} updated{}\n",
            status.replicas,
            status.ready_replicas.unwrap_or(0),
            status.available_replicas.unwrap_or(0),
            status.current_replicas.unwrap_or(0),
            status.updated_replicas.unwrap_or(0),
            if status.current_revision == status.update_revision { "" } else { ", going on" },
        ),
        Step::Apply(actions) => actions.iter().map(render_action).collect(),
    };
    text += &plan.requeue_at.map_or(String::new(), |at| format!("again at {at}\n"));
    text
}

fn render_action(action: &Action) -> String {
    match action {
        Action::CreateClaim { claim, pod } => format!("create claim {} for {pod}\n", claim.name()),
        Action::UpdateClaimOwners(claim) => {
            let owners = claim.metadata.owner_references.iter().flatten();
            let names: Vec<&str> = owners.map(|owner| owner.name.as_str()).collect();
            format!("claim {} belongs to [{}]\n", claim.name(), names.join(" "))
        }
        Action::CreatePod(pod) => {
            let image = pod.spec.as_ref().and_then(|spec| spec.containers[0].image.as_deref());
            format!("create {} of {}\n", pod.name(), image.unwrap_or_default())
        }
        Action::DeletePod(pod) => format!("delete {}\n", pod.name()),
        Action::LabelPod { pod, .. } => format!("label {}\n", pod.name()),
        Action::Wait { pod, message } => format!("{pod} waits: {message}\n"),
    }
}

/// The template was `older`, then `old`, and is `new` now. The current revision is `old`.
#[track_caller]
fn check_with(spec: Value, pods: &str, claims: &[PersistentVolumeClaim], expected: Expect) {
    let images = ["older", "old", "new"];
    let revisions: Vec<_> =
        images.iter().zip(1..).map(|(image, number)| revision(&set(spec.clone(), image), number)).collect();
    let mut set = set(spec, "new");
    set.status = Some(StatefulSetStatus {
        current_revision: Some(revisions[1].name().to_owned()),
        ..StatefulSetStatus::default()
    });
    let pods: Vec<Arc<Pod>> = pods
        .split('|')
        .filter(|text| !text.trim().is_empty())
        .map(|text| pod(text, &set, &revisions))
        .collect();
    let claims: Vec<_> = claims.iter().cloned().map(Arc::new).collect();
    let spec = set.spec.as_ref().expect("a spec");
    let history = History::of(&spec.template, revisions);
    let snapshot =
        StatefulSetSnapshot { set: &set, spec, pods: &pods, claims: &claims, history: &history, now: now() };
    expected.assert_eq(&render(&plan(&snapshot, true)));
}

#[track_caller]
fn check(spec: Value, pods: &str, expected: Expect) {
    check_with(spec, pods, &[], expected);
}

#[test]
fn ordered_pods_start_and_stop_one_at_a_time() {
    let three = || json!({"replicas": 3});
    check(
        three(),
        "",
        expect![[r#"
        create web-0 of new
    "#]],
    );
    check(
        three(),
        "0 Pending",
        expect![[r#"
        status 1 of them 0 ready 0 available 0 current 1 updated, going on
    "#]],
    );
    check(
        three(),
        "0 ready",
        expect![[r#"
        create web-1 of new
    "#]],
    );
    check(
        three(),
        "0 ready | 2 ready",
        expect![[r#"
        create web-1 of new
    "#]],
    );
    check(
        three(),
        "0 ready | 1 ready going | 2 ready",
        expect![[r#"
        status 3 of them 3 ready 3 available 0 current 2 updated, going on
    "#]],
    );
    check(
        three(),
        "0 ready | 1 Failed | 2 ready",
        expect![[r#"
        delete web-1
    "#]],
    );
    check(
        three(),
        "0 ready | 1 ready | 2 ready",
        expect![[r#"
        status 3 of them 3 ready 3 available 3 current 3 updated
    "#]],
    );
    check(
        json!({"replicas": 1}),
        "0 ready | 1 ready | 2 ready",
        expect![[r#"
        delete web-2
    "#]],
    );
    check(
        json!({"replicas": 1}),
        "0 ready | 1 ready | 2 ready going",
        expect![[r#"
        status 3 of them 3 ready 3 available 0 current 2 updated, going on
    "#]],
    );
    check(
        json!({"replicas": 1}),
        "0 | 1 ready | 2 ready",
        expect![[r#"
        status 3 of them 2 ready 2 available 0 current 3 updated, going on
    "#]],
    );
    check(
        json!({"replicas": 1}),
        "0 ready | 1 | 2",
        expect![[r#"
        status 3 of them 1 ready 1 available 0 current 3 updated, going on
    "#]],
    );
    check(
        json!({"replicas": 1}),
        "0 ready | 1 ready | 2",
        expect![[r#"
        delete web-2
    "#]],
    );
    check(
        json!({"replicas": 2, "ordinals": {"start": 5}}),
        "5 ready | 0 ready",
        expect![[r#"
        create web-6 of new
    "#]],
    );
}

#[test]
fn parallel_pods_start_and_stop_at_once() {
    let parallel = |replicas: i32| json!({"replicas": replicas, "podManagementPolicy": "Parallel"});
    check(
        parallel(3),
        "1",
        expect![[r#"
        create web-0 of new
        create web-2 of new
    "#]],
    );
    check(
        parallel(1),
        "0 | 1 ready | 2 ready",
        expect![[r#"
        delete web-2
        delete web-1
    "#]],
    );
    check(
        parallel(3),
        "0 old ready | 1 old ready | 2 ready",
        expect![[r#"
        delete web-1
    "#]],
    );
    check(
        parallel(3),
        "0 old ready | 1 old ready | 2",
        expect![[r#"
        status 3 of them 2 ready 2 available 2 current 1 updated, going on
    "#]],
    );
    check(
        parallel(3),
        "0 old ready | 1 old ready | 2 older",
        expect![[r#"
        delete web-2
    "#]],
    );
}

#[test]
fn rolling_update_respects_partition() {
    let rolling = |partition: i32| {
        let strategy = json!({"type": "RollingUpdate", "rollingUpdate": {"partition": partition}});
        json!({"replicas": 3, "updateStrategy": strategy})
    };
    let old = "0 old ready | 1 old ready | 2 old ready";
    check(
        rolling(0),
        old,
        expect![[r#"
        delete web-2
    "#]],
    );
    check(
        rolling(3),
        old,
        expect![[r#"
        status 3 of them 3 ready 3 available 3 current 0 updated, going on
    "#]],
    );
    check(
        rolling(2),
        "0 old ready | 1 old ready | 2 ready",
        expect![[r#"
        status 3 of them 3 ready 3 available 2 current 1 updated, going on
    "#]],
    );
    check(
        rolling(2),
        "0 old ready | 2 ready",
        expect![[r#"
        create web-1 of old
    "#]],
    );
    check(
        rolling(0),
        "0 old ready | 1 old ready | 2",
        expect![[r#"
        status 3 of them 2 ready 2 available 2 current 1 updated, going on
    "#]],
    );
    check(
        rolling(0),
        "0 old ready | 1 old ready | 2 ready",
        expect![[r#"
        delete web-1
    "#]],
    );
    check(
        json!({"replicas": 3, "updateStrategy": {"type": "OnDelete"}}),
        old,
        expect![[r#"
        status 3 of them 3 ready 3 available 3 current 0 updated, going on
    "#]],
    );
    let two = json!({"type": "RollingUpdate", "rollingUpdate": {"partition": 0, "maxUnavailable": 2}});
    check(
        json!({"replicas": 3, "updateStrategy": two}),
        old,
        expect![[r#"
        delete web-2
        delete web-1
    "#]],
    );
    // A pod of an outdated template that was never ready does not block the rollout. One that was ready
    // before does.
    check(
        rolling(0),
        "0 old ready | 1 old ready | 2 older crashes",
        expect![[r#"
        delete web-2
    "#]],
    );
    check(
        rolling(0),
        "0 old Pending",
        expect![[r#"
        delete web-0
    "#]],
    );
    check(
        rolling(0),
        "0 old lost | 1 old ready | 2 old ready",
        expect![[r#"
        status 3 of them 2 ready 2 available 3 current 0 updated, going on
    "#]],
    );
    check(
        rolling(1),
        "0 old Pending | 1 ready | 2 ready",
        expect![[r#"
        status 3 of them 2 ready 2 available 1 current 2 updated, going on
    "#]],
    );
    check(
        rolling(1),
        "0 older Pending | 1 ready | 2 ready",
        expect![[r#"
        delete web-0
    "#]],
    );
}

#[test]
fn claim_owners_follow_retention_policy() {
    let spec = |replicas: i32, scaled: &str, deleted: &str| {
        json!({"replicas": replicas, "volumeClaimTemplates": [{"metadata": {"name": "data"}}],
            "persistentVolumeClaimRetentionPolicy": {"whenScaled": scaled, "whenDeleted": deleted}})
    };
    let claim = |ordinal: i32, owners: &[(&str, &str, &str)]| -> PersistentVolumeClaim {
        let owners: Vec<Value> = owners
            .iter()
            .map(|(kind, name, uid)| {
                let version = if *kind == "Pod" { "v1" } else { "apps/v1" };
                json!({"apiVersion": version, "kind": kind, "name": name, "uid": uid, "controller": true})
            })
            .collect();
        let name = format!("data-web-{ordinal}");
        serde_json::from_value(
            json!({"metadata": {"name": name, "namespace": "x", "ownerReferences": owners}}),
        )
        .expect("a claim")
    };
    check_with(
        spec(1, "Retain", "Retain"),
        "",
        &[],
        expect![[r#"
        create claim data-web-0 for web-0
        create web-0 of new
    "#]],
    );
    check_with(
        spec(1, "Retain", "Retain"),
        "",
        &[claim(0, &[])],
        expect![[r#"
        create web-0 of new
    "#]],
    );
    check_with(
        spec(1, "Retain", "Delete"),
        "0 ready",
        &[claim(0, &[])],
        expect![[r#"
        claim data-web-0 belongs to [web]
    "#]],
    );
    check_with(
        spec(1, "Retain", "Retain"),
        "0 ready",
        &[claim(0, &[("StatefulSet", "web", "set")])],
        expect![[r#"
            claim data-web-0 belongs to []
        "#]],
    );
    let both = [claim(0, &[("StatefulSet", "web", "set")]), claim(1, &[("StatefulSet", "web", "set")])];
    check_with(
        spec(1, "Delete", "Delete"),
        "0 ready | 1 ready",
        &both,
        expect![[r#"
        claim data-web-1 belongs to [web-1]
        delete web-1
    "#]],
    );
    check_with(
        spec(1, "Delete", "Retain"),
        "0 ready | 1 ready",
        &[claim(0, &[]), claim(1, &[])],
        expect![[r#"
            claim data-web-1 belongs to [web-1]
            delete web-1
        "#]],
    );
    // The claim is deleted with the earlier pod.
    check_with(
        spec(1, "Delete", "Retain"),
        "",
        &[claim(0, &[("Pod", "web-0", "former")])],
        expect![[r#"
        status 0 of them 0 ready 0 available 0 current 0 updated, going on
    "#]],
    );
    // The claim has another controller.
    check_with(
        spec(1, "Delete", "Delete"),
        "0 ready",
        &[claim(0, &[("Other", "o", "o")])],
        expect![[r#"
        status 1 of them 1 ready 1 available 1 current 1 updated
    "#]],
    );
    let mut deleting = claim(0, &[]);
    deleting.metadata.deletion_timestamp = serde_json::from_value(json!(NOW)).expect("a time");
    check_with(
        spec(1, "Retain", "Retain"),
        "",
        &[deleting],
        expect![[r#"
        web-0 waits: pvc data-web-0 is being deleted
    "#]],
    );
}

#[test]
fn pod_has_ordinal_labels_and_claims() {
    let set = set(json!({"replicas": 1, "volumeClaimTemplates": [{"metadata": {"name": "data"}}]}), "i");
    let spec = set.spec.as_ref().expect("a spec");
    let pod = pods::pod(&set, spec, &spec.template, "web-abc", 3);
    let labels = pod.metadata.labels.clone().unwrap_or_default();
    let labels: Vec<String> = labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    assert_eq!(
        labels,
        [
            "app=web",
            "apps.kubernetes.io/pod-index=3",
            "controller-revision-hash=web-abc",
            "statefulset.kubernetes.io/pod-name=web-3"
        ]
    );
    let pod_spec = pod.spec.as_ref().expect("a spec");
    assert_eq!((pod_spec.hostname.as_deref(), pod_spec.subdomain.as_deref()), (Some("web-3"), Some("nginx")));
    let volume = &pod_spec.volumes.as_ref().expect("volumes")[0];
    let claim = volume.persistent_volume_claim.as_ref().map(|source| source.claim_name.as_str());
    assert_eq!((volume.name.as_str(), claim), ("data", Some("data-web-3")));
    for (name, expected) in
        [("web-3", Some(3)), ("web-03", None), ("web-x", None), ("web-db-1", None), ("web--1", None)]
    {
        let named = Pod {
            metadata: serde_json::from_value(json!({"name": name})).expect("metadata"),
            ..Pod::default()
        };
        assert_eq!(pods::ordinal(&set, &named), expected, "{name}");
    }
}

async fn make_ready(test_cluster: &TestCluster) {
    for pod in test_cluster.client.list::<Pod>("default").await.expect("pods") {
        if pod.is_deleting() {
            let now = DeleteOptions { grace_seconds: Some(0), ..DeleteOptions::uid(pod.uid()) };
            let _ = test_cluster.client.delete::<Pod>(&pod.key(), &now).await;
        } else if !crate::pod::is_ready(&pod) {
            let ready =
                json!([{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]);
            let patch = Patch::Merge(json!({"status": {"phase": "Running", "conditions": ready}}));
            let _ = test_cluster.client.patch_status::<Pod>(&pod.key(), &patch).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn scale_and_rolling_update_on_api_server() {
    let test_cluster = TestCluster::start(&["statefulset-controller"]).await;
    let claim = json!({"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}}}});
    let mut stateful_set = set(json!({"replicas": 2, "volumeClaimTemplates": [claim]}), "one");
    stateful_set.metadata.uid = None;
    stateful_set.metadata.namespace = Some("default".to_owned());
    test_cluster.client.create(&stateful_set).await.expect("a set");
    let stable_status = |image: &'static str| {
        let (test_cluster, key) = (&test_cluster, stateful_set.key());
        async move {
            wait_for("a stable set", || async {
                make_ready(test_cluster).await;
                let set = test_cluster.client.get::<StatefulSet>(&key).await.expect("the set");
                let status = set.status.unwrap_or_default();
                let pods = test_cluster.client.list::<Pod>("default").await.expect("pods");
                let images = pods.iter().filter_map(|pod| pod.spec.as_ref()?.containers[0].image.as_deref());
                let right = images.into_iter().filter(|found| *found == image).count() == 2;
                (right
                    && status.ready_replicas == Some(2)
                    && status.current_revision == status.update_revision)
                    .then_some(status)
            })
            .await
        }
    };
    let status = stable_status("one").await;
    assert_eq!((status.replicas, status.available_replicas, status.collision_count), (2, Some(2), Some(0)));
    let claims = test_cluster.client.list::<PersistentVolumeClaim>("default").await.expect("claims");
    let names: Vec<&str> = claims.iter().map(|claim| claim.name()).collect();
    assert_eq!(names, ["data-web-0", "data-web-1"]);
    let image = json!([{"op": "replace", "path": "/spec/template/spec/containers/0/image", "value": "two"}]);
    test_cluster
        .client
        .patch::<StatefulSet>(&stateful_set.key(), &Patch::Json(image))
        .await
        .expect("the set");
    stable_status("two").await;
    assert_eq!(test_cluster.client.list::<ControllerRevision>("default").await.expect("revisions").len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn creates_no_pods_for_deleted_set() {
    let test_cluster = TestCluster::start(&[]).await;
    let mut stateful_set = set(json!({"replicas": 1}), "one");
    stateful_set.metadata.uid = None;
    stateful_set.metadata.namespace = Some("default".to_owned());
    let start_caches = |caches: &reconcile::Caches| {
        let _ = (caches.stateful_sets(), caches.pods(), caches.controller_revisions());
    };
    let ctx = test_cluster
        .with_deleted_owner("statefulset-controller", &stateful_set, "replicas", start_caches)
        .await;
    assert_eq!(
        reconcile(&ctx, &stateful_set.key()).await.expect("nothing to do"),
        ReconcileAction::AwaitChange
    );
    test_cluster.assert_no_pods().await;
}
