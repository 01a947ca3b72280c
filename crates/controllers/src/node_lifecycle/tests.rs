use expect_test::{Expect, expect};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use proptest::prelude::*;
use reconcile::{Key, NodeMonitorConfig, Object, Patch};
use serde_json::{Value, json};

use super::health::{self, NodeHealth};
use super::plan::{self, NOT_READY, NoExecuteTaint, UNREACHABLE};
use super::zones::{RateLimit, ZoneChange, Zones};
use crate::test_cluster::{TestCluster, wait_for};

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).expect("a time")
}

/// A node given as `Ready=True MemoryPressure=False unschedulable taint:key:effect`.
fn node(text: &str) -> Node {
    let mut value = json!({
        "metadata": {"name": "n", "uid": "u", "creationTimestamp": at(0).to_string()},
        "spec": {"taints": []}, "status": {"conditions": []},
    });
    for word in text.split_whitespace() {
        if let Some(taint) = word.strip_prefix("taint:") {
            let (key, effect) = taint.split_once(':').expect("key and effect");
            let key = if key.contains('/') { key.to_owned() } else { format!("node.kubernetes.io/{key}") };
            value["spec"]["taints"]
                .as_array_mut()
                .expect("a list")
                .push(json!({"key": key, "effect": effect}));
        } else if let Some((kind, status)) = word.split_once('=') {
            let (status, heartbeat) = status.split_once('@').unwrap_or((status, "0"));
            let heartbeat = at(heartbeat.parse().expect("a second")).to_string();
            let condition = json!({"type": kind, "status": status, "lastHeartbeatTime": heartbeat});
            value["status"]["conditions"].as_array_mut().expect("a list").push(condition);
        } else {
            value["spec"][word] = json!(true);
        }
    }
    serde_json::from_value(value).expect("a node")
}

fn lease(second: i64) -> Lease {
    let time = format!("{}", at(second).strftime("%Y-%m-%dT%H:%M:%S.000000Z"));
    serde_json::from_value(json!({"metadata": {"name": "n"}, "spec": {"renewTime": time}})).expect("a lease")
}

#[test]
fn probe_timestamp_follows_status_and_lease() {
    let never = NodeHealth::observe(None, &node(""), None, at(30));
    assert_eq!(
        never.grace_period_end(NodeMonitorConfig::default()),
        at(60),
        "startup grace period from creation"
    );
    let first = NodeHealth::observe(Some(never), &node("Ready=True@40"), None, at(41));
    assert_eq!(first.grace_period_end(NodeMonitorConfig::default()), at(91));
    let same = NodeHealth::observe(Some(first.clone()), &node("Ready=True@40"), None, at(70));
    assert_eq!(
        same.grace_period_end(NodeMonitorConfig::default()),
        at(91),
        "a sync without a new heartbeat must not extend the grace period"
    );
    let heartbeat = NodeHealth::observe(Some(same.clone()), &node("Ready=True@71"), None, at(72));
    assert_eq!(heartbeat.grace_period_end(NodeMonitorConfig::default()), at(122));
    let renewed = NodeHealth::observe(Some(same), &node("Ready=True@40"), Some(&lease(5)), at(80));
    assert_eq!(
        renewed.grace_period_end(NodeMonitorConfig::default()),
        at(130),
        "the local clock counts, not the node's"
    );
    let short_grace =
        NodeMonitorConfig { grace_period: SignedDuration::from_secs(20), ..NodeMonitorConfig::default() };
    assert_eq!(renewed.grace_period_end(short_grace), at(100));
    let old = NodeHealth::observe(Some(renewed), &node("Ready=True@40"), Some(&lease(5)), at(90));
    assert_eq!(old.grace_period_end(NodeMonitorConfig::default()), at(130));
}

