//! Nodes and pods in words, steps out; a model in which templates change; and a real API server.

use expect_test::{Expect, expect};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::apps::v1::ControllerRevision;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::history::Revise;
use crate::pod as pods_of;
use crate::rig::{Rig, until};

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

/// `name word...`, where a word is `hdd`, or `TAINT:EFFECT`.
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
    Arc::new(history::revision(set, template, POD_REVISION, number, None))
}

/// `name node word...`, where a word is `old`, `ready`, `going`, `waiting` or a phase.
fn pod(text: &str, set: &DaemonSet) -> Arc<Pod> {
    let mut words = text.split_whitespace();
    let (name, node) = (words.next().expect("a name"), words.next().expect("a node"));
    let hash = revision(set, 1).label(POD_REVISION).expect("a hash").to_owned();
    let mut made = pods::pod(set, node, &hash);
    made.metadata.name = Some(name.to_owned());
    made.metadata.uid = Some(name.to_owned());
    made.spec.get_or_insert_default().node_name = Some(node.to_owned());
    let mut status = json!({"phase": "Running"});
    for word in words {
        match word {
            "old" => {
                let labels = made.metadata.labels.get_or_insert_default();
                labels.insert(POD_REVISION.to_owned(), "old".to_owned());
            }
            "ready" => {
                status["conditions"] = json!([{"type": "Ready", "status": "True",
                "lastTransitionTime": "2026-01-01T00:00:00Z"}])
            }
            "going" => {
                made.metadata.deletion_timestamp = serde_json::from_value(json!(NOW)).expect("a time");
            }
            "waiting" => made.spec.get_or_insert_default().node_name = None,
            phase => status["phase"] = json!(phase),
        }
    }
    made.status = serde_json::from_value(status).expect("a status");
    Arc::new(made)
}

fn told(plan: &Plan) -> String {
    let names =
        |pods: &[Arc<Pod>]| pods.iter().map(|pod| pod.name().to_owned()).collect::<Vec<_>>().join(" ");
    let mut text = match &plan.step {
        Step::Rest => "rest\n".to_owned(),
        Step::Revise(Revise::Remember { number }) => format!("remember as {number}\n"),
        Step::Revise(Revise::Renumber { number, .. }) => format!("renumber to {number}\n"),
        Step::Merge { drop, relabel, .. } => format!("merge {} relabel {}\n", drop.len(), names(relabel)),
        Step::Trim(old) => format!("trim {}\n", old.len()),
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
    text += &plan.recheck.map_or(String::new(), |at| format!("again at {at}\n"));
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
        plan::Retry {
            pause: std::time::Duration::from_secs(60),
            since: now() - SignedDuration::from_secs(1),
        },
    )]);
    let sight = Sight {
        set: &set,
        spec,
        nodes: &nodes,
        pods: &pods,
        history: &history,
        retries: &retries,
        now: now(),
    };
    expected.assert_eq(&told(&plan(&sight, true)));
}

