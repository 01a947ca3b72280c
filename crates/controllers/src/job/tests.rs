//! Plans for Jobs and pods given as text, a model with a stop between any two actions, and a test against a
//! real API server.

mod model;

use expect_test::{Expect, expect};
use jiff::Timestamp;
use k8s_openapi::api::batch::v1::JobStatus;
use serde_json::{Value, json};

use super::*;
use crate::test_cluster::{TestCluster, wait_for};

const NOW: &str = "2026-01-01T12:00:00Z";

fn now() -> Timestamp {
    NOW.parse().expect("a time")
}

fn job(spec: Value, status: Value) -> Job {
    let mut spec = spec;
    spec["template"] = json!({"spec": {"restartPolicy": "Never", "containers": [{"name": "main"}]}});
    if spec["backoffLimit"].is_null() {
        spec["backoffLimit"] = json!(6);
    }
    let metadata = json!({"name": "work", "namespace": "x", "uid": "job"});
    serde_json::from_value(json!({"metadata": metadata, "spec": spec, "status": status})).expect("a job")
}

/// `uid word...`, where a word is a phase, `going` (being deleted), `counted` (without finalizer), `ready`,
/// `#INDEX`, `fails=N`, `exit=CODE`, `ended=SECONDS` ago or `cond=TYPE`.
fn pod(text: &str) -> Arc<Pod> {
    let mut words = text.split_whitespace();
    let uid = words.next().expect("a uid");
    let mut metadata = json!({"name": uid, "namespace": "x", "uid": uid, "finalizers": [TRACKING_FINALIZER],
        "creationTimestamp": "2026-01-01T00:00:00Z", "annotations": {}});
    let mut status = json!({"phase": "Running", "conditions": []});
    let (mut code, mut ended) = (0, 3600);
    for word in words {
        match word.split_once('=').unwrap_or((word, "")) {
            ("going", _) => metadata["deletionTimestamp"] = json!(NOW),
            ("counted", _) => metadata["finalizers"] = json!([]),
            ("ready", _) => status["conditions"] = json!([{"type": "Ready", "status": "True"}]),
            ("cond", kind) => status["conditions"] = json!([{"type": kind, "status": "True"}]),
            ("exit", number) => code = number.parse().expect("a code"),
            ("ended", seconds) => ended = seconds.parse().expect("seconds"),
            ("fails", count) => {
                metadata["annotations"]["batch.kubernetes.io/job-index-failure-count"] = json!(count)
            }
            (index, _) if index.starts_with('#') => {
                metadata["annotations"]["batch.kubernetes.io/job-completion-index"] = json!(index[1..])
            }
            (phase, _) => status["phase"] = json!(phase),
        }
    }
    if matches!(status["phase"].as_str(), Some("Succeeded" | "Failed")) {
        let at = (now() - jiff::SignedDuration::from_secs(ended)).to_string();
        status["containerStatuses"] = json!([{"name": "main", "image": "", "imageID": "", "ready": false,
            "restartCount": 0, "state": {"terminated": {"exitCode": code, "finishedAt": at}}}]);
    }
    Arc::new(
        serde_json::from_value(json!({"metadata": metadata, "spec": {"containers": []}, "status": status}))
            .expect("a pod"),
    )
}

fn render(plan: &Plan) -> String {
    let names =
        |pods: &[Arc<Pod>]| pods.iter().map(|pod| pod.name().to_owned()).collect::<Vec<_>>().join(" ");
    let mut text = match &plan.step {
        Step::Done => "rest\n".to_owned(),
        Step::Pods { remove, create } => {
            let new_pods = create.iter().map(|new_pod| match (new_pod.index, new_pod.failures) {
                (None, _) => "pod".to_owned(),
                (Some(index), None) => format!("#{index}"),
                (Some(index), Some((failures, ignored))) => format!("#{index} after {failures}+{ignored}"),
            });
            let new_pods: Vec<String> = new_pods.collect();
            format!("remove [{}] create [{}]\n", names(remove), new_pods.join(", "))
        }
        Step::Track(tracking) => {
            let mut text = tracking.status.as_ref().map(render_status).unwrap_or_default();
            for (_, reason, message) in &tracking.events {
                text += &format!("event {reason}: {message}\n");
            }
            if !tracking.delete.is_empty() {
                text += &format!("delete {}\n", names(&tracking.delete));
            }
            if !tracking.untrack.is_empty() {
                text += &format!("untrack {}\n", names(&tracking.untrack));
            }
            text
        }
    };
    if let Some(at) = plan.requeue_at {
        text += &format!("again in {}s\n", at.duration_since(now()).as_secs());
    }
    text
}