#[test]
fn conditions_become_unknown_after_grace_period() {
    let silent = node("Ready=True MemoryPressure=False");
    let conditions = health::unknown_conditions(&silent, at(100)).expect("other conditions");
    let lines: Vec<String> = conditions
        .iter()
        .map(|c| {
            format!(
                "{} {} {} {}\n",
                c.type_,
                c.status,
                c.reason.as_deref().unwrap_or(""),
                c.message.as_deref().unwrap_or("")
            )
        })
        .collect();
    expect![[r#"
        Ready Unknown NodeStatusUnknown Kubelet stopped posting node status.
        MemoryPressure Unknown NodeStatusUnknown Kubelet stopped posting node status.
        DiskPressure Unknown NodeStatusNeverUpdated Kubelet never posted node status.
        PIDPressure Unknown NodeStatusNeverUpdated Kubelet never posted node status.
    "#]]
    .assert_eq(&lines.concat());
    let mut known = silent;
    known.status.get_or_insert_default().conditions = Some(conditions);
    assert_eq!(health::unknown_conditions(&known, at(200)), None);
}

#[track_caller]
fn check_taints(text: &str, no_execute: NoExecuteTaint, expected: Expect) {
    let node = node(text);
    let found = plan::taints(&node, no_execute, at(0)).map(|taints| {
        let taints = taints.iter().map(|taint| format!("{}:{}", taint.key, taint.effect));
        taints.collect::<Vec<_>>().join(" ")
    });
    expected.assert_eq(found.as_deref().unwrap_or("as it is"));
    if let Some(taints) = plan::taints(&node, no_execute, at(0)) {
        let mut after = node;
        after.spec.get_or_insert_default().taints = Some(taints);
        assert_eq!(plan::taints(&after, no_execute, at(9)), None);
    }
}

#[test]
fn taints_match_node_conditions() {
    check_taints("Ready=True", NoExecuteTaint::None, expect!["as it is"]);
    check_taints("Ready=True taint:x/y:NoSchedule", NoExecuteTaint::None, expect!["as it is"]);
    check_taints(
        "Ready=True unschedulable",
        NoExecuteTaint::None,
        expect!["node.kubernetes.io/unschedulable:NoSchedule"],
    );
    check_taints("Ready=False", NoExecuteTaint::Keep, expect!["node.kubernetes.io/not-ready:NoSchedule"]);
    check_taints(
        "Ready=Unknown DiskPressure=True",
        NoExecuteTaint::For(UNREACHABLE),
        expect![
            "node.kubernetes.io/unreachable:NoSchedule node.kubernetes.io/disk-pressure:NoSchedule node.kubernetes.io/unreachable:NoExecute"
        ],
    );
    check_taints(
        "Ready=False taint:unreachable:NoExecute taint:unreachable:NoSchedule",
        NoExecuteTaint::For(NOT_READY),
        expect!["node.kubernetes.io/not-ready:NoSchedule node.kubernetes.io/not-ready:NoExecute"],
    );
    check_taints(
        "Ready=True taint:not-ready:NoExecute taint:x/y:NoExecute",
        NoExecuteTaint::None,
        expect!["x/y:NoExecute"],
    );
    check_taints(
        "Ready=False taint:not-ready:NoSchedule taint:not-ready:NoExecute",
        NoExecuteTaint::Keep,
        expect!["as it is"],
    );
}

#[test]
fn eviction_rate_follows_zone_state() {
    let mut zones = Zones::default();
    for i in 0..9 {
        zones.set(&format!("a{i}"), "a", true);
    }
    zones.set("b", "b", true);
    // The normal rate while the zone is healthy.
    zones.set("a0", "a", false);
    assert_eq!(zones.try_accept("a", at(0)), RateLimit::Now);
    assert_eq!(zones.try_accept("a", at(5)), RateLimit::At(at(10)));
    assert_eq!(zones.try_accept("a", at(10)), RateLimit::Now);
    // No evictions in a small zone with partial disruption.
    for i in 1..4 {
        assert_eq!(zones.set(&format!("a{i}"), "a", false), ZoneChange::Nothing);
    }
    assert_eq!(zones.set("a4", "a", false), ZoneChange::RatesChanged(vec!["a".into()]));
    assert_eq!(zones.try_accept("a", at(100)), RateLimit::Never);
    // Full disruption of one zone: the normal rate applies again.
    for i in 5..8 {
        zones.set(&format!("a{i}"), "a", false);
    }
    assert_eq!(zones.set("a8", "a", false), ZoneChange::RatesChanged(vec!["a".into()]));
    assert_eq!(zones.try_accept("a", at(100)), RateLimit::Now);
    // Full disruption of all zones: no evictions, because the fault is probably on our side.
    assert_eq!(zones.set("b", "b", false), ZoneChange::AllDisrupted);
    assert_eq!(zones.try_accept("a", at(200)), RateLimit::Never);
    assert_eq!(zones.set("b", "b", true), ZoneChange::SomeReady);
    assert_eq!(zones.try_accept("a", at(200)), RateLimit::Now);
}

proptest! {
    /// For any changes of nodes and readiness, a zone never taints two nodes within ten seconds, and none
    /// while all zones are fully disrupted.
    #[test]
    fn eviction_rate_is_never_exceeded(steps in prop::collection::vec((0..6u8, 0..4u8, 0..5i64), 1..80)) {
        let mut zones = Zones::default();
        let mut now = 0;
        let mut last: [Option<i64>; 2] = [None, None];
        for (node, what, pause) in steps {
            now += pause;
            let zone = usize::from(node % 2);
            let name = format!("z{zone}");
            match what {
                0 => drop(zones.remove(&node.to_string())),
                1 => drop(zones.set(&node.to_string(), &name, true)),
                2 => drop(zones.set(&node.to_string(), &name, false)),
                _ => {
                    let known = zones.set(&node.to_string(), &name, false);
                    drop(known);
                    let all_disrupted = zones.all_disrupted();
                    if zones.try_accept(&name, at(now)) == RateLimit::Now {
                        prop_assert!(!all_disrupted);
                        if let Some(last) = last[zone] {
                            prop_assert!(now - last >= 10 || !zones.all_disrupted());
                        }
                        last[zone] = Some(now);
                    }
                }
            }
        }
    }
}

async fn create(test_cluster: &TestCluster, path: &str, value: Value) {
    test_cluster.client.request(http::Method::POST, path, Some(&value)).await.expect("an object");
}

async fn set_ready(test_cluster: &TestCluster, node: &str, status: &str) {
    let time = Timestamp::now().to_string();
    let condition = json!({"type": "Ready", "status": status, "reason": "x", "message": "x", "lastHeartbeatTime": time, "lastTransitionTime": time});
    let patch = Patch::Strategic(json!({"status": {"conditions": [condition]}}));
    let _: Node = test_cluster.client.patch_status(&Key::new("", node), &patch).await.expect("a status");
}

#[tokio::test]
async fn taints_unready_node_and_clears_taints_when_ready() {
    let test_cluster = TestCluster::start(&["node-lifecycle-controller"]).await;
    for name in ["one", "two"] {
        let labels = json!({"kubernetes.io/os": "linux"});
        create(&test_cluster, "/api/v1/nodes", json!({"metadata": {"name": name, "labels": labels}})).await;
        set_ready(&test_cluster, name, "True").await;
    }
    let key = Key::new("", "one");
    let has_label = || async {
        let node: Node = test_cluster.client.get(&key).await.ok()?;
        (node.label("beta.kubernetes.io/os") == Some("linux")).then_some(())
    };
    wait_for("the deprecated label", has_label).await;
    set_ready(&test_cluster, "one", "False").await;
    let tainted = |expected: usize| {
        let test_cluster = &test_cluster;
        let key = &key;
        async move {
            let node: Node = test_cluster.client.get(key).await.ok()?;
            let taints = node.spec.and_then(|spec| spec.taints).unwrap_or_default();
            let matching = taints.iter().filter(|taint| taint.key == NOT_READY).count();
            (matching == expected).then_some(())
        }
    };
    wait_for("the taints", || tainted(2)).await;
    let spec = json!({"nodeName": "one", "tolerations": [{"operator": "Exists"}], "containers": [{"name": "c", "image": "i"}]});
    create(
        &test_cluster,
        "/api/v1/namespaces/default/pods",
        json!({"metadata": {"name": "p"}, "spec": spec}),
    )
    .await;
    set_ready(&test_cluster, "one", "True").await;
    wait_for("no taints", || tainted(0)).await;
    let pods: Vec<Pod> = test_cluster.client.list("default").await.expect("pods");
    assert_eq!(pods.len(), 1);
}