#[test]
fn every_node_that_fits_has_one_pod() {
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
    // Trouble with the node is no reason.
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
    // The scheduler has not placed it, and never will.
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
fn templates_are_rolled_out() {
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
fn pods_are_bound_to_their_node() {
    let mut set = set(rolling(json!(1), json!(0)), "i");
    set.metadata.annotations = Some([("deprecated.daemonset.template.generation".into(), "3".into())].into());
    let made = pods::pod(&set, "a", "hash");
    assert_eq!(pods::target(&made), Some("a"));
    assert_eq!((made.label(POD_REVISION), made.label("pod-template-generation")), (Some("hash"), Some("3")));
    assert!(pods::is_updated(&made, &set, "other"));
    let tolerations = made.spec.and_then(|spec| spec.tolerations).unwrap_or_default();
    let keys: Vec<&str> =
        tolerations.iter().filter_map(|known| known.key.as_deref()?.split('/').nth(1)).collect();
    assert_eq!(
        keys,
        ["not-ready", "unreachable", "disk-pressure", "memory-pressure", "pid-pressure", "unschedulable"]
    );
}

/// A set, its nodes and pods, and what carries out its steps.
struct Model {
    set: DaemonSet,
    nodes: Vec<Arc<Node>>,
    pods: Vec<Pod>,
    revisions: Vec<Arc<ControllerRevision>>,
    born: usize,
    now: Timestamp,
}

impl Model {
    fn plan(&self, manage: bool) -> (Plan, History) {
        let pods: Vec<Arc<Pod>> = self.pods.iter().cloned().map(Arc::new).collect();
        let spec = self.set.spec.as_ref().expect("a spec");
        let history = History::of(&spec.template, self.revisions.clone());
        let sight = Sight {
            set: &self.set,
            spec,
            nodes: &self.nodes,
            pods: &pods,
            history: &history,
            retries: &Retries::new(),
            now: self.now,
        };
        (plan(&sight, manage), history)
    }

    /// Carries out one step. `false` when there is none.
    fn step(&mut self) -> bool {
        let (Plan { step, .. }, history) = self.plan(true);
        let hash = history.newest().and_then(|revision| revision.label(POD_REVISION)).unwrap_or_default();
        match step {
            Step::Rest => return false,
            Step::Revise(Revise::Remember { number }) => self.revisions.push(revision(&self.set, number)),
            Step::Revise(Revise::Renumber { revision, number }) => {
                self.revisions.retain(|known| known.name() != revision.name());
                self.revisions.push(Arc::new(ControllerRevision { revision: number, ..(*revision).clone() }));
            }
            Step::Merge { .. } => panic!("a template has one revision"),
            Step::Trim(old) => self.revisions.retain(|known| !old.contains(known)),
            Step::Status(status) => self.set.status = Some(status),
            Step::Pods(change) => {
                let gone: Vec<&str> = change.delete.iter().map(|pod| pod.uid()).collect();
                self.pods.retain(|pod| !gone.contains(&pod.uid()));
                for node in &change.create {
                    self.born += 1;
                    let mut made = pods::pod(&self.set, node, hash);
                    made.metadata.name = Some(format!("pod-{}", self.born));
                    made.metadata.uid = made.metadata.name.clone();
                    made.spec.get_or_insert_default().node_name = Some(node.clone());
                    let created =
                        self.now + SignedDuration::from_secs(i64::try_from(self.born).expect("few"));
                    made.metadata.creation_timestamp =
                        serde_json::from_value(json!(created.to_string())).expect("a time");
                    made.status = Some(Default::default());
                    self.pods.push(made);
                }
            }
        }
        true
    }

    fn ready(&mut self, choice: usize) {
        let ready = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True",
            "lastTransitionTime": self.now.to_string()}]});
        let mut waiting: Vec<&mut Pod> = self.pods.iter_mut().filter(|pod| !pods_of::is_ready(pod)).collect();
        let count = waiting.len().max(1);
        if let Some(pod) = waiting.get_mut(choice % count) {
            pod.status = serde_json::from_value(ready).expect("a status");
        }
    }

    fn settle(&mut self) {
        for _ in 0..500 {
            if !self.step() {
                if self.pods.iter().all(pods_of::is_ready) {
                    return;
                }
                self.ready(0);
            }
        }
        panic!("does not come to rest: {}", told(&self.plan(true).0));
    }

    fn serving(&self) -> usize {
        let serves = |node: &&Arc<Node>| {
            let here = self.pods.iter().filter(|pod| pods_of::node(pod) == node.name());
            here.into_iter().any(pods_of::is_ready)
        };
        self.nodes.iter().filter(serves).count()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever order pods become ready in, a rollout keeps to its limits and comes to an end.
    #[test]
    fn rollouts_keep_their_limits(
        count in 1usize..7,
        limit in 1usize..4,
        surges in any::<bool>(),
        story in prop::collection::vec((any::<bool>(), 0usize..9, 0usize..4), 0..80),
    ) {
        let strategy = if surges { rolling(json!(0), json!(limit)) } else { rolling(json!(limit), json!(0)) };
        let mut model = Model {
            set: set(strategy, "image-0"),
            nodes: (0..count).map(|i| node(&format!("node-{i}"))).collect(),
            pods: vec![],
            revisions: vec![],
            born: 0,
            now: now(),
        };
        model.settle();
        for (looks, choice, image) in story {
            match (looks, choice) {
                (true, _) => _ = model.step(),
                (false, 0) => {
                    let template = &mut model.set.spec.as_mut().expect("a spec").template;
                    let containers = &mut template.spec.as_mut().expect("a pod").containers;
                    containers[0].image = Some(format!("image-{image}"));
                }
                (false, choice) => model.ready(choice),
            }
            let (most, fewest) = if surges { (count + limit, count) } else { (count, count.saturating_sub(limit)) };
            prop_assert!(model.pods.len() <= most, "{} pods for {} nodes", model.pods.len(), count);
            prop_assert!(model.serving() >= fewest, "{} of {} nodes served", model.serving(), count);
        }
        model.settle();
        let (last, history) = model.plan(true);
        prop_assert_eq!(told(&last), "rest\n");
        let hash = history.newest().and_then(|revision| revision.label(POD_REVISION));
        prop_assert!(model.pods.iter().all(|pod| pod.label(POD_REVISION) == hash));
        prop_assert_eq!(model.pods.len(), count);
        prop_assert!(model.revisions.len() <= 2);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_set_follows_its_nodes_on_a_server() {
    let rig = Rig::start(&["daemonset-controller"]).await;
    let mut wanted = set(rolling(json!(1), json!(0)), "i");
    wanted.metadata.uid = None;
    wanted.metadata.namespace = Some("default".to_owned());
    rig.client.create(&wanted).await.expect("a set");
    for name in ["a", "b"] {
        let ssd = json!({"metadata": {"name": name, "labels": {"disk": "ssd"}}});
        let node = rig.client.create::<Node>(&serde_json::from_value(ssd).expect("a node")).await;
        // A new node is tainted until it is ready.
        let ready = Patch::Merge(json!({"spec": {"taints": null}}));
        rig.client.patch::<Node>(&node.expect("a node").key(), &ready).await.expect("a node");
    }
    let status = until("two pods", || async {
        let set = rig.client.get::<DaemonSet>(&wanted.key()).await.expect("the set");
        set.status.filter(|status| status.current_number_scheduled == 2)
    })
    .await;
    assert_eq!((status.desired_number_scheduled, status.number_ready), (2, 0));
    let pods = rig.client.list::<Pod>("default").await.expect("pods");
    let mut targets: Vec<&str> = pods.iter().filter_map(pods::target).collect();
    targets.sort_unstable();
    assert_eq!(targets, ["a", "b"]);
    let revisions = rig.client.list::<ControllerRevision>("default").await.expect("revisions");
    assert_eq!(revisions.len(), 1);
    let hdd = Patch::Merge(json!({"metadata": {"labels": {"disk": "hdd"}}}));
    rig.client.patch::<Node>(&Key::new("", "b"), &hdd).await.expect("a node");
    until("one pod", || async {
        let set = rig.client.get::<DaemonSet>(&wanted.key()).await.expect("the set");
        set.status.filter(|status| status.desired_number_scheduled == 1 && status.number_misscheduled == 0)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_set_that_is_gone_has_no_more_pods() {
    let rig = Rig::start(&[]).await;
    let node = json!({"metadata": {"name": "a", "labels": {"disk": "ssd"}}});
    let node = rig.client.create::<Node>(&serde_json::from_value(node).expect("a node")).await;
    let ready = Patch::Merge(json!({"spec": {"taints": null}}));
    rig.client.patch::<Node>(&node.expect("a node").key(), &ready).await.expect("a node");
    let mut wanted = set(rolling(json!(1), json!(0)), "i");
    wanted.metadata.uid = None;
    wanted.metadata.namespace = Some("default".to_owned());
    let begin = |caches: &reconcile::Caches| {
        let _ = (caches.daemon_sets(), caches.pods(), caches.nodes(), caches.controller_revisions());
    };
    let ctx = rig.gone("daemonset-controller", &wanted, "currentNumberScheduled", begin).await;
    let done = reconcile(&ctx, &AllRetries::default(), &wanted.key()).await;
    assert_eq!(done.expect("nothing to do"), Next::Change);
    rig.has_no_pods().await;
}