fn render_status(status: &JobStatus) -> String {
    let mut status = serde_json::to_value(status).expect("a status");
    let fields = status.as_object_mut().expect("an object");
    let conditions = fields.remove("conditions");
    fields.remove("startTime");
    let mut text = format!("status {}\n", status.to_string().replace('"', ""));
    for condition in conditions.iter().flat_map(|list| list.as_array().into_iter().flatten()) {
        let word = |name: &str| condition[name].as_str().unwrap_or_default().to_owned();
        text += &format!("  {} {} {}: {}\n", word("type"), word("status"), word("reason"), word("message"));
    }
    text
}

#[track_caller]
fn check_with(spec: Value, status: Value, pods: &str, expected: Expect) {
    let pods: Vec<Arc<Pod>> = pods.split('|').filter(|text| !text.trim().is_empty()).map(pod).collect();
    let job = job(spec, status);
    let snapshot =
        JobSnapshot { job: &job, pods: &pods, backoff: backoff_from_counted_pods(&pods), now: now() };
    expected.assert_eq(&render(&plan(&snapshot, true)));
}

#[track_caller]
fn check(spec: Value, pods: &str, expected: Expect) {
    let status = json!({"startTime": "2026-01-01T11:59:00Z", "uncountedTerminatedPods": {}, "ready": 0,
        "terminating": 0});
    check_with(spec, status, pods, expected);
}

