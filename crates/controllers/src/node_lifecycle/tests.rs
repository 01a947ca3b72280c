use expect_test::{Expect, expect};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use proptest::prelude::*;
use reconcile::{Key, Object, Patch, Silence};
use serde_json::{Value, json};

use super::health::{self, Health};
use super::plan::{self, Leaving, NOT_READY, UNREACHABLE};
use super::zones::{Admission, Shift, Zones};
use crate::rig::{Rig, until};

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).expect("a time")
}

/// `Ready=True MemoryPressure=False unschedulable taint:key:effect`
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
            let (status, beat) = status.split_once('@').unwrap_or((status, "0"));
            let beat = at(beat.parse().expect("a second")).to_string();
            let condition = json!({"type": kind, "status": status, "lastHeartbeatTime": beat});
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
fn nodes_are_heard_by_status_or_lease() {
    let never = Health::observe(None, &node(""), None, at(30));
    assert_eq!(never.silent_at(Silence::default()), at(60), "a minute from its creation to its first word");
    let first = Health::observe(Some(never), &node("Ready=True@40"), None, at(41));
    assert_eq!(first.silent_at(Silence::default()), at(91));
    let same = Health::observe(Some(first.clone()), &node("Ready=True@40"), None, at(70));
    assert_eq!(same.silent_at(Silence::default()), at(91), "looking is not hearing");
    let beat = Health::observe(Some(same.clone()), &node("Ready=True@71"), None, at(72));
    assert_eq!(beat.silent_at(Silence::default()), at(122));
    let renewed = Health::observe(Some(same), &node("Ready=True@40"), Some(&lease(5)), at(80));
    assert_eq!(renewed.silent_at(Silence::default()), at(130), "our clock counts, not the node's");
    let hasty = Silence { grace: SignedDuration::from_secs(20), ..Silence::default() };
    assert_eq!(renewed.silent_at(hasty), at(100));
    let old = Health::observe(Some(renewed), &node("Ready=True@40"), Some(&lease(5)), at(90));
    assert_eq!(old.silent_at(Silence::default()), at(130));
}

#[test]
fn nothing_is_known_of_silent_nodes() {
    let silent = node("Ready=True MemoryPressure=False");
    let conditions = health::unknown(&silent, at(100)).expect("other conditions");
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
    assert_eq!(health::unknown(&known, at(200)), None);
}

#[track_caller]
fn check_taints(text: &str, leaving: Leaving, expected: Expect) {
    let node = node(text);
    let found = plan::taints(&node, leaving, at(0)).map(|taints| {
        let taints = taints.iter().map(|taint| format!("{}:{}", taint.key, taint.effect));
        taints.collect::<Vec<_>>().join(" ")
    });
    expected.assert_eq(found.as_deref().unwrap_or("as it is"));
    if let Some(taints) = plan::taints(&node, leaving, at(0)) {
        let mut after = node;
        after.spec.get_or_insert_default().taints = Some(taints);
        assert_eq!(plan::taints(&after, leaving, at(9)), None);
    }
}

#[test]
fn taints_follow_conditions() {
    check_taints("Ready=True", Leaving::None, expect!["as it is"]);
    check_taints("Ready=True taint:x/y:NoSchedule", Leaving::None, expect!["as it is"]);
    check_taints(
        "Ready=True unschedulable",
        Leaving::None,
        expect!["node.kubernetes.io/unschedulable:NoSchedule"],
    );
    check_taints("Ready=False", Leaving::Keep, expect!["node.kubernetes.io/not-ready:NoSchedule"]);
    check_taints(
        "Ready=Unknown DiskPressure=True",
        Leaving::For(UNREACHABLE),
        expect![
            "node.kubernetes.io/unreachable:NoSchedule node.kubernetes.io/disk-pressure:NoSchedule node.kubernetes.io/unreachable:NoExecute"
        ],
    );
    check_taints(
        "Ready=False taint:unreachable:NoExecute taint:unreachable:NoSchedule",
        Leaving::For(NOT_READY),
        expect!["node.kubernetes.io/not-ready:NoSchedule node.kubernetes.io/not-ready:NoExecute"],
    );
    check_taints(
        "Ready=True taint:not-ready:NoExecute taint:x/y:NoExecute",
        Leaving::None,
        expect!["x/y:NoExecute"],
    );
    check_taints(
        "Ready=False taint:not-ready:NoSchedule taint:not-ready:NoExecute",
        Leaving::Keep,
        expect!["as it is"],
    );
}

