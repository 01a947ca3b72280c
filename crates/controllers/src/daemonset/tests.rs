//! Plans for nodes and pods given as text, a model of rollouts, and a test against a real API server.

use expect_test::{Expect, expect};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::apps::v1::ControllerRevision;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::history::MissingRevision;
use crate::pod as pods_of;
use crate::test_cluster::{TestCluster, wait_for};

const NOW: &str = "2026-01-01T12:00:00Z";

fn now() -> Timestamp {
    NOW.parse().expect("a time")
}

fn set(strategy: Value, image: &str) -> DaemonSet {
    let template = json!({"metadata": {"labels": {"app": "d"}},
        "spec": {"nodeSelector": {"disk": "ssd"}, "containers": [{"name": "c", "image": image}]}});
    let spec = json!({"selector": {"matchLabels": {"app": "d"}}, "template": template, "updateStrategy": strategy,
        "revisionHistoryLimit": 1});
    let metadata = json!({"name": "d", "namespace": "x", "uid": "set", "generation": 1});
    serde_json::from_value(json!({"metadata": metadata, "spec": spec})).expect("a set")
}

fn rolling(unavailable: Value, surge: Value) -> Value {
    json!({"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": unavailable, "maxSurge": surge}})
}

/// `name word...`, where a word is `hdd` or `TAINT:EFFECT`.
fn node(text: &str) -> Arc<Node> {
    let mut words = text.split_whitespace();
    let name = words.next().expect("a name");
    let mut value = json!({"metadata": {"name": name, "labels": {"disk": "ssd"}}, "spec": {"taints": []}});
    for word in words {
        match word.split_once(':') {
            None => value["metadata"]["labels"]["disk"] = json!(word),
            Some((key, effect)) => value["spec"]["taints"] = json!([{"key": key, "effect": effect}]),
        }
    }
    Arc::new(serde_json::from_value(value).expect("a node"))
}

fn revision(set: &DaemonSet, number: i64) -> Arc<ControllerRevision> {
    let template = &set.spec.as_ref().expect("a spec").template;
    Arc::new(history::new_revision(set, template, POD_REVISION, number, None))
}

/// `name node word...`, where a word is `old`, `ready`, `going` (being deleted), `waiting` (unscheduled) or
/// a phase.
fn pod(text: &str, set: &DaemonSet) -> Arc<Pod> {
    let mut words = text.split_whitespace();
    let (name, node) = (words.next().expect("a name"), words.next().expect("a node"));
    let hash = revision(set, 1).label(POD_REVISION).expect("a hash").to_owned();
    let mut pod = pods::pod(set, node, &hash);
    pod.metadata.name = Some(name.to_owned());
    pod.metadata.uid = Some(name.to_owned());
    pod.spec.get_or_insert_default().node_name = Some(node.to_owned());
    let mut status = json!({"phase": "Running"});
    for word in words {
        match word {
            "old" => {
                let labels = pod.metadata.labels.get_or_insert_default();
                labels.insert(POD_REVISION.to_owned(), "old".to_owned());
            }
            "ready" => {
                status["conditions"] = json!([{"type": "Ready", "status": "True",
                "lastTransitionTime": "2026-01-01T00:00:00Z"}])
            }
            "going" => {
                pod.metadata.deletion_timestamp = serde_json::from_value(json!(NOW)).expect("a time");
            }
            "waiting" => pod.spec.get_or_insert_default().node_name = None,
            phase => status["phase"] = json!(phase),
        }
    }
    pod.status = serde_json::from_value(status).expect("a status");
    Arc::new(pod)
}