#[test]
fn pods_are_created_and_deleted_to_match_parallelism() {
    check(
        json!({"parallelism": 2, "completions": 5}),
        "",
        expect![[r#"
        remove [] create [pod, pod]
    "#]],
    );
    check(
        json!({"parallelism": 3, "completions": 4}),
        "a Succeeded counted",
        expect![[r#"
        remove [] create [pod, pod, pod]
    "#]],
    );
    // Only as many pods as completions are missing.
    check(
        json!({"parallelism": 3, "completions": 2}),
        "a Succeeded | b ready",
        expect![[r#"
        status {active:1,ready:1,terminating:0,uncountedTerminatedPods:{succeeded:[a]}}
        untrack a
    "#]],
    );
    check(
        json!({"parallelism": 1, "completions": 2}),
        "a ready | b Pending",
        expect![[r#"
        remove [b] create []
    "#]],
    );
    check(
        json!({"parallelism": 2, "suspend": true}),
        "a ready | b Pending",
        expect![[r#"
        remove [b a] create []
    "#]],
    );
    check(
        json!({"parallelism": 2, "suspend": true}),
        "",
        expect![[r#"
        status {ready:0,terminating:0,uncountedTerminatedPods:{}}
          Suspended True JobSuspended: Job suspended
        event Suspended: Job suspended
    "#]],
    );
    // A pod being deleted is replaced at once, or once it is terminal.
    check(
        json!({"parallelism": 1, "podReplacementPolicy": "TerminatingOrFailed"}),
        "a going counted",
        expect![[r#"
        remove [] create [pod]
    "#]],
    );
    check(
        json!({"parallelism": 1, "podReplacementPolicy": "Failed"}),
        "a going",
        expect![[r#"
        status {ready:0,terminating:1,uncountedTerminatedPods:{}}
    "#]],
    );
    // Without a number of completions, one success is enough.
    check(
        json!({"parallelism": 3}),
        "a Succeeded | b",
        expect![[r#"
        status {active:1,ready:0,terminating:0,uncountedTerminatedPods:{succeeded:[a]}}
        untrack a
    "#]],
    );
}

#[test]
fn failures_increase_backoff_until_job_fails() {
    check(
        json!({"parallelism": 1}),
        "a Failed ended=4",
        expect![[r#"
        status {ready:0,terminating:0,uncountedTerminatedPods:{failed:[a]}}
        untrack a
        again in 6s
    "#]],
    );
    check(
        json!({"parallelism": 1}),
        "a Failed ended=4 counted | b Failed ended=30 counted",
        expect![[r#"
        rest
        again in 16s
    "#]],
    );
    check(
        json!({"parallelism": 1}),
        "a Failed ended=40 counted | b Failed ended=30 counted",
        expect![[r#"
        remove [] create [pod]
    "#]],
    );
    check(
        json!({"parallelism": 2, "backoffLimit": 0}),
        "a Failed | b ready",
        expect![[r#"
        status {ready:0,terminating:1,uncountedTerminatedPods:{failed:[a,b]}}
          FailureTarget True BackoffLimitExceeded: Job has reached the specified backoff limit
        delete b
        untrack a b
    "#]],
    );
    check(
        json!({"parallelism": 1, "activeDeadlineSeconds": 60}),
        "a ready",
        expect![[r#"
        status {ready:0,terminating:1,uncountedTerminatedPods:{failed:[a]}}
          FailureTarget True DeadlineExceeded: Job was active longer than specified deadline
        delete a
        untrack a
    "#]],
    );
    check(
        json!({"parallelism": 1, "activeDeadlineSeconds": 61}),
        "a ready",
        expect![[r#"
        status {active:1,ready:1,terminating:0,uncountedTerminatedPods:{}}
        again in 1s
    "#]],
    );
}

#[test]
fn job_is_finished_after_all_pods_are_counted() {
    let target = json!([{"type": "FailureTarget", "status": "True", "reason": "R", "message": "M"}]);
    let status = |failed: Value, uncounted: Value| {
        json!({"startTime": "2026-01-01T11:59:00Z", "failed": failed, "ready": 0, "terminating": 0,
            "conditions": target, "uncountedTerminatedPods": {"failed": uncounted}})
    };
    let spec = json!({"parallelism": 1, "completions": 1, "backoffLimit": 0});
    check_with(
        spec.clone(),
        status(json!(1), json!(["b"])),
        "b Running going",
        expect![[r#"
        status {failed:1,ready:0,terminating:1,uncountedTerminatedPods:{failed:[b]}}
          FailureTarget True R: M
        untrack b
    "#]],
    );
    check_with(
        spec.clone(),
        status(json!(1), json!(["b"])),
        "b Running going counted",
        expect![[r#"
        status {failed:2,ready:0,terminating:1,uncountedTerminatedPods:{}}
          FailureTarget True R: M
    "#]],
    );
    check_with(
        spec.clone(),
        status(json!(2), json!(null)),
        "",
        expect![[r#"
        status {failed:2,ready:0,terminating:0,uncountedTerminatedPods:{}}
          FailureTarget True R: M
          Failed True R: M
        event R: M
    "#]],
    );
    check(
        json!({"parallelism": 1, "completions": 1}),
        "a Succeeded",
        expect![[r#"
        status {ready:0,terminating:0,uncountedTerminatedPods:{succeeded:[a]}}
          SuccessCriteriaMet True CompletionsReached: Reached expected number of succeeded pods
        untrack a
    "#]],
    );
    let met = json!([{"type": "SuccessCriteriaMet", "status": "True", "reason": "R", "message": "M"}]);
    let status = json!({"startTime": "2026-01-01T11:59:00Z", "ready": 0, "terminating": 0,
        "conditions": met, "uncountedTerminatedPods": {"succeeded": ["a"]}});
    check_with(
        json!({"parallelism": 1, "completions": 1}),
        status,
        "a Succeeded counted",
        expect![[r#"
        status {completionTime:2026-01-01T12:00:00Z,ready:0,succeeded:1,terminating:0,uncountedTerminatedPods:{}}
          SuccessCriteriaMet True R: M
          Complete True R: M
        event Completed: Job completed
    "#]],
    );
}

#[test]
fn indexed_job_creates_missing_indexes() {
    let spec = json!({"parallelism": 3, "completions": 4, "completionMode": "Indexed"});
    check(
        spec.clone(),
        "a #1",
        expect![[r#"
        remove [] create [#0, #2]
    "#]],
    );
    check(
        spec.clone(),
        "a #1 Succeeded | b #0 | c #2 | d #3",
        expect![[r#"
        status {active:3,completedIndexes:1,ready:0,succeeded:1,terminating:0,uncountedTerminatedPods:{}}
        untrack a
    "#]],
    );
    // A duplicate index, an invalid index and no index.
    check(
        spec,
        "a #1 Pending | b #1 | c #7 | d",
        expect![[r#"
        remove [d c a] create []
    "#]],
    );
    let spec = json!({"parallelism": 3, "completions": 3, "completionMode": "Indexed",
        "backoffLimitPerIndex": 1, "maxFailedIndexes": 1, "backoffLimit": 100});
    check(
        spec.clone(),
        "a #0 | b #1 Failed fails=0 ended=3 | c #2",
        expect![[r#"
        status {active:2,failedIndexes:,ready:0,terminating:0,uncountedTerminatedPods:{}}
        again in 7s
    "#]],
    );
    check(
        spec.clone(),
        "a #0 | b #1 Failed fails=0 | c #2",
        expect![[r#"
        remove [] create [#1 after 1+0]
    "#]],
    );
    check(
        spec.clone(),
        "a #0 | b #1 Failed fails=1 | c #2",
        expect![[r#"
        status {active:2,failedIndexes:1,ready:0,terminating:0,uncountedTerminatedPods:{failed:[b]}}
        untrack b
    "#]],
    );
    check(
        spec.clone(),
        "a #0 Failed fails=1 | b #1 Failed fails=1 | c #2",
        expect![[r#"
        status {failedIndexes:0,1,ready:0,terminating:1,uncountedTerminatedPods:{failed:[a,b,c]}}
          FailureTarget True MaxFailedIndexesExceeded: Job has exceeded the specified maximal number of failed indexes
        delete c
        untrack a b c
    "#]],
    );
    check(
        spec,
        "a #0 Succeeded | b #1 Failed fails=1 | c #2 Succeeded",
        expect![[r#"
        status {completedIndexes:0,2,failedIndexes:1,ready:0,succeeded:2,terminating:0,uncountedTerminatedPods:{failed:[b]}}
          FailureTarget True FailedIndexes: Job has failed indexes
        untrack a b c
    "#]],
    );
}

#[test]
fn failure_and_success_policies() {
    let rules = json!([
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42]}},
        {"action": "FailIndex", "onExitCodes": {"operator": "NotIn", "values": [1, 42]}},
    ]);
    let spec = json!({"parallelism": 2, "completions": 2, "podFailurePolicy": {"rules": rules}});
    check(
        spec.clone(),
        "a Failed exit=42 | b",
        expect![[r#"
        status {ready:0,terminating:1,uncountedTerminatedPods:{failed:[a,b]}}
          FailureTarget True PodFailurePolicy: Container main for pod x/a failed with exit code 42 matching FailJob rule at index 1
        delete b
        untrack a b
    "#]],
    );
    check(
        spec.clone(),
        "a Failed exit=42 cond=DisruptionTarget ended=1 | b",
        expect![[r#"
        status {active:1,ready:0,terminating:0,uncountedTerminatedPods:{}}
        untrack a
        again in 9s
    "#]],
    );
    check(
        spec,
        "a Failed exit=1 ended=1 | b",
        expect![[r#"
        status {active:1,ready:0,terminating:0,uncountedTerminatedPods:{failed:[a]}}
        untrack a
        again in 9s
    "#]],
    );
    let spec = json!({"parallelism": 4, "completions": 4, "completionMode": "Indexed",
        "successPolicy": {"rules": [{"succeededIndexes": "0,2-3", "succeededCount": 2}]}});
    check(
        spec,
        "a #0 Succeeded | b #1 | c #3 Succeeded",
        expect![[r#"
        status {completedIndexes:0,3,ready:0,succeeded:2,terminating:1,uncountedTerminatedPods:{}}
          SuccessCriteriaMet True SuccessPolicy: Matched rules at index 0
        delete b
        untrack a b c
    "#]],
    );
}

#[test]
fn pod_has_index_label_and_env() {
    let job = job(json!({}), json!({}));
    let pod = pods::pod(&job, &NewPod { index: Some(3), failures: Some((1, 0)) });
    let pod = serde_json::to_value(pod).expect("a pod");
    let metadata = json!({"generateName": "work-3-", "finalizers": [TRACKING_FINALIZER],
        "labels": {"batch.kubernetes.io/job-completion-index": "3"},
        "annotations": {"batch.kubernetes.io/job-completion-index": "3",
            "batch.kubernetes.io/job-index-failure-count": "1"}});
    for (name, value) in metadata.as_object().expect("an object") {
        assert_eq!(pod["metadata"][name], *value, "{name}");
    }
    assert_eq!(pod["spec"]["hostname"], "work-3");
    assert_eq!(
        pod["spec"]["containers"][0]["env"],
        json!([{"name": "JOB_COMPLETION_INDEX", "valueFrom": {"fieldRef":
            {"fieldPath": "metadata.labels['batch.kubernetes.io/job-completion-index']"}}}])
    );
}

async fn finish(test_cluster: &TestCluster, namespace: &str, phase: &str) {
    for pod in test_cluster.client.list::<Pod>(namespace).await.expect("pods") {
        if !pod::is_terminal(&pod) {
            let patch = Patch::Merge(json!({"status": {"phase": phase}}));
            let _ = test_cluster.client.patch_status::<Pod>(&pod.key(), &patch).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn job_completes_on_api_server() {
    let test_cluster = TestCluster::start(&["job-controller"]).await;
    let template =
        json!({"spec": {"restartPolicy": "Never", "containers": [{"name": "main", "image": "i"}]}});
    let spec = json!({"parallelism": 2, "completions": 5, "template": template});
    let job: Job =
        serde_json::from_value(json!({"metadata": {"name": "work", "namespace": "default"}, "spec": spec}))
            .expect("a job");
    test_cluster.client.create(&job).await.expect("a job");
    let done = wait_for("completion of the Job", || async {
        finish(&test_cluster, "default", "Succeeded").await;
        let job = test_cluster.client.get::<Job>(&job.key()).await.expect("the job");
        plan::is_finished(&job).then_some(job)
    })
    .await;
    let status = done.status.expect("a status");
    assert_eq!((status.succeeded, status.failed, status.active), (Some(5), None, None));
    let kinds: Vec<String> =
        status.conditions.into_iter().flatten().map(|condition| condition.type_).collect();
    assert_eq!(kinds, ["SuccessCriteriaMet", "Complete"]);
    let pods = test_cluster.client.list::<Pod>("default").await.expect("pods");
    assert_eq!(pods.len(), 5);
    assert!(pods.iter().all(|pod| !is_tracked(pod)));
}

#[tokio::test(flavor = "multi_thread")]
async fn creates_no_pods_for_deleted_job() {
    let test_cluster = TestCluster::start(&[]).await;
    let template =
        json!({"spec": {"restartPolicy": "Never", "containers": [{"name": "main", "image": "i"}]}});
    let metadata = json!({"name": "work", "namespace": "default"});
    let job: Job =
        serde_json::from_value(json!({"metadata": metadata, "spec": {"template": template}})).expect("a job");
    let start_caches = |caches: &reconcile::Caches| _ = (caches.jobs(), caches.pods());
    let ctx = test_cluster.with_deleted_owner("job-controller", &job, "active", start_caches).await;
    // The pod has failed and is not replaced before the backoff ends.
    ctx.clock.advance(3600);
    let done = super::reconcile(&ctx, &BackoffStore::default(), &job.key()).await;
    assert_eq!(done.expect("nothing to do"), ReconcileAction::AwaitChange);
    test_cluster.assert_no_pods().await;
}