#[test]
fn zones_decide_how_quickly_pods_leave() {
    let mut zones = Zones::default();
    for i in 0..9 {
        zones.set(&format!("a{i}"), "a", true);
    }
    zones.set("b", "b", true);
    // One after the other while the zone is well.
    zones.set("a0", "a", false);
    assert_eq!(zones.admit("a", at(0)), Admission::Now);
    assert_eq!(zones.admit("a", at(5)), Admission::At(at(10)));
    assert_eq!(zones.admit("a", at(10)), Admission::Now);
    // Nobody while most of a small zone is away.
    for i in 1..4 {
        assert_eq!(zones.set(&format!("a{i}"), "a", false), Shift::Nothing);
    }
    assert_eq!(zones.set("a4", "a", false), Shift::Paces(vec!["a".into()]));
    assert_eq!(zones.admit("a", at(100)), Admission::Never);
    // All of a zone is away: it is the zone.
    for i in 5..8 {
        zones.set(&format!("a{i}"), "a", false);
    }
    assert_eq!(zones.set("a8", "a", false), Shift::Paces(vec!["a".into()]));
    assert_eq!(zones.admit("a", at(100)), Admission::Now);
    // All of everything is away: it is us.
    assert_eq!(zones.set("b", "b", false), Shift::AllAway);
    assert_eq!(zones.admit("a", at(200)), Admission::Never);
    assert_eq!(zones.set("b", "b", true), Shift::SomeBack);
    assert_eq!(zones.admit("a", at(200)), Admission::Now);
}

proptest! {
    /// However nodes come, go and fall silent, a zone never taints two nodes within ten seconds, and none while
    /// all are away.
    #[test]
    fn pods_never_leave_too_quickly(steps in prop::collection::vec((0..6u8, 0..4u8, 0..5i64), 1..80)) {
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
                    let away = zones.all_away();
                    if zones.admit(&name, at(now)) == Admission::Now {
                        prop_assert!(!away);
                        if let Some(last) = last[zone] {
                            prop_assert!(now - last >= 10 || !zones.all_away());
                        }
                        last[zone] = Some(now);
                    }
                }
            }
        }
    }
}

async fn make(rig: &Rig, path: &str, value: Value) {
    rig.client.request(http::Method::POST, path, Some(&value)).await.expect("an object");
}

async fn ready(rig: &Rig, node: &str, status: &str) {
    let time = Timestamp::now().to_string();
    let condition = json!({"type": "Ready", "status": status, "reason": "x", "message": "x", "lastHeartbeatTime": time, "lastTransitionTime": time});
    let patch = Patch::Strategic(json!({"status": {"conditions": [condition]}}));
    let _: Node = rig.client.patch_status(&Key::new("", node), &patch).await.expect("a status");
}

#[tokio::test]
async fn nodes_that_are_not_ready_are_tainted() {
    let rig = Rig::start(&["node-lifecycle-controller"]).await;
    for name in ["one", "two"] {
        let labels = json!({"kubernetes.io/os": "linux"});
        make(&rig, "/api/v1/nodes", json!({"metadata": {"name": name, "labels": labels}})).await;
        ready(&rig, name, "True").await;
    }
    let key = Key::new("", "one");
    let labelled = || async {
        let node: Node = rig.client.get(&key).await.ok()?;
        (node.label("beta.kubernetes.io/os") == Some("linux")).then_some(())
    };
    until("the older label", labelled).await;
    ready(&rig, "one", "False").await;
    let tainted = |wanted: usize| {
        let rig = &rig;
        let key = &key;
        async move {
            let node: Node = rig.client.get(key).await.ok()?;
            let taints = node.spec.and_then(|spec| spec.taints).unwrap_or_default();
            let ours = taints.iter().filter(|taint| taint.key == NOT_READY).count();
            (ours == wanted).then_some(())
        }
    };
    until("the taints", || tainted(2)).await;
    let spec = json!({"nodeName": "one", "tolerations": [{"operator": "Exists"}], "containers": [{"name": "c", "image": "i"}]});
    make(&rig, "/api/v1/namespaces/default/pods", json!({"metadata": {"name": "p"}, "spec": spec})).await;
    ready(&rig, "one", "True").await;
    until("no taints", || tainted(0)).await;
    let pods: Vec<Pod> = rig.client.list("default").await.expect("pods");
    assert_eq!(pods.len(), 1);
}