fn render(plan: &Plan) -> String {
    let names =
        |pods: &[Arc<Pod>]| pods.iter().map(|pod| pod.name().to_owned()).collect::<Vec<_>>().join(" ");
    let mut text = match &plan.step {
        Step::Done => "rest\n".to_owned(),
        Step::Revise(MissingRevision::Create { number }) => format!("remember as {number}\n"),
        Step::Revise(MissingRevision::SetNumber { number, .. }) => format!("renumber to {number}\n"),
        Step::MergeRevisions { drop, pods_to_label, .. } => {
            format!("merge {} relabel {}\n", drop.len(), names(pods_to_label))
        }
        Step::TruncateHistory(old) => format!("trim {}\n", old.len()),
        Step::Status(status) => format!(
            "status {} desired {} current {} misscheduled {} ready {} updated {} available {} unavailable\n",
            status.desired_number_scheduled,
            status.current_number_scheduled,
            status.number_misscheduled,
            status.number_ready,
            status.updated_number_scheduled.unwrap_or(0),
            status.number_available.unwrap_or(0),
            status.number_unavailable.unwrap_or(0),
        ),
        Step::Pods(pods) => {
            let mut text = format!("delete [{}] create [{}]\n", names(&pods.delete), pods.create.join(" "));
            for (_, reason, message) in &pods.events {
                text += &format!("event {reason}: {message}\n");
            }
            text
        }
    };
    text += &plan.requeue_at.map_or(String::new(), |at| format!("again at {at}\n"));
    text
}

#[track_caller]
fn check(strategy: Value, nodes: &str, pods: &str, expected: Expect) {
    let set = set(strategy, "i");
    let nodes: Vec<Arc<Node>> = nodes.split('|').map(node).collect();
    let pods: Vec<Arc<Pod>> =
        pods.split('|').filter(|text| !text.trim().is_empty()).map(|text| pod(text, &set)).collect();
    let spec = set.spec.as_ref().expect("a spec");
    let history = History::of(&spec.template, vec![revision(&set, 1)]);
    let retries = Retries::from([(
        "sore".to_owned(),
        plan::FailedPodRetry {
            pause: std::time::Duration::from_secs(60),
            since: now() - SignedDuration::from_secs(1),
        },
    )]);
    let snapshot = DaemonSetSnapshot {
        set: &set,
        spec,
        nodes: &nodes,
        pods: &pods,
        history: &history,
        retries: &retries,
        now: now(),
    };
    expected.assert_eq(&render(&plan(&snapshot, true)));
}

#[test]
fn one_pod_per_matching_node() {
    let one = || rolling(json!(1), json!(0));
    check(
        one(),
        "a | b hdd | c",
        "",
        expect![[r#"
        delete [] create [a c]
    "#]],
    );
    check(
        one(),
        "a | b hdd | c",
        "p b ready | q a ready | r a | s c ready going",
        expect![[r#"
        delete [r p] create []
    "#]],
    );
    check(
        one(),
        "a",
        "p a ready",
        expect![[r#"
        status 1 desired 1 current 0 misscheduled 1 ready 1 updated 1 available 0 unavailable
    "#]],
    );
    check(
        one(),
        "a | b k:NoSchedule | c k:NoExecute",
        "p a ready | q b ready | r c ready",
        expect![[r#"
        delete [r] create []
    "#]],
    );
    check(
        one(),
        "a | b k:NoSchedule",
        "p a ready | q b ready",
        expect![[r#"
        status 1 desired 1 current 1 misscheduled 1 ready 1 updated 1 available 0 unavailable
    "#]],
    );
    // Daemon pods tolerate node problems.
    check(
        one(),
        "a node.kubernetes.io/unreachable:NoExecute",
        "p a ready",
        expect![[r#"
        status 1 desired 1 current 0 misscheduled 1 ready 1 updated 1 available 0 unavailable
    "#]],
    );
    check(
        one(),
        "a | sore",
        "p a Failed | q sore Failed",
        expect![[r#"
        delete [p] create []
        event FailedDaemonPod: Found failed daemon pod x/p on node a, will try to kill it
        again at 2026-01-01T12:00:59Z
    "#]],
    );
    check(
        one(),
        "a",
        "p a Succeeded",
        expect![[r#"
        delete [p] create []
        event SucceededDaemonPod: Found succeeded daemon pod x/p on node a, will try to delete it
    "#]],
    );
    // Pod q is unscheduled and its node does not exist, so it is never scheduled.
    check(
        one(),
        "a",
        "p a ready | q gone waiting | r gone",
        expect![[r#"
        delete [q] create []
    "#]],
    );
}

#[test]
fn rolling_update_respects_limits() {
    let nodes = "a | b | c";
    let old = "p a old ready | q b old ready | r c old ready";
    check(
        rolling(json!(1), json!(0)),
        nodes,
        old,
        expect![[r#"
        delete [p] create []
    "#]],
    );
    check(
        rolling(json!("50%"), json!(0)),
        nodes,
        old,
        expect![[r#"
        delete [p q] create []
    "#]],
    );
    check(
        json!({"type": "OnDelete"}),
        nodes,
        old,
        expect![[r#"
        status 3 desired 3 current 0 misscheduled 3 ready 0 updated 3 available 0 unavailable
    "#]],
    );
    check(
        rolling(json!(1), json!(0)),
        nodes,
        "p a | q b old ready | r c old ready",
        expect![[r#"
        status 3 desired 3 current 0 misscheduled 2 ready 1 updated 2 available 1 unavailable
    "#]],
    );
    check(
        rolling(json!(1), json!(0)),
        nodes,
        "p a ready | q b old | r c old ready",
        expect![[r#"
        delete [q] create []
    "#]],
    );
    check(
        rolling(json!(0), json!(1)),
        nodes,
        old,
        expect![[r#"
        delete [] create [a]
    "#]],
    );
    check(
        rolling(json!(0), json!(1)),
        nodes,
        "p a | o a old ready | q b old ready | r c old ready",
        expect![[r#"
            status 3 desired 3 current 0 misscheduled 3 ready 0 updated 3 available 0 unavailable
        "#]],
    );
    check(
        rolling(json!(0), json!(1)),
        nodes,
        "p a ready | o a old ready | q b old ready | r c old ready",
        expect![[r#"
            delete [o] create []
        "#]],
    );
    check(
        rolling(json!(0), json!(1)),
        nodes,
        "p a ready | q b old ready | r c old",
        expect![[r#"
        delete [] create [c b]
    "#]],
    );
}

#[test]
fn pod_has_node_affinity_and_daemon_tolerations() {
    let mut set = set(rolling(json!(1), json!(0)), "i");
    set.metadata.annotations = Some([("deprecated.daemonset.template.generation".into(), "3".into())].into());
    let pod = pods::pod(&set, "a", "hash");
    assert_eq!(pods::target_node(&pod), Some("a"));
    assert_eq!((pod.label(POD_REVISION), pod.label("pod-template-generation")), (Some("hash"), Some("3")));
    assert!(pods::is_updated(&pod, &set, "other"));
    let tolerations = pod.spec.and_then(|spec| spec.tolerations).unwrap_or_default();
    let keys: Vec<&str> =
        tolerations.iter().filter_map(|known| known.key.as_deref()?.split('/').nth(1)).collect();
    assert_eq!(
        keys,
        ["not-ready", "unreachable", "disk-pressure", "memory-pressure", "pid-pressure", "unschedulable"]
    );
}

/// A set, its nodes and pods, with an executor for the planned steps.
struct Model {
    set: DaemonSet,
    nodes: Vec<Arc<Node>>,
    pods: Vec<Pod>,
    revisions: Vec<Arc<ControllerRevision>>,
    created_count: usize,
    now: Timestamp,
}

impl Model {
    fn plan(&self, may_change_pods: bool) -> (Plan, History) {
        let pods: Vec<Arc<Pod>> = self.pods.iter().cloned().map(Arc::new).collect();
        let spec = self.set.spec.as_ref().expect("a spec");
        let history = History::of(&spec.template, self.revisions.clone());
        let snapshot = DaemonSetSnapshot {
            set: &self.set,
            spec,
            nodes: &self.nodes,
            pods: &pods,
            history: &history,
            retries: &Retries::new(),
            now: self.now,
        };
        (plan(&snapshot, may_change_pods), history)
    }

    /// Applies one step. Returns `false` if there is none.
    fn step(&mut self) -> bool {
        let (Plan { step, .. }, history) = self.plan(true);
        let hash = history.latest().and_then(|revision| revision.label(POD_REVISION)).unwrap_or_default();
        match step {
            Step::Done => return false,
            Step::Revise(MissingRevision::Create { number }) => {
                self.revisions.push(revision(&self.set, number))
            }
            Step::Revise(MissingRevision::SetNumber { revision, number }) => {
                self.revisions.retain(|known| known.name() != revision.name());
                self.revisions.push(Arc::new(ControllerRevision { revision: number, ..(*revision).clone() }));
            }
            Step::MergeRevisions { .. } => panic!("a template has one revision"),
            Step::TruncateHistory(old) => self.revisions.retain(|known| !old.contains(known)),
            Step::Status(status) => self.set.status = Some(status),
            Step::Pods(change) => {
                let deleted: Vec<&str> = change.delete.iter().map(|pod| pod.uid()).collect();
                self.pods.retain(|pod| !deleted.contains(&pod.uid()));
                for node in &change.create {
                    self.created_count += 1;
                    let mut new_pod = pods::pod(&self.set, node, hash);
                    new_pod.metadata.name = Some(format!("pod-{}", self.created_count));
                    new_pod.metadata.uid = new_pod.metadata.name.clone();
                    new_pod.spec.get_or_insert_default().node_name = Some(node.clone());
                    let created =
                        self.now + SignedDuration::from_secs(i64::try_from(self.created_count).expect("few"));
                    new_pod.metadata.creation_timestamp =
                        serde_json::from_value(json!(created.to_string())).expect("a time");
                    new_pod.status = Some(Default::default());
                    self.pods.push(new_pod);
                }
            }
        }
        true
    }

    fn make_pod_ready(&mut self, choice: usize) {
        let ready = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True",
            "lastTransitionTime": self.now.to_string()}]});
        let mut waiting: Vec<&mut Pod> = self.pods.iter_mut().filter(|pod| !pods_of::is_ready(pod)).collect();
        let count = waiting.len().max(1);
        if let Some(pod) = waiting.get_mut(choice % count) {
            pod.status = serde_json::from_value(ready).expect("a status");
        }
    }

    fn run_until_stable(&mut self) {
        for _ in 0..500 {
            if !self.step() {
                if self.pods.iter().all(pods_of::is_ready) {
                    return;
                }
                self.make_pod_ready(0);
            }
        }
        panic!("the plan does not converge: {}", render(&self.plan(true).0));
    }

    fn nodes_with_ready_pod(&self) -> usize {
        let has_ready_pod = |node: &&Arc<Node>| {
            let here = self.pods.iter().filter(|pod| pods_of::node(pod) == node.name());
            here.into_iter().any(pods_of::is_ready)
        };
        self.nodes.iter().filter(has_ready_pod).count()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// In whatever order pods become ready, a rollout stays within its limits and completes.
    #[test]
    fn rollout_stays_within_limits(
        count in 1usize..7,
        limit in 1usize..4,
        with_surge in any::<bool>(),
        steps in prop::collection::vec((any::<bool>(), 0usize..9, 0usize..4), 0..80),
    ) {
        let strategy = if with_surge { rolling(json!(0), json!(limit)) } else { rolling(json!(limit), json!(0)) };
        let mut model = Model {
            set: set(strategy, "image-0"),
            nodes: (0..count).map(|i| node(&format!("node-{i}"))).collect(),
            pods: vec![],
            revisions: vec![],
            created_count: 0,
            now: now(),
        };
        model.run_until_stable();
        for (sync, choice, image) in steps {
            match (sync, choice) {
                (true, _) => _ = model.step(),
                (false, 0) => {
                    let template = &mut model.set.spec.as_mut().expect("a spec").template;
                    let containers = &mut template.spec.as_mut().expect("a pod").containers;
                    containers[0].image = Some(format!("image-{image}"));
                }
                (false, choice) => model.make_pod_ready(choice),
            }
            let (max_pods, min_ready) = if with_surge { (count + limit, count) } else { (count, count.saturating_sub(limit)) };
            prop_assert!(model.pods.len() <= max_pods, "{} pods for {} nodes", model.pods.len(), count);
            prop_assert!(model.nodes_with_ready_pod() >= min_ready, "{} of {} nodes served", model.nodes_with_ready_pod(), count);
        }
        model.run_until_stable();
        let (last, history) = model.plan(true);
        prop_assert_eq!(render(&last), "rest\n");
        let hash = history.latest().and_then(|revision| revision.label(POD_REVISION));
        prop_assert!(model.pods.iter().all(|pod| pod.label(POD_REVISION) == hash));
        prop_assert_eq!(model.pods.len(), count);
        prop_assert!(model.revisions.len() <= 2);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_follow_node_labels_on_api_server() {
    let test_cluster = TestCluster::start(&["daemonset-controller"]).await;
    let mut daemon_set = set(rolling(json!(1), json!(0)), "i");
    daemon_set.metadata.uid = None;
    daemon_set.metadata.namespace = Some("default".to_owned());
    test_cluster.client.create(&daemon_set).await.expect("a set");
    for name in ["a", "b"] {
        let node_object = json!({"metadata": {"name": name, "labels": {"disk": "ssd"}}});
        let node =
            test_cluster.client.create::<Node>(&serde_json::from_value(node_object).expect("a node")).await;
        // A new node has a not-ready taint.
        let ready = Patch::Merge(json!({"spec": {"taints": null}}));
        test_cluster.client.patch::<Node>(&node.expect("a node").key(), &ready).await.expect("a node");
    }
    let status = wait_for("two pods", || async {
        let set = test_cluster.client.get::<DaemonSet>(&daemon_set.key()).await.expect("the set");
        set.status.filter(|status| status.current_number_scheduled == 2)
    })
    .await;
    assert_eq!((status.desired_number_scheduled, status.number_ready), (2, 0));
    let pods = test_cluster.client.list::<Pod>("default").await.expect("pods");
    let mut targets: Vec<&str> = pods.iter().filter_map(pods::target_node).collect();
    targets.sort_unstable();
    assert_eq!(targets, ["a", "b"]);
    let revisions = test_cluster.client.list::<ControllerRevision>("default").await.expect("revisions");
    assert_eq!(revisions.len(), 1);
    let label_patch = Patch::Merge(json!({"metadata": {"labels": {"disk": "hdd"}}}));
    test_cluster.client.patch::<Node>(&Key::new("", "b"), &label_patch).await.expect("a node");
    wait_for("one pod", || async {
        let set = test_cluster.client.get::<DaemonSet>(&daemon_set.key()).await.expect("the set");
        set.status.filter(|status| status.desired_number_scheduled == 1 && status.number_misscheduled == 0)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn creates_no_pods_for_deleted_set() {
    let test_cluster = TestCluster::start(&[]).await;
    let node = json!({"metadata": {"name": "a", "labels": {"disk": "ssd"}}});
    let node = test_cluster.client.create::<Node>(&serde_json::from_value(node).expect("a node")).await;
    let ready = Patch::Merge(json!({"spec": {"taints": null}}));
    test_cluster.client.patch::<Node>(&node.expect("a node").key(), &ready).await.expect("a node");
    let mut daemon_set = set(rolling(json!(1), json!(0)), "i");
    daemon_set.metadata.uid = None;
    daemon_set.metadata.namespace = Some("default".to_owned());
    let start_caches = |caches: &reconcile::Caches| {
        let _ = (caches.daemon_sets(), caches.pods(), caches.nodes(), caches.controller_revisions());
    };
    let ctx = test_cluster
        .with_deleted_owner("daemonset-controller", &daemon_set, "currentNumberScheduled", start_caches)
        .await;
    let done = reconcile(&ctx, &AllRetries::default(), &daemon_set.key()).await;
    assert_eq!(done.expect("nothing to do"), ReconcileAction::AwaitChange);
    test_cluster.assert_no_pods().await;
}
